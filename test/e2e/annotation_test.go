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
)

// annotations asks for devices, each in an annotation of its own: podman's --annotation splits values at commas.
func annotations(devices ...string) map[string]string {
	all := map[string]string{}
	for i, name := range devices {
		all[fmt.Sprintf("cdi.k8s.io/gpu%d", i)] = name
	}
	return all
}

// hookInstalled runs hook install for an engine of a host, and returns the path of gpu-cdi-runtime.
func hookInstalled(t *testing.T, root, engine string) (wrapper string) {
	t.Helper()
	hook := filepath.Join(t.TempDir(), "prestart-hook")
	if err := os.Symlink(shared.Program(t, "prestart-hook"), hook); err != nil {
		t.Fatal(err)
	}
	proc.Must(t, 0, proc.Cmd{Args: []string{
		shared.Program(t, "gpu-cdi-plugin"), "--root", root, "--hook-path", hook, "hook", "install", engine,
	}})
	return filepath.Join(filepath.Dir(hook), "gpu-cdi-runtime")
}

// annotated are the engines that give containers devices by annotations alone: those behind gpu-cdi-runtime, podman
// with the hook of hook install, and runtimes with a createRuntime hook.
func annotated(t *testing.T) []engine.Engine {
	t.Helper()
	root := t.TempDir()
	wrapper, hooks := hookInstalled(t, root, "podman"), filepath.Join(root, "etc")
	all := append(live(t), &engine.Bare{
		Runtime: shared.Peer(t, "runc"), Wrapper: wrapper, Cgroup: engine.V2, Images: shared.Images, // Debian's is 1.1
	})
	for _, e := range shared.Runtimes() {
		all = append(all,
			&engine.Bare{Runtime: e.Runtime, Wrapper: wrapper, Cgroup: e.Cgroup, Images: e.Images},
			&engine.Podman{Runtime: e.Runtime, Wrapper: wrapper, Cgroup: e.Cgroup, Images: e.Images},
			&engine.Podman{Runtime: e.Runtime, Hooks: hooks, Cgroup: e.Cgroup, Images: e.Images})
	}
	return all
}

// live are the runtimes with a hook that gives the created container its devices.
func live(t *testing.T) []engine.Engine {
	t.Helper()
	hook := shared.Program(t, "prestart-hook")
	var all []engine.Engine
	for _, e := range shared.Runtimes() {
		all = append(all, &engine.Bare{Runtime: e.Runtime, Hook: hook, Cgroup: e.Cgroup, Images: e.Images})
	}
	// Debian's runc is 1.1.
	newer := shared.Peer(t, "runc")
	for _, c := range []engine.Cgroup{engine.V1, engine.V2} {
		all = append(all, &engine.Bare{Runtime: newer, Hook: hook, Cgroup: c, Images: shared.Images})
	}
	return all
}

// TestAnnotations gives containers GPUs by an annotation, without a request of the engine.
func TestAnnotations(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "dgx-h100")
	const listFails = "not found" // without a GPU there is no nvidia-smi
	all := requests(t, n)
	for _, e := range annotated(t) {
		for _, request := range []string{"a UUID", "two devices"} {
			t.Run(e.String()+"/"+request, func(t *testing.T) {
				t.Parallel()
				res := e.Run(t, engine.Container{
					Image: image.Glibc, Args: smi(t, n), CDIDir: n.CDIDir,
					Annotations: annotations(names(all[request].names...)...),
				})
				checkList(t, res, all[request].want)
			})
		}
		t.Run(e.String()+"/the image's wish", func(t *testing.T) {
			t.Parallel()
			res := e.Run(t, engine.Container{
				Image: image.Glibc, Args: append(smi(t, n)[:2], "ls /dev/nvidia*; "+inContainer(t, n, n.SMI())+" -L"),
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
					Image: image.Glibc, Args: smi(t, n), CDIDir: n.CDIDir, ReadOnly: c.readOnly,
					Annotations: annotations(names(request.names...)...),
				})
				checkList(t, res, request.want)
			})
		}
	}
}
