package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

const notSupported = 3 // NVML_ERROR_NOT_SUPPORTED

// withoutRecoveryAction makes the driver an older one.
func (s *served) withoutRecoveryAction() {
	s.t.Helper()
	testenv.Must(s.t, s.node.Fail("nvmlDeviceGetFieldValues", sim.AnyGPU, notSupported))
}

// xid reports an XID that is new for the device, again until serve has received it: before it waits for events, soon
// after it has opened the driver, they are lost.
func (s *served) xid(gpu int, code uint64, instance *sim.Instance) {
	s.t.Helper()
	logged := func() int { return strings.Count(s.log.String(), fmt.Sprintf("XID %d", code)) }
	before, due := logged(), time.Now()
	waitFor(s.t, fmt.Sprintf("XID %d of GPU %d", code, gpu), func() bool {
		if now := time.Now(); now.After(due) {
			testenv.Must(s.t, s.node.XID(gpu, code, instance))
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

// What made a GPU unhealthy is known after a restart, and not only to the process that saw it.
func TestServeRemembersAnUnhealthyGPU(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	s.withoutRecoveryAction()
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.xid(2, 95, nil)
	s.onlyUnhealthy(2)
	testenv.Must(t, s.end(syscall.SIGTERM))
	s.start()
	s.onlyUnhealthy(2)

	// After a kill as well: the record was written when the state changed.
	s.xid(1, 95, nil)
	s.kubelet.WaitListed(gpuResource, 2, 2)
	record := filepath.Join(s.dir, "state", "health.json")
	waitFor(t, "the record", func() bool {
		data, err := os.ReadFile(record)
		return err == nil && strings.Count(string(data), `"remedy": "reset"`) == 2
	})
	_ = s.end(syscall.SIGKILL)
	s.start()
	s.kubelet.WaitListed(gpuResource, 2, 2)

	// A damaged record is set aside.
	testenv.Must(t, s.end(syscall.SIGTERM))
	testenv.Must(t, os.WriteFile(record, []byte(`{"version": 1, "devices": [{`), 0o644))
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.logs("the recorded health of the devices cannot be used; cordons are lost, and devices are suspect until ")
	if _, err := os.Stat(record + ".damaged"); err != nil {
		t.Error(err)
	}
}
