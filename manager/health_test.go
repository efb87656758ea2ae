package manager_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/test/lib/plugintest"
)

// healthEvent waits for the next event about the health of devices.
func healthEvent(t *testing.T, events <-chan manager.Event) []manager.PodDevice {
	t.Helper()
	timeout := time.After(time.Minute)
	for {
		select {
		case e, ok := <-events:
			if !ok {
				t.Fatal("the watch has ended")
			}
			if e.Type == manager.HealthChanged {
				return e.Devices
			}
		case <-timeout:
			t.Fatal("no event about health came")
		}
	}
}

func TestHealthOfDevicesOfPods(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(2)...)
	n.admit(pod("a", wants("main", gpu, 1)))
	n.admit(pod("b", wants("main", gpu, 1)))
	events := n.m.Watch(t.Context())
	expect := func(what string, want ...manager.PodDevice) {
		t.Helper()
		if diff := cmp.Diff(want, healthEvent(t, events)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
		for _, d := range want {
			if got := n.m.DeviceHealth(gpu, []string{d.ID}); !slices.Equal(got, []manager.Health{d.Health}) {
				t.Errorf("%s: device %s is %v later, want %s", what, d.ID, got, d.Health)
			}
		}
	}
	p.SetDevices(plugintest.Device("gpu-0000", false), plugintest.Device("gpu-0001", true))
	expect("one turns unhealthy", manager.PodDevice{ID: "gpu-0000", Pod: "a", Health: manager.Unhealthy})
	p.SetDevices(plugintest.Device("gpu-0001", true), plugintest.Device("gpu-0002", true))
	expect("it leaves the list", manager.PodDevice{ID: "gpu-0000", Pod: "a", Health: manager.Unknown})
	if devices := n.resource(gpu).Devices; len(devices) != 3 || devices[0].Health != manager.Unknown ||
		devices[0].Pod != "a" {
		t.Errorf("the devices are %+v", devices)
	}
	n.counts(gpu, 2, 2)
	p.SetDevices(plugintest.Device("gpu-0000", false), plugintest.Device("gpu-0001", false))
	expect("it is back, and unhealthy like the other",
		manager.PodDevice{ID: "gpu-0000", Pod: "a", Health: manager.Unhealthy},
		manager.PodDevice{ID: "gpu-0001", Pod: "b", Health: manager.Unhealthy})
	p.Stop()
	expect("the plugin ends",
		manager.PodDevice{ID: "gpu-0000", Pod: "a", Health: manager.Unknown},
		manager.PodDevice{ID: "gpu-0001", Pod: "b", Health: manager.Unknown})
	if pods := n.m.Pods(); len(pods) != 2 {
		t.Error("placed are", pods)
	}
}

// Two resources have a device with the same ID.
func TestHealthGoesToThePodOfTheResource(t *testing.T) {
	n := newNode(t)
	n.plugin(gpu, plugintest.Device("0", true))
	p := n.plugin(nic, plugintest.Device("0", true))
	n.admit(pod("gpu-pod", wants("main", gpu, 1)))
	n.admit(pod("nic-pod", wants("main", nic, 1)))
	events := n.m.Watch(t.Context())
	p.SetDevices(plugintest.Device("0", false))
	if got := healthEvent(t, events); len(got) != 1 || got[0].Pod != "nic-pod" {
		t.Errorf("got %+v, want nic-pod", got)
	}
}

// 1,000 devices of 1,000 pods turn unhealthy: one event, and nothing is written.
func TestAllDevicesTurnUnhealthy(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(1000)...)
	n.admitMany(1000)
	before, err := os.ReadFile(n.o.StateFile)
	if err != nil {
		t.Fatal(err)
	}
	devices := plugintest.Devices(1000)
	for _, d := range devices {
		d.Health = v1beta1.Unhealthy
	}
	events := n.m.Watch(t.Context())
	start := time.Now()
	p.SetDevices(devices...)
	flipped := healthEvent(t, events)
	t.Log("from the plugin's change to the event:", time.Since(start))
	if len(flipped) != 1000 {
		t.Error("the event has", len(flipped), "devices")
	}
	n.counts(gpu, 1000, 0)
	after, err := os.ReadFile(n.o.StateFile)
	if err != nil || string(before) != string(after) {
		t.Error("the state was written, or cannot be read:", err)
	}
}

