package main

import (
	"syscall"
	"testing"
)

// A resource that has no device because all have other names is not registered, unless it had devices before: then the
// kubelet learns that there are none.
func TestServeDoesNotRegisterANameThatNoDeviceHas(t *testing.T) {
	t.Parallel()
	const renamed = "resources: {gpus: [{pattern: '*', name: nvidia.com/big}]}"
	s := newServed(t, "pcie-quad", renamed)
	s.start()
	s.listed("nvidia.com/big", 4, 0)
	// The resources of a reconciliation are registered together, so a second one shows that none is missing.
	s.configure("resources: {gpus: [{pattern: '*', name: nvidia.com/other}]}")
	s.signal(syscall.SIGHUP)
	s.listed("nvidia.com/other", 4, 0)
	s.listed("nvidia.com/big", 0, 0)
	if n := s.kubelet.Registrations(); n != 2 || s.kubelet.Lists(gpuResource) != 0 {
		t.Errorf(
			"%d resources are registered, and %s with %d lists; want 2, and not that one",
			n,
			gpuResource,
			s.kubelet.Lists(gpuResource),
		)
	}

	s.configure("")
	s.signal(syscall.SIGHUP)
	s.listed(gpuResource, 4, 0)
	s.configure(renamed)
	s.signal(syscall.SIGHUP)
	s.listed("nvidia.com/big", 4, 0)
	s.listed(gpuResource, 0, 0)
}
