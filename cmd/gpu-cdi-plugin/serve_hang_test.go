package main

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/nvml"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	// gpuTimeout is the default of --gpu-timeout, within which a GPU that hangs is unhealthy.
	gpuTimeout = 10 * time.Second
	// prompt is less than gpuTimeout: what takes no longer has not waited for the GPU, on a busy machine too.
	prompt = 8 * time.Second
)

// startsWith starts the plugin and returns how long it took until the kubelet had a list of so many devices.
func (s *served) startsWith(healthy, unhealthy int) (*kubelettest.Endpoint, time.Duration) {
	s.t.Helper()
	begin := time.Now()
	s.start()
	e := s.kubelet.WaitListed(gpuResource, healthy, unhealthy)
	return e, time.Since(begin)
}

// unhealthy are the IDs of the unhealthy devices.
func (s *served) unhealthy(resource string) (ids []string) {
	for _, d := range s.kubelet.Devices(resource) {
		if d.GetHealth() != v1beta1.Healthy {
			ids = append(ids, d.GetID())
		}
	}
	return ids
}

// get asks the address of --listen.
func (s *served) get(path string) (body string, status int, took time.Duration) {
	s.t.Helper()
	var address string
	waitFor(s.t, "the address of /healthz", func() bool {
		_, rest, found := strings.Cut(s.log.String(), "address=")
		address, _, _ = strings.Cut(rest, "\n")
		return found
	})
	request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, "http://"+address+path, nil)
	testenv.Must(s.t, err)
	begin := time.Now()
	answer, err := http.DefaultClient.Do(request)
	testenv.Must(s.t, err)
	defer answer.Body.Close()
	data, err := io.ReadAll(answer.Body)
	testenv.Must(s.t, err)
	return string(data), answer.StatusCode, time.Since(begin)
}

// The other GPUs are advertised, and the GPU that hangs is unhealthy until it answers.
func TestServeStartsBesideAGPUThatHangs(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "listen: 127.0.0.1:0")
	testenv.Must(t, s.node.Hang(sim.AnyFunction, 3))
	e, took := s.startsWith(7, 1)
	t.Logf("seven GPUs were advertised after %v", took)
	if took > prompt {
		t.Errorf("seven GPUs were advertised after %v", took)
	}
	hung := s.node.Machine().GPUs[3].UUID
	if got := s.unhealthy(gpuResource); !slices.Equal(got, []string{hung}) {
		t.Errorf("unhealthy is %v, want %s", got, hung)
	}
	s.logs("does not answer")
	if n := strings.Count(s.log.String(), "does not answer"); n != 1 {
		t.Errorf("the log says %d times that the GPU does not answer", n)
	}
	s.offered(s.allocate(e, s.node.Machine().GPUs[2].UUID)...)
	if got := s.prefers(e, 4, 0, 1, 2, 4, 5, 6, 7); len(got) != 4 {
		t.Errorf("GPUs %v are preferred", got)
	}
	if body, status, took := s.get("/healthz"); status != http.StatusOK || took > prompt {
		t.Errorf("/healthz: %d %s after %v", status, body, took)
	}
	testenv.Must(t, s.node.Clear())
	s.kubelet.WaitListed(gpuResource, 8, 0)
	testenv.Must(t, s.end(syscall.SIGTERM))
}

// With a driver that does not answer at all there is nothing to advertise, but the plugin can be asked and ended.
func TestServeWithADriverThatHangsAtTheStart(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "listen: 127.0.0.1:0")
	testenv.Must(t, s.node.Hang("nvmlInit", sim.AnyGPU))
	s.start()
	if body, status, took := s.get("/healthz"); status != http.StatusOK || took > prompt {
		t.Errorf("/healthz: %d %s after %v", status, body, took)
	}
	if body, status, took := s.get("/readyz"); status != http.StatusServiceUnavailable || took > prompt {
		t.Errorf("/readyz: %d %s after %v", status, body, took)
	}
	s.logs("nvmlInit")
	testenv.Must(t, s.node.Clear())
	s.kubelet.WaitListed(gpuResource, 8, 0)
}

