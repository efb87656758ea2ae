package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestDoctorTriesPodman has the doctor start a container with podman. The device nodes of a simulated node have no
// driver, so each try says so, unless they are made like /dev/null.
func TestDoctorTriesPodman(t *testing.T) {
	t.Parallel()
	testenv.Command(t, "podman")
	for name, c := range map[string]struct {
		change func(*testing.T, *suite.Node)
		device string
		// want are the IDs and parts of the problems of the findings about the try.
		want [][2]string
	}{
		"a container that can use its GPU": {makeOpenable, "nvidia.com/gpu=all", nil},
		"a spec that needs no hook": {
			func(t *testing.T, n *suite.Node) {
				t.Helper()
				makeOpenable(t, n)
				n.Plugin(t, 0, "--no-hook", "cdi", "generate", "--file", n.Spec())
			},
			"all", nil,
		},
		"a device that no spec has": {
			makeOpenable, "7", [][2]string{{"try-failed", "unresolvable CDI devices nvidia.com/gpu=7"}},
		},
		"a device node that the device cgroup denies": {
			func(t *testing.T, n *suite.Node) {
				t.Helper()
				makeOpenable(t, n)
				testenv.Must(t, os.Remove(filepath.Join(n.Root(), "dev/nvidia0")),
					unix.Mknod(filepath.Join(n.Root(), "dev/nvidia0"), unix.S_IFCHR|0o666, int(unix.Mkdev(195, 0))))
				editSpec(t, n, func(e *specs.ContainerEdits) {
					for _, node := range e.DeviceNodes {
						node.Permissions = "m"
					}
				})
			},
			"nvidia.com/gpu=0",
			[][2]string{{"try-differs", "/dev/nvidia0 in the container: the device cgroup of the container does not allow it"}},
		},
		"a GPU that no driver serves": {
			func(t *testing.T, n *suite.Node) {
				t.Helper()
				makeOpenable(t, n)
				testenv.Must(t, os.Remove(filepath.Join(n.Root(), "dev/nvidia0")),
					unix.Mknod(filepath.Join(n.Root(), "dev/nvidia0"), unix.S_IFCHR|0o666, int(unix.Mkdev(195, 0))))
			},
			"nvidia.com/gpu=0",
			[][2]string{{"try-differs", "/dev/nvidia0 in the container: no driver serves it"}},
		},
		"a spec without its hook": {
			withoutHook, "nvidia.com/gpu=0",
			[][2]string{{"try-differs", "/etc/ld.so.cache in the container: the loader does not find"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := shared.Node(t, "workstation")
			c.change(t, n)
			env := engine.PodmanFor(t, testenv.Command(t, "podman"), "runc")
			checkTry(t, tryPodman(t, n, engine.V1, env, c.device), c.want)
		})
	}
}

// tryPodman returns the try of the podman in an environment. It then prints the images and containers that are left.
func tryPodman(t *testing.T, n *suite.Node, c engine.Cgroup, env []string, device string) proc.Cmd {
	t.Helper()
	namespace := engine.Namespace(t, n.CDIDir, "", c,
		"sh", "-c", `"$@"; podman images --quiet; podman ps --all --quiet`, "sh")
	return proc.Cmd{Args: append(namespace, try(t, n, "podman", device)...), Env: env}
}

// withDocker runs a command beside a dockerd of the tests, with /run and the CDI directory of its own, and then prints
// the images and containers that are left.
const withDocker = `
set -e
cdi=$1 bin=$2 cgroup=$3
shift 3
mount -n -t tmpfs tmpfs /run
mkdir /run/cdi /run/d
mount --bind "$cdi" /run/cdi
if [ -d /etc/docker ]; then mount -n -t tmpfs tmpfs /etc/docker; fi
export PATH="$bin:$PATH" DOCKER_CONFIG=/run/d/config HOME=/run/d
dockerd --data-root /run/d/data --exec-root /run/d/exec --pidfile /run/d/pid --host unix:///run/docker.sock \
	--bridge none --iptables=false --ip6tables=false --userland-proxy=false --cgroup-parent "$cgroup" \
	--exec-opt native.cgroupdriver=cgroupfs --seccomp-profile unconfined >/run/d/log 2>&1 &
for i in $(seq 600); do
	if docker version >/dev/null 2>&1; then
		"$@" || true
		docker images --quiet
		docker ps --all --quiet
		exit
	fi
	sleep 0.1
done
cat /run/d/log >&2
exit 99
`

// besideDocker returns the command that runs another one withDocker.
func besideDocker(t *testing.T, cdi string, command ...string) []string {
	t.Helper()
	bin := t.TempDir()
	for _, name := range []string{"docker", "dockerd", "containerd", "containerd-shim-runc-v2", "ctr", "runc"} {
		testenv.Must(t, os.Symlink(shared.NodePeer(t, name), filepath.Join(bin, name)))
	}
	return append([]string{
		testenv.Command(t, "unshare"), "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
		"--mount-proc", "sh", "-c", withDocker, "sh", cdi, bin, fmt.Sprintf("/gpu-test-%d", os.Getpid()),
	}, command...)
}

// TestSlowDoctorTriesOtherEngines has the doctor start a container with docker, podman 5 and CRI-O.
func TestSlowDoctorTriesOtherEngines(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	for name, c := range map[string]struct {
		change func(*testing.T, *suite.Node)
		device string
		want   [][2]string
	}{
		"a container that can use its GPU": {makeOpenable, "all", nil},
		"a device that no spec has": {
			makeOpenable, "7", [][2]string{{"try-failed", "unresolvable CDI devices nvidia.com/gpu=7"}},
		},
		"a spec without its hook": {
			withoutHook, "nvidia.com/gpu=0",
			[][2]string{{"try-differs", "/etc/ld.so.cache in the container: the loader does not find"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := shared.Node(t, "workstation")
			c.change(t, n)
			t.Run("docker", func(t *testing.T) {
				checkTry(t, proc.Cmd{Args: besideDocker(t, n.CDIDir, try(t, n, "docker", c.device)...)}, c.want)
			})
			t.Run("CRI-O", func(t *testing.T) {
				checkTry(t, proc.Cmd{Args: besideCRIO(t, n.CDIDir, try(t, n, "crictl", c.device)...)}, c.want)
			})
			t.Run("podman 5", func(t *testing.T) {
				testenv.Command(t, "conmon")
				// It is built without seccomp.
				env := engine.PodmanFor(t, shared.NodePeer(t, "podman5"), "runc", `seccomp_profile = "unconfined"`)
				checkTry(t, tryPodman(t, n, engine.V2, env, c.device), c.want)
			})
		})
	}
}

// try returns the command by which the doctor tries an engine on a node.
func try(t *testing.T, n *suite.Node, name, device string) []string {
	t.Helper()
	return []string{
		shared.Program(t, "gpu-cdi-plugin"), "--root", n.Root(), "--cdi-dir", n.CDIDir,
		"doctor", "--try", name, "--device", device, "-o", "json",
	}
}

// checkTry runs a try, and checks the IDs and parts of the problems of the findings about it. The command then prints
// the images and containers that are left.
func checkTry(t *testing.T, cmd proc.Cmd, want [][2]string) {
	t.Helper()
	res, err := proc.Run(t.Context(), cmd)
	testenv.Must(t, err)
	var result struct {
		Findings []struct{ ID, Subject, Problem, Fix string }
	}
	d := json.NewDecoder(strings.NewReader(res.Stdout))
	if err := d.Decode(&result); err != nil {
		t.Fatalf("the doctor's findings: %v\n%v", err, res)
	}
	if left := strings.TrimSpace(res.Stdout[d.InputOffset():]); left != "" {
		t.Errorf("an image or a container is left: %s", left)
	}
	var got [][2]string
	for _, f := range result.Findings {
		if strings.HasPrefix(f.ID, "try-") {
			got = append(got, [2]string{f.ID, f.Problem})
		}
	}
	if len(got) != len(want) {
		t.Fatalf("want %q, got %q\n%v", want, got, res)
	}
	for i := range got {
		if got[i][0] != want[i][0] || !strings.Contains(got[i][1], want[i][1]) {
			t.Errorf("want %q, got %q", want[i], got[i])
		}
	}
}

// withoutHook removes the hook from the node's spec.
func withoutHook(t *testing.T, n *suite.Node) {
	t.Helper()
	makeOpenable(t, n)
	editSpec(t, n, func(e *specs.ContainerEdits) { e.Hooks = nil })
}

// makeOpenable gives the driver's device nodes the numbers of /dev/null. Without proc/devices it is not known that
// these are wrong.
func makeOpenable(t *testing.T, n *suite.Node) {
	t.Helper()
	testenv.Must(t, os.Remove(filepath.Join(n.Root(), "proc/devices")))
	for _, pattern := range []string{"dev/nvidia[0-9]", "dev/nvidiactl", "dev/nvidia-[um]*", "dev/nvidia-caps/*"} {
		names, err := filepath.Glob(filepath.Join(n.Root(), pattern))
		testenv.Must(t, err)
		for _, name := range names {
			testenv.Must(t, os.Remove(name), unix.Mknod(name, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
		}
	}
}

// editSpec changes all edits of the node's spec.
func editSpec(t *testing.T, n *suite.Node, edit func(*specs.ContainerEdits)) {
	t.Helper()
	data, err := os.ReadFile(n.Spec())
	testenv.Must(t, err)
	var spec specs.Spec
	testenv.Must(t, json.Unmarshal(data, &spec))
	edit(&spec.ContainerEdits)
	for i := range spec.Devices {
		edit(&spec.Devices[i].ContainerEdits)
	}
	data, err = json.Marshal(spec)
	testenv.Must(t, err, os.WriteFile(n.Spec(), data, 0o644))
}
