package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
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
for i in $(seq 100); do
	if ctr version >/dev/null 2>&1; then "$@"; exit; fi
	sleep 0.1
done
cat /run/c/log >&2
exit 99
`

// TestAnnotationsInContainerd has containerd start its containers by gpu-cdi-runtime. containerd shows an error only if
// it is in the runtime's log.
func TestAnnotationsInContainerd(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	testenv.Command(t, "runc")
	n := shared.Node(t, "workstation")
	all := requests(t, n)["an index"]
	wrapper := filepath.Join(t.TempDir(), "gpu-cdi-runtime")
	if err := os.Symlink(shared.Program(t, "prestart-hook"), wrapper); err != nil {
		t.Fatal(err)
	}
	run := func(device string) proc.Result {
		t.Helper()
		last := device[len(device)-1:]
		args := append([]string{
			testenv.Command(t, "unshare"), "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
			"--mount-proc", "sh", "-c", withContainerd, "sh", n.CDIDir, shared.NodePeer(t, "containerd"),
			shared.NodePeer(t, "ctr"), "run", "--rm", "--runc-binary", wrapper, "--env", "PATH=/usr/sbin:/usr/bin",
			"--annotation", "cdi.k8s.io/a=" + device,
			// Below the cgroup that the suite removes at its end.
			"--cgroup", fmt.Sprintf("/gpu-test-%d/ctr-%s", os.Getpid(), last),
			"--rootfs", shared.Images.Copy(t, image.Glibc), fmt.Sprintf("gpu-test-%d-%s", os.Getpid(), last),
		}, smi(t, n)...)
		res, err := proc.Run(t.Context(), proc.Cmd{Args: args})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	checkList(t, run(names(all.names...)[0]), all.want)
	res := run("nvidia.com/gpu=9")
	if want := "device nvidia.com/gpu=9 does not exist"; res.Code == 0 || !strings.Contains(res.Stderr, want) {
		t.Errorf("want an error with %q, got %v", want, res)
	}
}
