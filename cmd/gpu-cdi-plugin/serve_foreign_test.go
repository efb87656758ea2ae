package main

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	mustDo(s.t, os.MkdirAll(filepath.Dir(path), 0o755))
	mustDo(s.t, os.WriteFile(path, []byte(text), 0o644))
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
func (s *served) ask(path string) (string, int) {
	s.t.Helper()
	var address string
	waitFor(s.t, "the address that it listens on", func() (found bool) {
		_, address, found = strings.Cut(s.log.String(), "address=")
		return found && strings.Contains(address, "\n")
	})
	address, _, _ = strings.Cut(address, "\n")
	request, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, "http://"+address+path, nil)
	mustDo(s.t, err)
	answer, err := http.DefaultClient.Do(request)
	mustDo(s.t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	mustDo(s.t, err)
	return string(body), answer.StatusCode
}

func (s *served) uuids() []string {
	var list []string
	for _, g := range s.node.Machine().GPUs {
		list = append(list, g.UUID)
	}
	return list
}

// has reports whether engines find a name of our kind.
func (s *served) has(name string) bool {
	return slices.Contains(cdi.Load(s.dirs()...).Names(), cdi.DefaultKind+"="+name)
}

// dirs are the CDI directories, from the lowest priority to the highest.
func (s *served) dirs() []string {
	return []string{filepath.Join(s.node.Root(), "etc/cdi"), filepath.Dir(s.spec)}
}

// Allocate answers with UUIDs: a file that takes a name which people type costs no device.
func TestServeGivesAllDevicesWhereAnotherSpecDefinesOtherNames(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	s.start()
	s.listed(gpuResource, 8, 0)
	for _, name := range []string{"0", cdi.AllDevices} {
		path := s.writeForeign(cdi.DefaultKind, name)
		begin := `msg="` + path + " defines " + cdi.DefaultKind + "=" + name + " too"
		end := strings.Replace(begin, path, "no longer: "+path, 1)
		waitFor(t, "a warning", func() bool { return strings.Contains(s.log.String(), begin) })
		s.signal(syscall.SIGHUP) // reconciles once more
		s.allocate(s.listed(gpuResource, 8, 0), s.uuids()...)
		if !s.has(s.uuids()[0]) || !s.has(name) {
			t.Errorf("engines do not find %s, or the other file's %s", s.uuids()[0], name)
		}
		mustDo(t, os.Remove(path))
		waitFor(t, "a line about the end", func() bool { return strings.Contains(s.log.String(), end) })
		waitFor(t, "the name", func() bool { return s.has(name) })
		if n := strings.Count(s.log.String(), begin); n != 1 {
			t.Errorf("%d warnings about %s", n, name)
		}
	}
}

// Engines take ours, which counts more.
func TestServeGivesAllDevicesBesideACopyThatCountsLess(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	s.start()
	e := s.listed(gpuResource, 8, 0)
	data, err := os.ReadFile(s.spec)
	mustDo(t, err)
	mustDo(t, os.MkdirAll(s.dirs()[0], 0o755))
	path := filepath.Join(s.dirs()[0], "nvidia.yaml")
	mustDo(t, os.WriteFile(path, data, 0o644))
	waitFor(t, "a warning", func() bool { return strings.Contains(s.log.String(), path+" defines ") })
	s.allocate(e, s.uuids()...)
	s.listed(gpuResource, 8, 0)

	mustDo(t, s.end(syscall.SIGTERM)) // and so at the start
	s.start()
	s.allocate(s.listed(gpuResource, 8, 0), s.uuids()...)
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
	e := s.listed(gpuResource, 8, 0)
	taken, others := s.uuids()[3], slices.Delete(s.uuids(), 3, 4)

	path := s.writeForeign(cdi.DefaultKind, taken)
	begin := time.Now()
	s.listed(gpuResource, 7, 1)
	s.measured(7, 1)
	why := path + " defines " + cdi.DefaultKind + "=" + taken + " too"
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
	s.listed(gpuResource, 0, 8)
	waitFor(t, "a /readyz that names the file", func() bool {
		body, status := s.ask("/readyz")
		return status == http.StatusServiceUnavailable && strings.Contains(body, path)
	})

	mustDo(t, os.Remove(path))
	s.allocate(s.listed(gpuResource, 8, 0), s.uuids()...)
	s.measured(8, 0)
	waitFor(t, "a /readyz that names no file", func() bool {
		body, status := s.ask("/readyz")
		return status == http.StatusOK && body == "ok\n"
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
	mustDo(s.t, err)
	return cache
}

func TestServeStartsWithTheDevicesThatAnotherSpecLeaves(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	s.writeForeign(cdi.DefaultKind, s.uuids()[:7]...)
	s.start()
	s.allocate(s.listed(gpuResource, 1, 7), s.uuids()[7])
}

// As beside the vendor's own spec, which has all names.
func TestServeDoesNotStartWhereAnotherSpecTakesAllDevices(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	path := s.writeForeign(cdi.DefaultKind, append(s.uuids(), cdi.AllDevices)...)
	s.start()
	if err := s.ended(); err == nil || !strings.Contains(err.Error(), "exit status 1") {
		t.Errorf("it ended with %v", err)
	}
	for _, want := range []string{path, "remove " + path, "--cdi-kind", "8 healthy devices"} {
		if !strings.Contains(s.log.String(), want) {
			t.Errorf("the log has no %q", want)
		}
	}
	if _, err := os.Stat(s.spec); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it wrote a spec: %v", err)
	}
}

// A name that serve leaves to another file is not what `cdi diff` finds fault with.
func TestDiffAllowsForNamesThatAnotherSpecHas(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	s.writeForeign(cdi.DefaultKind, s.uuids()[3], cdi.AllDevices)
	s.start()
	s.listed(gpuResource, 7, 1)
	if out, err := s.diff(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	data, err := os.ReadFile(s.spec)
	mustDo(t, err)
	_ = s.end(syscall.SIGKILL) // which is what it says
	mustDo(t, os.WriteFile(s.spec, []byte(strings.ReplaceAll(string(data), "/dev/nvidia5", "/dev/nvidia6")), 0o644))
	if out, err := s.diff(); err == nil || !strings.Contains(out, "device 5") || strings.Contains(out, "device 3") {
		t.Errorf("of a spec that was edited: %v: %s", err, out)
	}
}

// diff is the output of `cdi diff`.
func (s *served) diff() (string, error) {
	s.t.Helper()
	exe, err := os.Executable()
	mustDo(s.t, err)
	cmd := exec.Command(exe)
	cmd.Args = []string{
		"gpu-cdi-plugin", "cdi", "diff", "--root", s.node.Root(), "--cdi-dir", filepath.Dir(s.spec),
		"--hook-path", "/bin/true",
	}
	cmd.Env = append(os.Environ(), insecure)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
