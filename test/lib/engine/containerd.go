package engine

import (
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// withContainerd runs a command beside a containerd, with /run and the CDI directory of its own. ctr finds the server
// by the environment.
const withContainerd = `
set -e
cdi=$1 containerd=$2
shift 2
mount -n -t tmpfs tmpfs /run
mkdir /run/cdi /run/c
mount --bind "$cdi" /run/cdi
cat >/run/c/config.toml <<END
version = 3
root = "/run/c/root"
state = "/run/c/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images"]
[grpc]
address = "/run/c/sock"
[ttrpc]
address = "/run/c/ttrpc"
END
export PATH="${containerd%/*}:$PATH" CONTAINERD_ADDRESS=/run/c/sock
"$containerd" -c /run/c/config.toml >/run/c/log 2>&1 &
for i in $(seq 600); do
	if ctr version >/dev/null 2>&1; then "$@"; exit; fi
	sleep 0.1
done
cat /run/c/log >&2
exit 99
`

// BesideContainerd returns the command that runs another one withContainerd, in a mount and a PID namespace of its own.
// The programs of containerd are in one directory.
func BesideContainerd(t testing.TB, containerd, cdi string, command ...string) []string {
	t.Helper()
	return append([]string{
		testenv.Command(t, "unshare"), "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
		"--mount-proc", "sh", "-c", withContainerd, "sh", cdi, containerd,
	}, command...)
}
