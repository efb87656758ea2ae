package manager_test

import (
	"errors"
	"slices"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestTopologyPolicies(t *testing.T) {
	var gpus, nics []*v1beta1.Device
	for _, id := range []string{"a", "b"} {
		gpus = append(gpus, plugintest.Device("0"+id, true, 0), plugintest.Device("1"+id, true, 1))
	}
	nics = append(nics, plugintest.Device("1", true, 1))
	container := func(name string, gpus, nics int) model.Container {
		return model.Container{Name: name, Limits: map[string]int{gpu: gpus, nic: nics}}
	}
	for name, test := range map[string]struct {
		policy   admission.Policy
		scope    admission.Scope
		pod      model.Pod
		want     []string // the GPUs of all containers
		rejected bool
	}{
		"none takes the first device": {
			policy: admission.PolicyNone, pod: pod("a", container("main", 1, 1)), want: []string{"0a"},
		},
		"single-numa-node takes the GPU beside the NIC": {
			policy: admission.PolicySingleNUMANode, pod: pod("a", container("main", 1, 1)), want: []string{"1a"},
		},
		"restricted takes both GPUs of one node": {
			policy: admission.PolicyRestricted, pod: pod("a", container("main", 2, 0)), want: []string{"0a", "0b"},
		},
		"best-effort crosses nodes if it must": {
			policy: admission.PolicyBestEffort, pod: pod("a", container("main", 3, 1)), want: []string{"0a", "1a", "1b"},
		},
		"single-numa-node does not cross nodes": {
			policy: admission.PolicySingleNUMANode, pod: pod("a", container("main", 3, 0)), rejected: true,
		},
		"the scope container aligns each container": {
			policy: admission.PolicySingleNUMANode, pod: pod("a", container("one", 2, 0), container("two", 2, 0)),
			want: []string{"0a", "0b", "1a", "1b"},
		},
		"the scope pod aligns all containers together": {
			policy: admission.PolicySingleNUMANode, scope: admission.ScopePod,
			pod: pod("a", container("one", 1, 0), container("two", 1, 1)), want: []string{"1a", "1b"},
		},
		"the scope pod rejects what does not fit together": {
			policy: admission.PolicySingleNUMANode, scope: admission.ScopePod,
			pod: pod("a", container("one", 2, 0), container("two", 2, 0)), rejected: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, func(o *manager.Options) {
				o.Topology = admission.Topology{
					Policy: test.policy, Scope: test.scope, Machine: admission.NodesOf(0, 1),
				}
			})
			n.plugin(gpu, gpus...)
			n.plugin(nic, nics...)
			placement, err := n.m.Admit(t.Context(), test.pod, model.Caller{})
			if test.rejected {
				rejected, ok := errors.AsType[*manager.RejectedError](err)
				if !ok || rejected.Reason != manager.ReasonTopology ||
					rejected.Message != "Resources cannot be allocated with Topology locality" {
					t.Errorf("got %+v and %v", placement, err)
				}
				if free := n.free(gpu); len(free) != 4 {
					t.Error("after the rejection free are", free)
				}
				return
			}
			testenv.Must(t, err)
			var got []string
			for _, c := range test.pod.Containers {
				got = append(got, ids(placement, c.Name, gpu)...)
			}
			if slices.Sort(got); !slices.Equal(got, test.want) {
				t.Errorf("the pod has %v, want %v", got, test.want)
			}
		})
	}
}
