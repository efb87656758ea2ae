package manager_test

import (
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
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
	n.awaitCount(gpu, manager.Count{Capacity: 2, Allocatable: 2})
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

// 1,000 devices of 1,000 pods turn unhealthy: one event, and nothing is written.
func TestAllDevicesTurnUnhealthy(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(1000)...)
	n.admitMany(1000)
	before, err := os.ReadFile(n.o.StateFile)
	testenv.Must(t, err)
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
	n.awaitCount(gpu, manager.Count{Capacity: 1000, Allocatable: 0})
	after, err := os.ReadFile(n.o.StateFile)
	if err != nil || string(before) != string(after) {
		t.Error("the state was written, or cannot be read:", err)
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
