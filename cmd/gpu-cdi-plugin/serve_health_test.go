package main

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/sim"
)

const notSupported = 3 // NVML_ERROR_NOT_SUPPORTED

// withoutRecoveryAction makes the driver an older one.
func (s *served) withoutRecoveryAction() {
	s.t.Helper()
	mustDo(s.t, s.node.Fail("nvmlDeviceGetFieldValues", sim.AnyGPU, notSupported))
}

// xid reports an XID that is new for the device, again until serve has received it: before it waits for events, soon
// after it has opened the driver, they are lost.
func (s *served) xid(gpu int, code uint64, instance *sim.Instance) {
	s.t.Helper()
	logged := func() int { return strings.Count(s.log.String(), fmt.Sprintf("XID %d", code)) }
	before, due := logged(), time.Now()
	waitFor(s.t, fmt.Sprintf("XID %d of GPU %d", code, gpu), func() bool {
		if now := time.Now(); now.After(due) {
			mustDo(s.t, s.node.XID(gpu, code, instance))
			due = now.Add(200 * time.Millisecond)
		}
		return logged() > before
	})
}

// onlyUnhealthy waits until one GPU is unhealthy and all others are healthy.
func (s *served) onlyUnhealthy(gpu int) {
	s.t.Helper()
	uuid := s.node.Machine().GPUs[gpu].UUID
	s.kubelet.WaitFor(gpuResource, func(list []*v1beta1.Device) bool {
		for _, d := range list {
			if (d.GetHealth() != v1beta1.Healthy) != (d.GetID() == uuid) {
				return false
			}
		}
		return len(list) == len(s.node.Machine().GPUs)
	})
}

func (s *served) logs(text string) {
	s.t.Helper()
	waitFor(s.t, "the message "+text, func() bool { return strings.Contains(s.log.String(), text) })
}

func TestServeTakesAnUnhealthyGPUAloneOutOfService(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	s.start()
	s.listed(gpuResource, 8, 0)
	s.withoutRecoveryAction()
	s.xid(3, 95, nil)
	s.onlyUnhealthy(3)
	s.logs("GPU 3 is unhealthy: XID 95 (uncontained ECC error); it needs a reset")
}

// What made a GPU unhealthy is known after a restart, and not only to the process that saw it.
func TestServeRemembersAnUnhealthyGPU(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	s.withoutRecoveryAction()
	s.start()
	s.listed(gpuResource, 4, 0)
	s.xid(2, 95, nil)
	s.onlyUnhealthy(2)
	mustDo(t, s.end(syscall.SIGTERM))
	s.start()
	s.onlyUnhealthy(2)

	// After a kill as well: the record was written when the state changed.
	s.xid(1, 95, nil)
	s.listed(gpuResource, 2, 2)
	record := filepath.Join(s.dir, "state", "health.json")
	waitFor(t, "the record", func() bool {
		data, err := os.ReadFile(record)
		return err == nil && strings.Count(string(data), `"remedy": "reset"`) == 2
	})
	_ = s.end(syscall.SIGKILL)
	s.start()
	s.listed(gpuResource, 2, 2)

	// A damaged record is set aside.
	mustDo(t, s.end(syscall.SIGTERM))
	mustDo(t, os.WriteFile(record, []byte(`{"version": 1, "devices": [{`), 0o644))
	s.start()
	s.listed(gpuResource, 4, 0)
	s.logs("the recorded health of the devices cannot be used; cordons are lost, and probes decide")
	if _, err := os.Stat(record + ".damaged"); err != nil {
		t.Error(err)
	}
}

