package e2e

import (
	_ "embed"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestPodmanUserNamespace gives GPUs to containers with a user namespace, whose users can open the nodes.
func TestPodmanUserNamespace(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "dgx-h100")
	root := t.TempDir()
	wrapper, hooks := hookInstalled(t, root, "podman"), filepath.Join(root, "etc")
	request := requests(t, n)["a UUID"]
	for _, e := range shared.Runtimes() {
		for _, p := range []*engine.Podman{{Hooks: hooks}, {Wrapper: wrapper}} {
			p.Runtime, p.Cgroup, p.Images, p.Users = e.Runtime, e.Cgroup, e.Images, true
			t.Run(p.String(), func(t *testing.T) {
				t.Parallel()
				res := p.Run(t, engine.Container{
					Image: image.Glibc, Args: append([]string{"sh", "-c", `ls -l /dev/nvidiactl >&2; exec "$@"`, "sh"}, smi()...),
					CDIDir: n.CDIDir, Annotations: annotations(names(request.names...)...),
				})
				checkList(t, res, request.want)
				if !strings.Contains(res.Stderr, "crw-rw-rw-") {
					t.Errorf("the mode of a node is not that of the host: %v", res)
				}
			})
		}
	}
}

// rootless runs podman as an ordinary user. Its arguments are the directory of the programs, the archive of an image
// and the runtime.
//
//go:embed testdata/rootless
var rootless string

// TestRootlessPodman gives a GPU to containers of an ordinary user, whose hooks run as that user.
func TestRootlessPodman(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	for _, program := range []string{"podman", "newuidmap", "setpriv"} {
		testenv.Command(t, program)
	}
	n := shared.Node(t, "dgx-h100")
	archive := filepath.Join(t.TempDir(), "image.tar")
	env := []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	root := shared.Images.Copy(t, image.Glibc)
	testenv.Must(t, image.WriteArchive(archive, "localhost/gpu:test", root, image.Config{Env: env}))
	bin := filepath.Dir(shared.Program(t, "prestart-hook"))
	for _, runtime := range []string{"runc", "crun"} {
		t.Run(runtime, func(t *testing.T) {
			t.Parallel()
			path := testenv.Command(t, runtime)
			res := proc.Must(t, 0, proc.Cmd{Args: engine.Namespace(t, t.TempDir(), userAccount(t, path), engine.V1,
				"bash", "-c", rootless, "rootless", bin, archive, path)})
			for container := range strings.SplitSeq(res.Stdout, "== ") {
				position, out, _ := strings.Cut(container, "\n")
				switch position {
				case "":
				case "create-runtime":
					if !strings.Contains(out, "a rootless engine cannot use it") {
						t.Errorf("%s: want an error: %s%s", position, out, res.Stderr)
					}
				case "device":
					// The runtimes mount the host's node with the container's path, which does not exist.
					if !strings.Contains(strings.ToLower(out), "no such file or directory") || strings.Contains(out, "GPU 0:") {
						t.Errorf("%s: want an error about a node below the driver's root: %s%s", position, out, res.Stderr)
					}
				default:
					t.Run(position, func(t *testing.T) {
						checkList(t, proc.Result{Stdout: out}, requests(t, n)["an index"].want)
						if t.Failed() {
							t.Log(res.Stderr)
						}
					})
				}
			}
			if got := strings.Count(res.Stdout, "== "); got != 6 {
				t.Errorf("%d containers, want 6", got)
			}
		})
	}
}

// userAccount makes a directory for /etc with a user 1234 who has subordinate IDs, and the policy that has
// gpu-cdi-runtime run a runtime.
func userAccount(t *testing.T, runtime string) (etc string) {
	t.Helper()
	etc = t.TempDir()
	users, err := os.ReadFile("/etc/passwd")
	groups, groupErr := os.ReadFile("/etc/group")
	errs := []error{err, groupErr, os.Mkdir(filepath.Join(etc, "gpu-cdi-plugin"), 0o755)}
	for name, text := range map[string]string{
		"passwd":                   string(users) + "rootless:x:1234:1234::/run/home:/bin/sh\n",
		"group":                    string(groups) + "rootless:x:1234:\n",
		"subuid":                   "rootless:300000:65536\n",
		"subgid":                   "rootless:300000:65536\n",
		"gpu-cdi-plugin/hook.yaml": "runtime: " + runtime + "\n",
	} {
		errs = append(errs, os.WriteFile(filepath.Join(etc, name), []byte(text), 0o644))
	}
	testenv.Must(t, errors.Join(errs...))
	return etc
}