// A GPU that stops answering is unhealthy soon, and so are all GPUs of a driver that does. Nothing else waits for them.
func TestServeGoesOnBesideAGPUThatHangs(t *testing.T) {
	t.Parallel()
	for name, gpu := range map[string]int{"one GPU": 3, "the driver": sim.AnyGPU} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newServed(t, "dgx-h100", "listen: 127.0.0.1:0")
			e, _ := s.startsWith(8, 0)
			testenv.Must(t, s.node.Hang(sim.AnyFunction, gpu))
			begin := time.Now()
			var others sync.WaitGroup
			others.Go(func() { // while it is not known yet that the GPU hangs
				for range 20 {
					if body, status, took := s.get("/healthz"); status != http.StatusOK || took > prompt {
						t.Errorf("/healthz: %d %s after %v", status, body, took)
					}
					s.allocate(e, s.node.Machine().GPUs[2].UUID)
				}
			})
			hung, want := 1, []string{s.node.Machine().GPUs[3].UUID}
			if gpu == sim.AnyGPU {
				hung = 8
			}
			s.kubelet.WaitListed(gpuResource, 8-hung, hung)
			took := time.Since(begin)
			others.Wait()
			t.Logf("it was unhealthy after %v", took)
			if took > gpuTimeout {
				t.Errorf("it was unhealthy after %v", took)
			}
			if got := s.unhealthy(gpuResource); hung == 1 && !slices.Equal(got, want) {
				t.Errorf("unhealthy is %v, want %v", got, want)
			}
			s.logs("does not answer")
			if n := strings.Count(s.log.String(), "does not answer"); n > hung+1 { // the events of each, and a reading
				t.Errorf("the log says %d times that it does not answer", n)
			}
			devices := 8
			if gpu != sim.AnyGPU {
				devices = 10
				s.configure(
					"listen: 127.0.0.1:0\nsharing: {time-slicing: {resources: [{name: nvidia.com/gpu, devices: [0], replicas: 3}]}}",
				)
				begin = time.Now()
				s.signal(syscall.SIGHUP)
				waitFor(t, "another list", func() bool { return len(s.kubelet.Devices(gpuResource)) == devices })
				if took := time.Since(begin); took > prompt {
					t.Errorf("the configuration held after %v", took)
				}
			}
			testenv.Must(t, s.node.Clear())
			s.kubelet.WaitListed(gpuResource, devices, 0)
			testenv.Must(t, s.node.Hang(sim.AnyFunction, gpu))
			begin = time.Now()
			for range 3 { // the first of them has the GPU asked, of which it is not known yet that it hangs
				testenv.Must(t, os.Remove(s.spec))
				waitFor(t, "a new spec", func() bool { _, err := os.Stat(s.spec); return err == nil })
			}
			if took := time.Since(begin); took > prompt {
				t.Errorf("a spec that was removed three times was back after %v", took)
			}
			begin = time.Now()
			if err := s.end(syscall.SIGTERM); err != nil || time.Since(begin) > prompt {
				t.Errorf("it ended with %v after %v", err, time.Since(begin))
			}
		})
	}
}

// Calls about links that hang delay nothing: a GPU that is lost or recovers meanwhile is advertised as such.
func TestServeReconcilesWhileLinksHang(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "health: {clean-for: 1ms}")
	testenv.Must(t, s.node.Hang("nvmlDeviceGetNvLinkState", sim.AnyGPU))
	s.start()
	s.kubelet.WaitListed(gpuResource, 8, 0)
	for range 3 {
		testenv.Must(t, s.node.Lose(2))
		s.signal(syscall.SIGHUP)
		begin := time.Now()
		e := s.kubelet.WaitListed(gpuResource, 7, 1)
		testenv.Must(t, s.node.ClearGPU(2))
		s.signal(syscall.SIGHUP)
		s.kubelet.WaitListed(gpuResource, 8, 0)
		if took := time.Since(begin); took > prompt {
			t.Errorf("it took %v to notice that a GPU was lost and came back", took)
		}
		s.allocate(e, s.node.Machine().GPUs[0].UUID)
	}
	waitFor(t, "a message", func() bool {
		return strings.Contains(s.log.String(), "cannot be read; its position on PCIe and its NUMA node are used instead")
	})
}

// An error of something else ends serve, although the driver hangs.
func TestServeEndsWhileTheDriverHangs(t *testing.T) {
	t.Parallel()
	s := newServed(t, "workstation", "")
	testenv.Must(t, s.node.Hang("nvmlInit_v2", sim.AnyGPU))
	testenv.Must(t, os.WriteFile(filepath.Join(s.dir, "state"), nil, 0o600)) // instead of a directory
	begin := time.Now()
	s.start()
	err := s.ended()
	if took := time.Since(begin); err == nil || err.Error() != "exit status 1" || took > nvml.DefaultTimeout/3 {
		t.Errorf("it ends with %v after %v", err, took)
	}
}
