package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// writeForeign writes a spec file of another program beside ours and returns its path.
func (s *served) writeForeign(kind string, names ...string) string {
	s.t.Helper()
	var devices []string
	for _, name := range names {
		devices = append(devices, fmt.Sprintf(`{"name": %q, "containerEdits": {"env": ["FOREIGN=1"]}}`, name))
	}
	path := filepath.Join(filepath.Dir(s.spec), "foreign.json")
	text := fmt.Sprintf(`{"cdiVersion": "0.5.0", "kind": %q, "devices": [%s]}`, kind, strings.Join(devices, ","))
	testenv.Must(s.t, os.MkdirAll(filepath.Dir(path), 0o755))
	testenv.Must(s.t, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// refusedUnhealthy expects a call of Allocate to be refused since the device is unhealthy, and returns the message.
func (s *served) refusedUnhealthy(e *kubelettest.Endpoint, id string) string {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), prompt)
	defer cancel()
	_, err := e.Client.Allocate(ctx, &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{id}}},
	})
	if status.Code(err) != codes.FailedPrecondition {
		s.t.Errorf("allocate %s: %v, want FailedPrecondition", id, err)
	}
	return status.Convert(err).Message()
}

// ask returns what the server of --listen answers.
func (s *served) ask(path string) (body string, status int) {
	s.t.Helper()
	body, status, _ = s.get(path)
	return body, status
}

func (s *served) uuids() []string {
	var list []string
	for _, g := range s.node.Machine().GPUs {
		list = append(list, g.UUID)
	}
	return list
}

// dirs are the CDI directories, from the lowest priority to the highest.
func (s *served) dirs() []string {
	return []string{filepath.Join(s.node.Root(), "etc/cdi"), filepath.Dir(s.spec)}
}

// The list, Allocate, the metrics, readiness and the log agree on a device whose UUID another file takes.
func TestServeSaysWhichDeviceAnotherSpecTakes(t *testing.T) {
	t.Parallel()
	s := newServed(
		t,
		"dgx-h100",
		"listen: 127.0.0.1:0\ngpu-timeout: 90s",
	) // so that the next reconciliation is half a minute away
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 8, 0)
	taken, others := s.uuids()[3], slices.Delete(s.uuids(), 3, 4)

	path := s.writeForeign(cdi.DefaultKind, taken)
	begin := time.Now()
	s.kubelet.WaitListed(gpuResource, 7, 1)
	s.measured(7, 1)
	why := path + " also defines " + cdi.DefaultKind + "=" + taken
	waitFor(t, "a warning", func() bool { return strings.Contains(s.log.String(), why) })
	if took := time.Since(begin); took > 15*time.Second { // one second, and what a busy machine adds
		t.Errorf("the list, the metrics and the log agree after %s", took)
	}
	s.allocate(e, others...)
	if message := s.refusedUnhealthy(e, taken); !strings.Contains(message, why) {
		t.Errorf("Allocate says %q", message)
	}
	waitFor(t, "a /readyz that is ok and names the file", func() bool {
		body, status := s.ask("/readyz")
		return status == http.StatusOK && strings.HasPrefix(body, "ok\n") && strings.Contains(body, path)
	})
	if !strings.Contains(s.log.String(), "remove that file, or give this node's devices another CDI kind") {
		t.Error("the log does not say what to do")
	}
	if cache := s.engine(); cache.GetDevice(cdi.DefaultKind+"="+taken).GetSpec().GetPath() != path {
		t.Error("engines do not find the other file's device, since our spec has its name too")
	}

	s.writeForeign(cdi.DefaultKind, s.uuids()...) // now there is nothing to give
	s.kubelet.WaitListed(gpuResource, 0, 8)
	waitFor(t, "a /readyz that names the file", func() bool {
		body, status := s.ask("/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, path)
	})

	testenv.Must(t, os.Remove(path))
	s.allocate(s.kubelet.WaitListed(gpuResource, 8, 0), s.uuids()...)
	s.measured(8, 0)
	waitFor(t, "a /readyz that names no file", func() bool {
		body, status := s.ask("/readyz")
		return status == http.StatusOK && !strings.Contains(body, path)
	})
}

// measured expects numbers of devices in the metrics.
func (s *served) measured(healthy, unhealthy int) {
	s.t.Helper()
	waitFor(s.t, "the metrics", func() bool {
		body, _ := s.ask("/metrics")
		return strings.Contains(
			body,
			fmt.Sprintf(`gpu_cdi_plugin_devices{health="healthy",resource="nvidia.com/gpu"} %d`+"\n", healthy),
		) &&
			strings.Contains(
				body,
				fmt.Sprintf(`gpu_cdi_plugin_devices{health="unhealthy",resource="nvidia.com/gpu"} %d`+"\n", unhealthy),
			)
	})
}

// engine is the CDI library's view of the directories.
func (s *served) engine() *cdilib.Cache {
	s.t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(s.dirs()...), cdilib.WithAutoRefresh(false))
	testenv.Must(s.t, err)
	return cache
}

// A name that serve leaves to another file is not what `cdi diff` finds fault with.
func TestDiffAllowsForNamesThatAnotherSpecHas(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	s.writeForeign(cdi.DefaultKind, s.uuids()[3], cdi.AllDevices)
	s.start()
	s.kubelet.WaitListed(gpuResource, 7, 1)
	if out, err := s.diff(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	data, err := os.ReadFile(s.spec)
	testenv.Must(t, err)
	_ = s.end(syscall.SIGKILL) // which is what it says
	testenv.Must(t, os.WriteFile(s.spec, []byte(strings.ReplaceAll(string(data), "/dev/nvidia5", "/dev/nvidia6")), 0o644))
	if out, err := s.diff(); err == nil || !strings.Contains(out, "device 5") || strings.Contains(out, "device 3") {
		t.Errorf("of a spec that was edited: %v: %s", err, out)
	}
}

// diff is the output of `cdi diff`.
func (s *served) diff() (string, error) {
	s.t.Helper()
	exe, err := os.Executable()
	testenv.Must(s.t, err)
	cmd := exec.Command(exe)
	cmd.Args = []string{
		"gpu-cdi-plugin", "cdi", "diff", "--root", s.node.Root(), "--cdi-dir", filepath.Dir(s.spec),
		"--hook-path", "/bin/true",
	}
	cmd.Env = append(os.Environ(), insecure)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
