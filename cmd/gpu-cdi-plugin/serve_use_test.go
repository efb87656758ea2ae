package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// rounds waits until the plugin has asked for the pods so many times more.
func (s *served) rounds(p *kubelettest.PodResources, n int) {
	s.t.Helper()
	want := p.Lists() + n
	waitFor(s.t, "a question for the pods", func() bool { return p.Lists() >= want })
}

// usedBy checks what the file for a device manager says about the use of a GPU: nothing if the text is empty.
func (s *served) usedBy(gpu int, want string) {
	s.t.Helper()
	got, err := os.ReadFile(filepath.Join(s.dir, "state", "devices", s.uuids()[gpu]+".use"))
	if want == "" && !errors.Is(err, fs.ErrNotExist) || !strings.Contains(string(got), want) {
		s.t.Errorf("the file says %q, want %q, error %v", got, want, err)
	}
}

// A GPU that is in use without a pod, or still after its pod, is suspect before another pod asks for it, and nothing is
// done about it. A file says what uses it, beside its descriptor.
func TestServeChecksGPUsThatNoPodHas(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "prestart: {policy: clean}")
	pods := s.kubelet.Pods
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	pod := func(gpu int) *podresources.PodResources {
		return kubelettest.Pod("ns", "job", "main", gpuResource, s.uuids()[gpu])
	}
	pods.Set(pod(0), pod(1))
	cmd, foreign := s.leftOver(1), s.leftOver(3)
	s.onlyUnhealthy(3)
	s.usedBy(3, "1024 MiB are in use without a process")
	testenv.Must(t, foreign.Process.Kill())
	_ = foreign.Wait()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.usedBy(3, "")
	testenv.Must(t, s.node.SetSilently(1, map[string]string{"power-limit": "200000"}))
	s.rounds(pods, 3)
	s.kubelet.WaitListed(gpuResource, 4, 0)

	pods.Set(pod(0))
	s.onlyUnhealthy(1)
	s.logs("GPU 1 is suspect: 1024 MiB are in use without a process, more than 256 MiB")
	if values, err := s.node.Values(1); err != nil || values["power-limit"] != 200000 {
		t.Errorf("the settings of the GPU are %v, error %v", values, err)
	}
	if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process was ended: %v", err)
	}

	// A pod that gets it all the same is refused by what it finds itself.
	pods.Set(pod(0), pod(1))
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	s.wantRefused(e, s.uuids()[1], "(memory): 1024 MiB are in use")
	pods.Set(pod(0))
	s.onlyUnhealthy(1)

	testenv.Must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.logs("GPU 1 is healthy again")
}

// A device that is suspect because it is in use stays so after a restart, and is checked again. Policy none ends that.
func TestServeChecksGPUsThatNoPodHasOverARestart(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "prestart: {policy: clean}")
	pods := s.kubelet.Pods
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	other := kubelettest.Pod("ns", "other", "main", gpuResource, s.uuids()[0])
	pods.Set(other, kubelettest.Pod("ns", "job", "main", gpuResource, s.uuids()[1], s.uuids()[2]))
	first, second := s.leftOver(1), s.leftOver(2)
	s.rounds(pods, 1)
	pods.Set(other)
	s.kubelet.WaitListed(gpuResource, 2, 2)
	testenv.Must(t, s.end(syscall.SIGTERM))
	testenv.Must(t, first.Process.Kill())
	_ = first.Wait()

	s.start()
	s.kubelet.WaitListed(gpuResource, 2, 2)
	s.onlyUnhealthy(2)
	testenv.Must(t, s.end(syscall.SIGTERM))

	s.configure("prestart: {policy: none}")
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	if err := second.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the process was ended: %v", err)
	}
}
