package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// annotations asks for devices, each in an annotation of its own: podman's --annotation splits values at commas.
func annotations(devices ...string) map[string]string {
	all := map[string]string{}
	for i, name := range devices {
		all[fmt.Sprintf("cdi.k8s.io/gpu%d", i)] = name
	}
	return all
}

// hookInstalled runs hook install for an engine of a host in a directory, and returns the path of its gpu-cdi-runtime.
// The directory of the hook has the same path on this machine, so that engines can run both.
func hookInstalled(t *testing.T, root, engine string) (wrapper string) {
	t.Helper()
	hook := filepath.Join(t.TempDir(), "libexec", "prestart-hook")
	below := filepath.Join(root, hook)
	testenv.Must(t, os.MkdirAll(filepath.Dir(below), 0o755), os.Symlink(filepath.Dir(below), filepath.Dir(hook)))
	image.CopyFile(t, shared.Program(t, "prestart-hook"), below)
	proc.Must(t, 0, proc.Cmd{Args: []string{
		shared.Program(t, "gpu-cdi-plugin"), "--root", root, "--hook-path", hook, "hook", "install", engine,
	}})
	return filepath.Join(filepath.Dir(hook), "gpu-cdi-runtime-"+engine)
}

// behindWrapper runs containers by gpu-cdi-runtime, which hook install has made for podman, on a runtime.
func behindWrapper(t *testing.T, root string, e *engine.Bare) *engine.Bare {
	t.Helper()
	return &engine.Bare{Runtime: e.Runtime, Wrapper: hookInstalled(t, root, "podman"), Cgroup: e.Cgroup, Images: e.Images}
}

// withLiveHook runs containers with a hook that gives the created container its devices.
func withLiveHook(t *testing.T, e *engine.Bare) *engine.Bare {
	t.Helper()
	return &engine.Bare{Runtime: e.Runtime, Hook: shared.Program(t, "prestart-hook"), Cgroup: e.Cgroup, Images: e.Images}
}

// annotated are the engines that give containers devices by annotations: runtimes behind gpu-cdi-runtime or with a
// createRuntime hook, and podman on gpu-cdi-runtime or with the hook of hook install.
func annotated(t *testing.T) (all []engine.Engine) {
	t.Helper()
	for _, e := range shared.Runtimes() {
		root := t.TempDir()
		wrapped := behindWrapper(t, root, e)
		all = append(all, wrapped, withLiveHook(t, e),
			&engine.Podman{Runtime: e.Runtime, Wrapper: wrapped.Wrapper, Cgroup: e.Cgroup, Images: e.Images},
			&engine.Podman{Runtime: e.Runtime, Hooks: filepath.Join(root, "etc"), Cgroup: e.Cgroup, Images: e.Images})
	}
	return all
}

// TestAnnotations gives containers GPUs by an annotation, without a request of the engine.
func TestAnnotations(t *testing.T) {
	t.Parallel()
	checkAnnotations(t, annotated(t)...)
}

// The runc of Debian 12 is 1.1.
func TestSlowAnnotationsWithACurrentRunc(t *testing.T) {
	t.Parallel()
	v1 := &engine.Bare{Runtime: shared.Peer(t, "runc"), Cgroup: engine.V1, Images: shared.Images}
	v2 := &engine.Bare{Runtime: v1.Runtime, Cgroup: engine.V2, Images: shared.Images}
	checkAnnotations(t, withLiveHook(t, v1), withLiveHook(t, v2), behindWrapper(t, t.TempDir(), v2))
}

func checkAnnotations(t *testing.T, engines ...engine.Engine) {
	t.Helper()
	n := shared.Node(t, "dgx-h100")
	const listFails = "not found" // without a GPU there is no nvidia-smi
	all := requests(t, n)
	for _, e := range engines {
		for _, request := range []string{"a UUID", "two devices"} {
			t.Run(e.String()+"/"+request, func(t *testing.T) {
				t.Parallel()
				res := e.Run(t, engine.Container{
					Image: image.Glibc, Args: smi(), CDIDir: n.CDIDir,
					Annotations: annotations(names(all[request].names...)...),
				})
				checkList(t, res, all[request].want)
			})
		}
		t.Run(e.String()+"/the image's wish", func(t *testing.T) {
			t.Parallel()
			res := e.Run(t, engine.Container{
				Image: image.Glibc, Args: append(smi()[:2], "ls /dev/nvidia*; "+containerSMI+" -L"),
				CDIDir: n.CDIDir, Env: []string{"NVIDIA_VISIBLE_DEVICES=all"},
			})
			if res.Code == 0 || !strings.Contains(res.Stderr, listFails) || strings.Contains(res.Stdout, "nvidia") {
				t.Errorf("a container without an annotation: %v", res)
			}
		})
		t.Run(e.String()+"/the exit status", func(t *testing.T) {
			t.Parallel()
			res := e.Run(t, engine.Container{
				Image: image.Glibc, Args: []string{"sh", "-c", "exit 7"}, CDIDir: n.CDIDir,
				Annotations: annotations("nvidia.com/gpu=0"),
			})
			if res.Code != 7 {
				t.Errorf("want exit status 7, got %v", res)
			}
		})
		t.Run(e.String()+"/refused", func(t *testing.T) {
			t.Parallel()
			for name, want := range map[string]string{
				"nvidia.com/gpu=9":    "device nvidia.com/gpu=9 does not exist",
				"a.b/c=0":             "device a.b/c=0 does not exist",
				"nvidia.com/gpu=../0": `device "nvidia.com/gpu=../0"`,
			} {
				res := e.Run(t, engine.Container{
					Image: image.Glibc, Args: []string{"sh", "-c", "echo started"}, CDIDir: n.CDIDir,
					Annotations: annotations("nvidia.com/gpu=0", name),
				})
				if p, ok := e.(*engine.Podman); ok && p.Hooks != "" {
					want = "precreate" // podman 4 does not show a hook's message
				}
				message := strings.ReplaceAll(res.Stderr, `\"`, `"`) // as runc quotes a hook's
				if res.Code == 0 || strings.Contains(res.Stdout, "started") || !strings.Contains(message, want) {
					t.Errorf("%s: want an error with %q, got %v", name, want, res)
				}
			}
		})
	}
}

// TestPodmanCreateRuntimeHook gives podman's containers a GPU after they are created. With a read-only root podman
// mounts a tmpfs at /run, where sockets of the driver go.
func TestPodmanCreateRuntimeHook(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "dgx-h100")
	root := t.TempDir()
	hookInstalled(t, root, "live")
	hooks := filepath.Join(root, "usr/share/containers/oci/hooks.d")
	request := requests(t, n)["a UUID"]
	for _, e := range shared.Runtimes() {
		for name, c := range map[string]struct{ readOnly, users bool }{
			"": {}, "/read-only": {readOnly: true}, "/user namespace": {users: true},
		} {
			p := &engine.Podman{Runtime: e.Runtime, HooksDir: hooks, Users: c.users, Cgroup: e.Cgroup, Images: e.Images}
			t.Run(p.String()+name, func(t *testing.T) {
				t.Parallel()
				res := p.Run(t, engine.Container{
					Image: image.Glibc, Args: smi(), CDIDir: n.CDIDir, ReadOnly: c.readOnly,
					Annotations: annotations(names(request.names...)...),
				})
				checkList(t, res, request.want)
			})
		}
	}
}
