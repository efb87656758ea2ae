package main

import (
	"net"
	"strings"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/test/lib/testenv"
)

// The kernel waits with unbinding the driver until serve has closed the GPU, and sends no uevent before that.
func TestServeLetsGPUsGoAndTakesThemBack(t *testing.T) {
	testenv.NetworkNamespace(t)
	s := newServed(t, "dgx-h100", "gpu-timeout: 10m\n") // a snapshot each 30 s
	uevents, err := s.node.Uevents()
	mustDo(t, err)
	s.start()
	s.listed(gpuResource, 8, 0)
	const limit = 15 * time.Second // less than a snapshot's 30 s, on a busy machine too; otherwise less than a second
	for _, change := range []struct {
		what string
		do   func(gpu int) error
		then int // GPUs
	}{
		{"is unbound", s.node.Unbind, 6},
		{"is bound", s.node.Bind, 8},
		{"is unplugged", s.node.Unplug, 6},
		{"is plugged in", s.node.Plug, 8},
	} {
		for _, gpu := range []int{2, 5} { // at once
			began := time.Now()
			mustDo(t, change.do(gpu))
			passUevents(t, uevents)
			took := time.Since(began)
			t.Logf("GPU %d %s: the kernel took %v", gpu, change.what, took)
			if took > limit {
				t.Errorf("GPU %d %s: the kernel took %v", gpu, change.what, took)
			}
		}
		began := time.Now()
		s.kubelet.WaitFor(gpuResource, func(list []*v1beta1.Device) bool { return len(list) == change.then })
		if took := time.Since(began); took > limit {
			t.Errorf("both GPUs %s: noticed after %v", change.what, took)
		} else {
			t.Logf("both GPUs %s: noticed after %v", change.what, took)
		}
	}
}

// passUevents has the kernel send what the simulated one has sent.
func passUevents(t *testing.T, source *net.UnixConn) {
	t.Helper()
	message := make([]byte, 8192)
	for {
		mustDo(t, source.SetReadDeadline(time.Now().Add(10*time.Millisecond)))
		n, err := source.Read(message)
		if err != nil {
			return
		}
		testenv.SendUevent(t, strings.Split(strings.TrimSuffix(string(message[:n]), "\x00"), "\x00")...)
	}
}

// Nothing but a snapshot shows that a GPU has no PCI address, and the next snapshot is due in 30 s.
func TestServeReconcilesAfterAUevent(t *testing.T) {
	testenv.NetworkNamespace(t)
	s := newServed(t, "pcie-quad", "gpu-timeout: 10m\n")
	s.start()
	s.listed(gpuResource, 4, 0)
	mustDo(t, s.node.Fail("nvmlDeviceGetPciInfo", 2, notSupported))
	uevent := func(fields ...string) {
		const path = "/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
		testenv.SendUevent(t, append([]string{"unbind@" + path, "ACTION=unbind", "DEVPATH=" + path}, fields...)...)
	}
	uevent("SUBSYSTEM=pci", "PCI_CLASS=20000") // a network card
	time.Sleep(2 * time.Second)                // files are polled each second
	s.listed(gpuResource, 4, 0)
	uevent("SUBSYSTEM=pci", "PCI_CLASS=30200", "PCI_SLOT_NAME=0000:01:00.0")
	began := time.Now()
	s.onlyUnhealthy(2)
	if took := time.Since(began); took > 15*time.Second { // on a busy machine
		t.Errorf("noticed after %v", took)
	}
}
