package agent

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/kubeapi"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/agent/plugin"
	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

const sharedResource = "nvidia.com/gpu.shared"

// byMPS shares GPU 1 by MPS.
func byMPS(c *config.Config) {
	c.MPS = true
	c.Sharing.MPS = resource.MPS{RenameByDefault: true, Resources: []resource.SharingRule{
		{Name: gpuResource, Devices: []resource.Selector{"1"}, Replicas: 2},
	}}
}

// A device that another container has under another name, or whose MPS daemon is not ready, is advertised as unhealthy,
// and no container gets it: the reason says why.
func TestDevicesThatNoContainerCanHave(t *testing.T) {
	t.Parallel()
	none := func(*config.Config) {}
	for name, c := range map[string]struct {
		config             func(*config.Config)
		pod                string // the resource as which a pod has the device, or empty
		id                 string // of the device, where UUID is its UUID
		resource           string
		healthy, unhealthy int
		want               string
	}{
		"a pod has the GPU under another name": {
			none, "acme.com/gpu", "UUID", gpuResource, 3, 1, "container main of pod ns/job holds it as UUID of acme.com/gpu",
		},
		"a pod has a replica, and the GPU is whole now": {
			none, gpuResource, "UUID::0", gpuResource, 3, 1,
			"container main of pod ns/job holds it as UUID::0 of nvidia.com/gpu",
		},
		"no MPS daemon runs": {
			byMPS, "", "UUID::0", sharedResource, 0, 2,
			"its MPS control daemon is not running: start gpu-cdi-mps@UUID.service",
		},
		"a pod has the GPU, and no MPS daemon runs": {
			byMPS, gpuResource, "UUID", sharedResource, 0, 2, "container main of pod ns/job holds it as UUID of nvidia.com/gpu",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad", c.config)
			uuid := f.uuid(1)
			want, held := strings.ReplaceAll(c.want, "UUID", uuid), strings.ReplaceAll(c.id, "UUID", uuid)
			if c.pod != "" {
				f.kubelet.Pods.Set(kubelettest.Pod("ns", "job", "main", c.pod, held))
			}
			f.start(Serve)
			e := f.kubelet.WaitListed(c.resource, c.healthy, c.unhealthy)
			id := uuid
			if c.resource == sharedResource {
				id += "::1"
				f.logs("its MPS control daemon is not running", 1)
			}
			_, err := f.allocate(e, id)
			wantError(t, err, want)
			wantError(t, f.preStart(e, id), id+" is not ready for a container: "+want)
			if c.resource != gpuResource {
				return
			}
			f.kubelet.Pods.Set()
			f.refuses("the kubelet gave the container no device", allocationOf("ns/job/main")) // which reads the pods
			_, err = f.allocate(f.kubelet.WaitListed(gpuResource, 4, 0), id)
			testenv.Must(t, err)
		})
	}
}

// allocationOf requests the CDI names of a container, NAMESPACE/POD/CONTAINER.
func allocationOf(container string) control.Request {
	parts := strings.Split(container, "/")
	return control.Request{Act: control.Allocation, Namespace: parts[0], Pod: parts[1], Container: parts[2]}
}

// newPublisher returns a publisher beside a kubelet, and its device plugin.
func newPublisher(t *testing.T, k ledger.Kubelet, resend func() bool) (*publisher, *plugin.Plugin) {
	t.Helper()
	logger := slog.New(slog.NewTextHandler(&testenv.Log{}, nil))
	changed := wake.New()
	p, err := plugin.New(plugin.Options{Dir: t.TempDir(), Log: logger})
	testenv.Must(t, err)
	h, err := host.New("/", "", "")
	testenv.Must(t, err)
	defaults := config.Default()
	devs := &devices{host: h, config: &current{}}
	devs.config.Store(&defaults)
	if k == nil {
		k = &podresources.Source{Host: h, PluginDir: t.TempDir()}
	}
	return &publisher{
		config: &defaults, devices: devs, plugin: p, releaser: &releaser{}, metrics: metrics.New(metrics.BuildInfo{}),
		mps:       mps.New(mps.MonitorOptions{Dir: t.TempDir(), Changed: changed.Wake, Log: logger}),
		ledger:    ledger.New(ledger.Options{Kubelet: k, Resend: resend, Pods: runningPods, Changed: changed, Log: logger}),
		displaced: ledger.NewDisplaced(ledger.DisplacedOptions{}),
		reporter:  kubeapi.New(kubeapi.Options{Log: logger}),
		again:     wake.New(), changed: changed,
	}, p
}

// publishGPUs publishes the state of a node with GPUs.
func publishGPUs(t *testing.T, pub *publisher, count int) {
	t.Helper()
	s := &gpu.Snapshot{}
	for i := range count {
		s.Devices = append(s.Devices, gpu.Device{Index: i, UUID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i)})
	}
	resources, _, err := resource.Build(s, config.Default().Config)
	testenv.Must(t, err)
	pub.publish(node.State{Snapshot: s, Resources: resources})
}

