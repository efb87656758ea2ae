package main

import (
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// hangReset has a reset of a GPU begin for a container, which hangs. It returns why the container was refused.
func (s *served) hangReset(e *kubelettest.Endpoint, gpu int) (refused <-chan string) {
	s.t.Helper()
	testenv.Must(s.t, s.node.SetReset(gpu, sim.ResetFault{Result: sim.ResetHangs}))
	result := make(chan string, 1)
	go func() { result <- s.preStart(e, s.uuids()[gpu]) }()
	smi := s.childNamed("nvidia-smi")
	s.t.Cleanup(func() { _ = syscall.Kill(smi, syscall.SIGKILL) })
	return result
}

// A reset that hangs keeps containers on other GPUs waiting for a moment once, and afterwards not at all.
func TestServeStartsContainersWhileAResetHangs(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	s := newServed(t, "mig-h100", `mig-strategy: mixed
prestart:
  policy: reset
  resources:
    - {name: nvidia.com/mig-7g.80gb, policy: clean}
    - {name: nvidia.com/mig-1g.10gb, policy: check}
    - {name: nvidia.com/mig-3g.40gb, policy: none}
`)
	s.addLoader("usr/bin/nvidia-smi")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 2, 0)
	hung, other := s.uuids()[6], s.uuids()[7]
	refused := s.hangReset(e, 6)
	began := time.Now()
	var containers sync.WaitGroup
	const once = 20 * time.Second // 15 s, and the moment until the driver is open again
	for resource, limit := range map[string]time.Duration{
		"nvidia.com/mig-3g.40gb": prompt, "nvidia.com/mig-1g.10gb": once, "nvidia.com/mig-7g.80gb": once,
	} {
		part := s.kubelet.WaitFor(resource, func(list []*v1beta1.Device) bool { return len(list) > 0 })
		id := s.kubelet.Devices(resource)[0].GetID()
		containers.Go(func() {
			s.wantReady(part, id)
			if took := time.Since(began); took > limit {
				t.Errorf("a container with %s waited for %s", resource, took)
			}
		})
	}
	const still = "nvidia-smi still resets "
	containers.Go(func() { s.wantRefused(e, other, still+hung+" (0000:d1:00.0), since 20") })
	containers.Wait()
	s.logs(hung + " is not given to a container of nvidia.com/gpu")
	<-refused

	began = time.Now()
	e = s.kubelet.WaitListed(gpuResource, 1, 1)
	s.wantRefused(e, hung, "is not ready for a container: held for a reset that has not ended, since 20")
	s.wantRefused(e, other, still+hung)
	if took := time.Since(began); took > prompt {
		t.Errorf("the later containers waited for %s", took)
	}

	// An administrator's reset of the GPU is refused too, and does not bring the GPU back.
	s.awaitControl()
	s.fails(1, "the reset that began at 20", "reset", "6")
	s.wantRefused(e, hung, "is not ready for a container: held for a reset")

	// When the reset has ended, the GPU is back.
	testenv.Must(t, syscall.Kill(s.childNamed("nvidia-smi"), syscall.SIGKILL))
	s.logs("the reset of " + hung + " that took too long has failed")
	e = s.kubelet.WaitListed(gpuResource, 2, 0)
	testenv.Must(t, s.node.SetReset(6, sim.ResetFault{Result: sim.ResetWorks}))
	s.wantReady(e, hung, other)
}

// A reload does not wait for a reset, and the devices stay served.
func TestServeReloadsWhileAResetHangs(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	s := newServed(t, "pcie-quad", "prestart: {policy: reset}")
	s.addLoader("usr/bin/nvidia-smi")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	total := s.kubelet.Registrations()
	refused := s.hangReset(e, 3)
	s.configure(`prestart: {policy: none}
sharing: {time-slicing: {resources: [{name: nvidia.com/gpu, devices: [0], replicas: 3}]}}
`)
	began := time.Now()
	s.signal(syscall.SIGHUP)
	s.kubelet.WaitListed(gpuResource, 6, 0)
	s.wantReady(e, s.uuids()[1]) // by the new policy
	if took := time.Since(began); took > prompt {
		t.Errorf("the configuration took effect after %s", took)
	}
	s.configure("prestart: {policy: none}\nstrategy: [envvar]\n")
	s.signal(syscall.SIGHUP)
	s.logs("the old configuration stays in use until the reset of a GPU has ended or counts as hung")
	<-refused
	began = time.Now()
	if got := s.kubelet.Registrations(); got != total {
		t.Errorf("%d registrations before the restart, want none", got-total)
	}
	s.logs("restarting: the configuration has changed")
	s.kubelet.WaitRegistrations(total + 1)
	if took := time.Since(began); took > prompt {
		t.Errorf("the devices are served again after %s", took)
	}
	e = s.kubelet.WaitListed(gpuResource, 3, 1)
	s.wantRefused(e, s.uuids()[3], "held for a reset that has not ended")
}
