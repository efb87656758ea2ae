package kubelet

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// byMPS shares the first GPU by MPS; withoutMPS shares none.
const (
	byMPS = `
mps: true
sharing: {mps: {rename-by-default: true, resources: [{name: nvidia.com/gpu, devices: [0], replicas: 2}]}}
`
	withoutMPS = "{}"
	mpsClient  = simDir + "/cuda-mps-client"
	// shmSize is the size of what pods have as /dev/shm, in bytes.
	shmSize = 128 << 20
)

// TestGPUsSharedByMPS runs two pods with clients of one GPU's MPS daemon, beside a pod with a whole GPU. The clients
// run on while the plugin is killed and started, and the pods see their limits.
func TestGPUsSharedByMPS(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	gpus := simtest.Node(t, "pcie-quad")
	// All users must be able to run the driver's programs, as on every host.
	testenv.Must(t, os.Chmod(filepath.Dir(filepath.Dir(gpus.Root())), 0o755))
	f := setUpOn(t, gpus, writeConfigTo(t, file, byMPS))
	mps := f.runMPS(t)
	all, name := f.uuids(t), gpuName+".shared"
	f.awaitDevices(t, name, []string{all[0] + "::0", all[0] + "::1"})
	f.awaitDevices(t, gpuName, all[1:])

	a, b, alone := newPod("a", name, 1), newPod("b", name, 1), newPod("alone", gpuName, 1)
	a.Command, b.Command = []string{mpsClient, "3600"}, []string{mpsClient, "3600"}
	sa, sb, single := f.launch(t, a), f.launch(t, b), f.launch(t, alone)
	checkDisjoint(t, f.check(t, a, sa), f.check(t, b, sb), f.check(t, alone, single))
	server := f.awaitClients(t, sa, 2, "")

	t.Run("the pods see their limits", func(t *testing.T) {
		memory := f.snapshot(t).Devices[0].MemoryBytes >> 20 / 2
		for _, s := range []PodStatus{sa, sb} {
			got := f.controlMPS(t, s, "get_default_device_pinned_mem_limit 0", "get_default_active_thread_percentage")
			if want := fmt.Sprintf("%dG 50.0", memory/1024); got != want {
				t.Errorf("pod %s has the limits %q, want %q", s.Name, got, want)
			}
			want := fmt.Sprintf("server=%s active_thread_percentage=50.0\ndevice=0 uuid=%s pinned_mem_limit=%d\n",
				server, all[0], memory<<20)
			if diff := cmp.Diff(want, f.inPod(t, s, mpsClient)); diff != "" {
				t.Errorf("a client in pod %s (-want +got):\n%s", s.Name, diff)
			}
		}
	})
	t.Run("the pods share a /dev/shm of limited size", func(t *testing.T) {
		const fill = "umask 0; : >/dev/shm/left; busybox head -c 150000000 /dev/zero >/dev/shm/large || echo full"
		measure := fmt.Sprintf(`[ -e /dev/shm/left ] && [ $(busybox stat -c %%s /dev/shm/large) -le %d ] && echo bounded
			busybox rm /dev/shm/large`, shmSize)
		got := f.inPod(t, sa, "sh", "-c", fill) + f.inPod(t, sb, "sh", "-c", measure)
		if want := "full\nbounded\n"; got != want {
			t.Errorf("the pods print %q, want %q", got, want)
		}
	})
	t.Run("the pods cannot change the daemon's directory", func(t *testing.T) {
		const script = `cd $CUDA_MPS_PIPE_DIRECTORY || exit
			{ busybox touch ours || busybox rm control || busybox mv control ours; } 2>/dev/null || echo refused`
		if got, want := f.inPod(t, sa, "sh", "-c", script), "refused\n"; got != want {
			t.Errorf("the pod prints %q, want %q", got, want)
		}
	})
	t.Run("a GPU that is not shared is exclusive", func(t *testing.T) {
		res, err := f.Exec(t.Context(), single.Container, mpsClient)
		if err != nil || res.Code != 3 || !strings.Contains(res.Stderr, "without MPS") {
			t.Errorf("a client in a pod with a whole GPU: %v, %v", res, err)
		}
	})
	t.Run("more than one replica is refused", func(t *testing.T) { f.expectRefusal(t, newPod("two", name, 2)) })
	t.Run("clients run on without the plugin", func(t *testing.T) {
		ids := f.check(t, a, sa)
		f.killPlugin(t)
		f.awaitDevices(t, name, nil)
		if now := f.awaitClients(t, sa, 2, ""); now != server {
			t.Errorf("the server was %s and is %s", server, now)
		}
		f.plugin = f.serve(t, "--config="+file)
		f.awaitDevices(t, name, []string{all[0] + "::0", all[0] + "::1"})
		f.checkUnchanged(t, a, sa, ids)
		testenv.Must(t, f.Remove(t.Context(), b.Name))
		fresh := newPod("fresh", name, 1)
		fresh.Command = a.Command
		checkDisjoint(t, ids, f.check(t, fresh, f.launch(t, fresh)))
		if now := f.awaitClients(t, sa, 2, ""); now != server {
			t.Errorf("the server was %s and is %s", server, now)
		}
		testenv.Must(t, f.Remove(t.Context(), fresh.Name))
	})
	t.Run("clients of a user who is not root", func(t *testing.T) {
		testenv.Must(t, f.Remove(t.Context(), a.Name))
		p := newPod("user", name, 1)
		p.User, p.Command = 1000, a.Command
		f.awaitClients(t, f.launch(t, p), 1, server)
		testenv.Must(t, f.Remove(t.Context(), p.Name))
	})
	t.Run("a GPU that is no longer shared is offered whole", func(t *testing.T) {
		writeConfigTo(t, file, withoutMPS)
		f.reconcile(t)
		f.awaitDevices(t, gpuName, all)
	})
	if code, err := mps.Stop(time.Minute); err != nil || code != 0 {
		t.Errorf("mps has the exit status %d, %v", code, err)
	}
}

