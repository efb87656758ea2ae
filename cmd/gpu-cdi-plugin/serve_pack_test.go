package main

import (
	"fmt"
	"slices"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// migDevices returns the UUIDs of a GPU's MIG devices of a profile.
func (s *served) migDevices(gpu int, profile string) []string {
	s.t.Helper()
	snapshot, err := s.node.Snapshot()
	testenv.Must(s.t, err)
	var uuids []string
	for _, m := range snapshot.Devices[gpu].MIG {
		if m.Profile == profile {
			uuids = append(uuids, m.UUID)
		}
	}
	if len(uuids) == 0 {
		s.t.Fatalf("GPU %d has no MIG device of profile %s", gpu, profile)
	}
	return uuids
}

// prefersOf asks which of the devices are preferred.
func (s *served) prefersOf(e *kubelettest.Endpoint, size int, available ...string) []string {
	s.t.Helper()
	answer, err := e.Client.GetPreferredAllocation(s.t.Context(), &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{
			{AvailableDeviceIDs: available, AllocationSize: int32(size)},
		},
	})
	testenv.Must(s.t, err)
	return answer.GetContainerResponses()[0].GetDeviceIDs()
}

// Of the profile 1g.10gb the machine has one device on GPU 0, seven on GPU 4 and one on GPU 5.
func TestServePacksMIGDevicesOnTheFullestGPU(t *testing.T) {
	t.Parallel()
	s := newServed(t, "mig-h100", "{mig-strategy: mixed, allocation: {shared-policy: pack}}")
	s.start()
	small := s.kubelet.WaitListed("nvidia.com/mig-1g.10gb", 9, 0)
	of := func(gpu int) []string { return s.migDevices(gpu, "1g.10gb") }
	available := slices.Concat(of(0), of(4)[1:], of(5)) // a pod has the first one of GPU 4
	if got := s.prefersOf(small, 1, available...); !slices.Equal(got, of(4)[1:2]) {
		t.Errorf("with only one on GPU 4 in use %s are preferred", s.places(got))
	}
	large := s.kubelet.WaitRegistered("nvidia.com/mig-3g.40gb")
	s.allocate(large, s.migDevices(0, "3g.40gb")...)
	if got := s.prefersOf(small, 1, available...); !slices.Equal(got, of(0)) {
		t.Errorf("with another profile on three slices of GPU 0 %s are preferred", s.places(got))
	}
}

// places names MIG devices by GPU and index.
func (s *served) places(uuids []string) []string {
	s.t.Helper()
	snapshot, err := s.node.Snapshot()
	testenv.Must(s.t, err)
	var names []string
	for _, d := range snapshot.Devices {
		for _, m := range d.MIG {
			if slices.Contains(uuids, m.UUID) {
				names = append(names, fmt.Sprintf("%d:%d", d.Index, m.Index))
			}
		}
	}
	return names
}