func TestCapacityFollowsThePlugins(t *testing.T) {
	t.Parallel()
	n := newNode(t, func(o *manager.Options) { o.Deadlines = endpoint.Deadlines{Grace: 3 * time.Second} })
	device := plugintest.Device
	p := n.plugin(gpu, device("1", true), device("2", true), device("3", false))
	n.counts(gpu, 3, 2)
	p.SetDevices(device("1", true), device("2", true))
	n.counts(gpu, 2, 2)
	p.SetDevices(device("1", true), device("2", false), device("3", false))
	n.counts(gpu, 3, 1)
	p.SetDevices(device("2", false), device("3", false))
	n.counts(gpu, 2, 0)
	n.plugin(nic, device("nic", true))
	n.counts(nic, 1, 1)
	n.counts(gpu, 2, 0)
	p.SetDevices(device("2", true), device("3", true))
	n.counts(gpu, 2, 2)
	p.Stop()
	n.counts(gpu, 2, 0)
	n.refuses(pod("a", wants("main", gpu, 1)),
		"no healthy devices present; cannot allocate unhealthy devices example.com/gpu")
	n.until("the resource is removed", func() bool { return n.resource(gpu).Name == "" })
	if got, ok := n.m.Counts()[gpu]; !ok || got != (manager.Count{}) {
		t.Errorf("the removed resource counts %+v, %t", got, ok)
	}
	n.refuses(pod("a", wants("main", gpu, 1)), "cannot allocate unregistered device example.com/gpu")
	n.admit(pod("b", wants("main", nic, 1)))
}

func TestNewInstancesReplaceOldOnes(t *testing.T) {
	n := newNode(t)
	first := n.plugin(gpu, plugintest.Devices(2)...)
	second := plugintest.New(gpu, plugintest.Devices(2)...)
	n.serve(second, "second.sock")
	n.register(second)
	n.counts(gpu, 2, 2)
	third := plugintest.New(gpu, plugintest.Device("other", true))
	n.serve(third, "third.sock")
	n.register(third)
	n.counts(gpu, 1, 1)
	first.Stop()
	second.Stop()
	n.admit(pod("a", wants("main", gpu, 1)))
	if calls := third.Calls().Allocate; calls != 1 {
		t.Error("the newest instance got", calls, "calls of Allocate")
	}
}

// A stream of ListAndWatch that ends is not opened again before the plugin registers again.
func TestPluginsWhoseStreamEnds(t *testing.T) {
	for name, test := range map[string]struct {
		fail     func(*plugintest.Plugin)
		capacity int
	}{
		"at once": {
			fail: func(p *plugintest.Plugin) { p.EndStreams(errors.New("broken")) },
		},
		"after its list": {
			fail: func(*plugintest.Plugin) {}, capacity: 2,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, func(o *manager.Options) { o.Deadlines = endpoint.Deadlines{Grace: 3 * time.Second} })
			p := plugintest.New(gpu, plugintest.Devices(2)...)
			n.serve(p, "gpu.sock")
			test.fail(p)
			if err := p.Register(t.Context(), filepath.Join(n.o.Dir, "kubelet.sock")); err != nil {
				t.Fatal(err)
			}
			n.counts(gpu, test.capacity, test.capacity)
			p.EndStreams(errors.New("broken"))
			n.until("the plugin is disconnected", func() bool {
				r := n.resource(gpu)
				return r.Name == gpu && !r.Connected
			})
			n.counts(gpu, test.capacity, 0)
			n.refuses(pod("a", wants("main", gpu, 1)),
				"no healthy devices present; cannot allocate unhealthy devices example.com/gpu")
			n.until("the resource is removed", func() bool { return n.resource(gpu).Name == "" })
			n.counts(gpu, 0, 0)
			if calls := p.Calls().Watch; calls != 1 {
				t.Error("ListAndWatch was called", calls, "times")
			}
		})
	}
}

func TestTheHealthOfAnUnknownResourceAddsNone(t *testing.T) {
	n := newNode(t)
	want := []manager.Health{manager.Unknown, manager.Unknown}
	if got := n.m.DeviceHealth(gpu, []string{"d0", "d1"}); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := n.m.Counts(); len(got) > 0 {
		t.Errorf("the node has %v now", got)
	}
}