// runMPS runs the daemons like the pod of the chart: with a tmpfs of the node as /dev/shm.
func (f *fixture) runMPS(t *testing.T) *Daemon {
	t.Helper()
	script := fmt.Sprintf(`set -e
		shm=/run/gpu-cdi-plugin/mps/shm
		mkdir -p $shm
		mount -t tmpfs -o size=%d,mode=1777 gpu-cdi-mps $shm
		exec unshare -m sh -c 'mount --bind "$0" /dev/shm; exec "$@"' $shm "$@"`, shmSize)
	d := f.NewDaemon("mps", "sh", "-c", script, "sh",
		shared.Program(t, "gpu-cdi-plugin"), "--root", f.gpus.Root(), "--insecure-paths", "mps", "--all")
	testenv.Must(t, d.Start())
	t.Cleanup(func() {
		if d.Running() {
			_ = d.Kill()
		}
	})
	return d
}

// writeConfigTo writes a configuration file and returns the flag that names it.
func writeConfigTo(t *testing.T, file, content string) string {
	t.Helper()
	testenv.Must(t, os.WriteFile(file, []byte(content), 0o644))
	return "--config=" + file
}

// controlMPS sends commands to the MPS daemon from a pod and returns the responses, separated by spaces.
func (f *fixture) controlMPS(t *testing.T, s PodStatus, commands ...string) string {
	t.Helper()
	const script = `printf '%s\n' "$@" | nvidia-cuda-mps-control`
	args := append([]string{"sh", "-c", script, "sh"}, commands...)
	return strings.Join(strings.Fields(f.inPod(t, s, args...)), " ")
}

var number = regexp.MustCompile(`^[0-9]+$`)

// awaitClients waits until a pod's MPS daemon has one server, not the one of before, with so many clients. It returns
// the server's process ID.
func (f *fixture) awaitClients(t *testing.T, s PodStatus, want int, before string) (server string) {
	t.Helper()
	err := kubenode.Wait(t.Context(), time.Minute, fmt.Sprintf("one server has %d clients", want), func() error {
		server = f.controlMPS(t, s, "get_server_list")
		if !number.MatchString(server) || server == before {
			return fmt.Errorf("servers: %q", server)
		}
		pids := strings.Fields(f.controlMPS(t, s, "get_client_list "+server))
		if len(pids) != want || !slices.ContainsFunc(pids, number.MatchString) {
			return fmt.Errorf("clients: %q", pids)
		}
		return nil
	})
	testenv.Must(t, err)
	return server
}
