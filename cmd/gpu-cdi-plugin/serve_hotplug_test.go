package main

import (
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// The kernel waits with unbinding the driver until serve has closed the GPU.
func TestServeLetsGPUsGoAndTakesThemBack(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	s.start()
	s.kubelet.WaitListed(gpuResource, 8, 0)
	const limit = 15 * time.Second // on a busy machine; otherwise the 3 s between two polls
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
			testenv.Must(t, change.do(gpu))
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