// otherGPUs is a kubelet that had another GPU, and writes its checkpoint when it is sent the devices.
type otherGPUs struct{ version atomic.Uint64 }

func (*otherGPUs) List(context.Context) (podresources.Answer, error) {
	return podresources.Answer{Runs: true}, nil
}

func (k *otherGPUs) Checkpoint() (*kubelet.Checkpoint, podresources.Version, error) {
	c := &kubelet.Checkpoint{RegisteredDevices: map[string][]string{gpuResource: {"GPU-other"}}}
	return c, podresources.Version{Inode: 1 + k.version.Load()}, nil
}

func (*otherGPUs) Claims() ([]kubelet.Claim, error) { return nil, nil }

// The service is ready when the devices have been sent that were withheld until the kubelet's record was read.
func TestPublisherIsReadyWhenWithheldDevicesAreSent(t *testing.T) {
	t.Parallel()
	k := &otherGPUs{}
	pub, _ := newPublisher(t, k, func() bool { k.version.Add(1); return true })
	_, err := pub.ledger.Read(t.Context())
	testenv.Must(t, err)
	publishGPUs(t, pub, 2)
	if pub.ready() == nil {
		t.Error("it is ready before the kubelet's record was read")
	}
	go func() { _ = pub.ledger.Run(t.Context()) }()
	testenv.Eventually(t, "the record is read", func() bool { return pub.ledger.Ready() == nil })
	if pub.ready() == nil {
		t.Error("it is ready before the devices are sent")
	}
	publishGPUs(t, pub, 2)
	testenv.Must(t, pub.ready())
}

// Resources that cannot be advertised keep their old devices, and a remark says so.
func TestPublisherRemarksThatItCannotAdvertise(t *testing.T) {
	t.Parallel()
	pub, p := newPublisher(t, nil, nil)
	publish := func(gpus int) {
		t.Helper()
		publishGPUs(t, pub, gpus)
	}
	advertised := func(want int) {
		t.Helper()
		if got := p.Status()[0].Devices; got != want {
			t.Errorf("%d devices are advertised, want %d", got, want)
		}
	}
	const refused = "some resources keep their old devices, since the new ones cannot be advertised: " +
		"advertise nvidia.com/gpu: prepare 300 GPUs for allocation"
	said := func() bool {
		list := pub.remarks()
		return len(list) > 0 && strings.HasPrefix(list[0].Text, refused)
	}
	for range 2 {
		publish(4)
		advertised(4)
		publish(300)
		advertised(4)
		if !said() {
			t.Errorf("the remarks are %v, want %q", pub.remarks(), refused)
		}
		publish(5)
		publish(6)
		advertised(6)
		if list := pub.remarks(); len(list) > 0 {
			t.Errorf("after that the remarks are %v", list)
		}
	}
}

// With strict, policy reset never gives a MIG device to a container, which is said once when there is one.
func TestPublisherWarnsOfMIGDevicesThatAreRefused(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "mig-h100", listening, func(c *config.Config) {
		c.MIGStrategy = resource.MIGMixed
		c.PreStart.Policy, c.PreStart.Strict = prepare.Reset, true
		c.PreStart.Resources = []config.PreStartRule{{Name: "nvidia.com/mig-1g.10gb", Policy: prepare.Clean}}
	})
	f.start(Serve)
	f.kubelet.WaitListed("nvidia.com/mig-7g.80gb", 1, 0)
	f.reconfigure(inReplicas(2, "6")) // has the state published again
	f.kubelet.WaitListed(gpuResource, 3, 0)
	f.logs("no container gets a MIG device of nvidia.com/mig-7g.80gb, since policy reset cannot reset them", 1)
	f.logs("no container gets a MIG device of nvidia.com/mig-1g.10gb,", 0)
	if _, body := f.get("/readyz"); !strings.Contains(body, "no container gets a MIG device of nvidia.com/mig-7g.80gb") {
		t.Errorf("/readyz does not say so: %s", body)
	}
	f.reconfigure(func(c *config.Config) { c.PreStart.Strict = false })
	f.logs("no longer the case: no container gets a MIG device of nvidia.com/mig-7g.80gb", 1)
}

// Kubelets before 1.37 may lose the devices of a plugin that they watch.
func TestAResourceThatTheKubeletHasLostIsRegisteredAgain(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.kubelet.Pods.Allocatable = map[string][]string{}
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 4, 0)
	f.kubelet.WaitRegistrations(2)
	f.logs("the kubelet watches "+gpuResource+" and has none of its devices: it is registered again", 1)
	f.kubelet.WaitListed(gpuResource, 4, 0)
}
