package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// withCRIO runs a command beside a CRI-O of the tests, with /run, the CDI directory and the storage of its own, into
// which podman loads images, and then prints the images, containers and pods that are left.
const withCRIO = `
set -e
cdi=$1 bin=$2 pause=$3
shift 3
mount -n -t tmpfs tmpfs /run
mkdir /run/cdi /run/c
mount --bind "$cdi" /run/cdi
cat >/run/c/storage.conf <<END
[storage]
driver = "overlay"
graphroot = "/run/c/root"
runroot = "/run/c/runroot"
END
cat >/run/c/crio.conf <<END
[crio]
log_dir = "/run/c/logs"
clean_shutdown_file = "/run/c/clean"
[crio.runtime]
cgroup_manager = "cgroupfs"
pinns_path = "$bin/pinns"
irqbalance_config_restore_file = "disable"
default_runtime = "runc"
[crio.runtime.runtimes.runc]
runtime_path = "$bin/runc"
monitor_path = "$bin/conmon"
monitor_cgroup = "pod"
[crio.image]
pause_image = "localhost/pause:test"
[crio.network]
network_dir = "/run/c/net.d"
plugin_dirs = ["/run/c/cni"]
[crio.nri]
enable_nri = false
END
export PATH="$bin:$PATH" CONTAINERS_STORAGE_CONF=/run/c/storage.conf
export CONTAINER_RUNTIME_ENDPOINT=unix:///run/crio/crio.sock
podman load --quiet --input "$pause" >&2
crio --config /run/c/crio.conf --config-dir /run/c/conf.d >/run/c/log 2>&1 &
for i in $(seq 600); do
	if crictl version >/dev/null 2>&1; then
		"$@" || status=$?
		crictl rmi localhost/pause:test >&2
		crictl images --quiet
		crictl ps --all --quiet
		crictl pods --quiet
		exit ${status:-0}
	fi
	kill -0 $! || break
	sleep 0.1
done
cat /run/c/log >&2
exit 99
`

// besideCRIO returns the command that runs another one withCRIO. Pods have the parent cgroup that the suite removes.
func besideCRIO(t *testing.T, cdi string, command ...string) []string {
	t.Helper()
	bin := t.TempDir()
	for name, program := range map[string]string{
		"crio": shared.NodePeer(t, "crio"), "pinns": shared.NodePeer(t, "pinns"), "runc": shared.NodePeer(t, "runc"),
		"ctr":    shared.NodePeer(t, "ctr"), // which docker brings along
		"conmon": testenv.Command(t, "conmon"), "podman": testenv.Command(t, "podman"),
	} {
		testenv.Must(t, os.Symlink(program, filepath.Join(bin, name)))
	}
	testenv.WriteProgram(t, filepath.Join(bin, "crictl"), fmt.Appendf(nil, `#!/bin/sh
if [ "$1" = runp ]; then sed -i 's|"linux":{|&"cgroup_parent":"/gpu-test-%d",|' "$2"; fi
exec %s "$@"
`, os.Getpid(), shared.NodePeer(t, "crictl")))
	// CRI-O wants the image also for pods that have no container of it.
	pause := filepath.Join(t.TempDir(), "pause.tar")
	testenv.Must(t, image.WriteArchive(pause, "localhost/pause:test", t.TempDir(), image.Config{}))
	return append([]string{
		testenv.Command(t, "unshare"), "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
		"--mount-proc", "sh", "-c", withCRIO, "sh", cdi, bin, pause,
	}, command...)
}

// behindCRIO runs a script beside a CRI-O.
func behindCRIO(t *testing.T, n *sim.Node, script string) proc.Result {
	t.Helper()
	env, command := installed(t, n, script)
	res, err := proc.Run(t.Context(), proc.Cmd{Env: env, Args: besideCRIO(t, t.TempDir(), command...)})
	testenv.Must(t, err)
	return res
}
