package agent

import (
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

const podUID = "0f9c1c1e-8a4f-4b8e-9d6b-1f2a3b4c5d6e"

// entry is what a container of the pod has in the kubelet's checkpoint.
func entry(container, resourceName string, ids ...string) kubelet.Entry {
	return kubelet.Entry{
		PodUID: podUID, ContainerName: container, ResourceName: resourceName, DeviceIDs: map[int64][]string{0: ids},
	}
}

// The kubelet lists no init container, but records its devices until the pod ends.
func TestTheDevicesOfInitContainersAreHeld(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.kubelet.Record(entry("init", gpuResource, f.uuid(1), f.uuid(2)), entry("main", gpuResource, f.uuid(1)))
	f.kubelet.Pods.Set(kubelettest.Pod("ml", "train", "main", gpuResource, f.uuid(1)))
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 4, 0)

	f.reconfigure(func(c *config.Config) {
		c.Sharing.TimeSlicing.Resources = []resource.SharingRule{
			{Name: gpuResource, Rename: "nvidia.com/shared", Replicas: 2},
		}
	})
	e := f.kubelet.WaitListed("nvidia.com/shared", 4, 4)
	const why = "container init of pod ml/train holds it as "
	_, err := f.allocate(e, f.uuid(2)+"::0")
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), why+f.uuid(2)) {
		t.Errorf("another pod gets the GPU of an init container: %v", err)
	}
	f.refuses("GPU 2 is in use by container init of pod ml/train; use --wait to wait until it is free",
		control.Request{Act: control.Reset, Device: "2"})

	// The pod has ended: the kubelet drops it when it is asked for a list, and says so in what it writes.
	f.kubelet.Pods.Set()
	f.kubelet.Record()
	f.kubelet.WaitListed("nvidia.com/shared", 8, 0)
}

// What an administrator has had forgotten is given again.
func TestAHolderIsForgotten(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.kubelet.Record(entry("main", gpuResource, "nvidia0"))
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 0, 4)
	f.logs("it is unknown which GPUs these have, so nobody gets a GPU of this node", 1)
	holders := f.claims().Holders
	if len(holders) != 1 || holders[0].Forget != podUID+"/main/nvidia0" {
		t.Fatalf("the holders are %+v", holders)
	}
	f.refuses("no such holder; see gpu-cdi-plugin claims -o wide: \"x/y\"",
		control.Request{Act: control.Forget, Holder: "x/y"})
	f.does("forgotten until the kubelet has dropped it: "+holders[0].Forget,
		control.Request{Act: control.Forget, Holder: holders[0].Forget, Force: true}) // processes may not be seen here
	f.kubelet.WaitListed(gpuResource, 4, 0)
}

// A test's processes are in no pod.
func TestRunningPods(t *testing.T) {
	t.Parallel()
	testenv.Must(t, exec.CommandContext(t.Context(), "true").Run())
	if pods, _ := runningPods(); pods.UIDs[podUID] {
		t.Errorf("a pod that does not exist has processes: %v", pods)
	}
}