// A GPU is healthy again when its fault has passed and its probes are clean, without a restart.
func TestServeTakesAGPUBackIntoService(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	s.start()
	s.listed(gpuResource, 8, 0)
	mustDo(t, s.node.Set(5, map[string]string{"links-down": "3"}))
	s.onlyUnhealthy(5)
	s.logs("GPU 5 is unhealthy: 1 of its 18 NVLinks are down")
	mustDo(t, s.node.Set(5, map[string]string{"links-down": "none"}))
	s.listed(gpuResource, 8, 0)
	s.logs("GPU 5 is healthy again")

	mustDo(t, s.node.Lose(6))
	s.onlyUnhealthy(6)
	s.logs("GPU 6 is unhealthy: the driver has lost it, as when it falls off the bus; it needs a reboot of the node")
	mustDo(t, s.node.ClearGPU(6))
	s.listed(gpuResource, 8, 0)
	s.logs("GPU 6 is healthy again")

	// The driver reports its recovery action as an event.
	mustDo(t, s.node.Set(1, map[string]string{"recovery-action": "reset"}))
	s.onlyUnhealthy(1)
	s.logs("GPU 1 is unhealthy: the driver asks for a reset of the GPU; it needs a reset")
	mustDo(t, s.node.Set(1, map[string]string{"recovery-action": "none"}))
	s.listed(gpuResource, 8, 0)
}

// Applications cause most XIDs, and the GPU is as good as before.
func TestServeDoesNotBlameAGPUForItsApplications(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "listen: 127.0.0.1:0")
	s.withoutRecoveryAction()
	s.start()
	s.listed(gpuResource, 4, 0)
	s.xid(0, 69, nil)
	for _, code := range []uint64{13, 31, 43, 45} {
		for range 50 {
			mustDo(t, s.node.XID(0, code, nil))
		}
	}
	waitFor(t, "200 counted events", func() bool {
		text, status := s.ask("/metrics")
		return status == http.StatusOK && strings.Count(text, "gpu_cdi_plugin_gpu_xids_total{") == 5 &&
			strings.Count(text, "\"} 50\n") == 4
	})
	s.listed(gpuResource, 4, 0)
	if n := strings.Count(s.log.String(), "GPU 0 reported XID"); n != 5 {
		t.Errorf("the log has %d lines about 5 kinds of events", n)
	}
}

// A node whose events cannot be received must not look healthy in silence.
func TestServeReportsThatEventsAreNotReceived(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "listen: 127.0.0.1:0")
	mustDo(t, s.node.Fail("nvmlEventSetCreate", sim.AnyGPU, 999))
	s.start()
	s.listed(gpuResource, 4, 0)
	s.logs("events of GPU 2 are not received, and only probes notice its faults: nvmlEventSetCreate")
	waitFor(t, "the metrics of the GPUs whose events are not received", func() bool {
		text, _ := s.ask("/metrics")
		return strings.Count(text, "gpu_cdi_plugin_gpu_events_received{") == 4
	})
	const shown = "ok, but its events are not received: nvmlEventSetCreate: "
	waitFor(t, "devices shows that events are not received", func() bool { return strings.Count(s.devices(), shown) == 4 })
	mustDo(t, s.node.Set(2, map[string]string{"remap-pending": "1"})) // no event
	s.onlyUnhealthy(2)
	mustDo(t, s.node.Clear())
	s.logs("no longer: events of GPU 2 are not received")
	waitFor(t, "devices shows that events are received", func() bool { return !strings.Contains(s.devices(), shown) })
}

// An XID of a MIG device leaves its siblings alone.
func TestServeTakesAMIGDeviceAloneOutOfService(t *testing.T) {
	t.Parallel()
	s := newServed(t, "mig-h100", "mig-strategy: mixed")
	s.withoutRecoveryAction()
	s.start()
	snapshot, err := s.node.Snapshot()
	mustDo(t, err)
	mig := snapshot.Devices[0].MIG[0]
	resource := "nvidia.com/mig-" + mig.Profile
	total := 0
	s.kubelet.WaitFor(resource, func(list []*v1beta1.Device) bool {
		total = len(list)
		return total > 0
	})
	s.xid(0, 95, &sim.Instance{GPU: mig.GPUInstance, Compute: mig.ComputeInstance})
	s.kubelet.WaitFor(resource, func(list []*v1beta1.Device) bool {
		unhealthy := 0
		for _, d := range list {
			if d.GetHealth() != v1beta1.Healthy {
				unhealthy++
				if d.GetID() != mig.UUID {
					t.Errorf("%s is unhealthy", d.GetID())
				}
			}
		}
		return unhealthy == 1
	})
}
