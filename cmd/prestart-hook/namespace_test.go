package main

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	testimage "gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The hook changes a root only if it is a mount point in a mount namespace other than that of process 1.
func TestOnlyAContainersRootIsChanged(t *testing.T) {
	needRoot(t)
	// Process 1 is this shell. Some sandboxes forbid access to the namespaces of the machine's process 1.
	const newPID = "unshare --pid --fork --mount --mount-proc sh -ec"
	for name, tc := range map[string]struct {
		script string
		want   string // the error; if empty, the root is changed
	}{
		"a mount point": {script: `mount --bind "$ROOT" "$ROOT"; exec "$@"`},
		"an ordinary directory": {
			script: `exec "$@"`, want: "not a mount point",
		},
		"process 1 is in the same namespace": {
			script: newPID + ` 'mount --bind "$ROOT" "$ROOT"; "$@"; exit $?' sh "$@"`,
			want:   "in the host's mount namespace",
		},
		"process 1 is in another namespace": {
			script: newPID + ` 'unshare --mount sh -ec "mount --bind \"$ROOT\" \"$ROOT\"; exec \"\$@\"" sh "$@"
				exit $?' sh "$@"`,
		},
		"process 1 is hidden from root": {
			script: `mount -t proc -o hidepid=2 proc /proc; mount --bind "$ROOT" "$ROOT"; exec "$@"`,
		},
		"process 1 is hidden from an unprivileged user": {
			script: `mount -t proc -o hidepid=2 proc /proc; mount --bind "$ROOT" "$ROOT"
				exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"`,
			want: "compare its mount namespace with the host's",
		},
		"process 1 is hidden in a user namespace": {
			script: `mount -t proc -o hidepid=2 proc /proc
				exec setpriv --reuid=65534 --regid=65534 --clear-groups unshare --user --map-root-user --mount sh -ec '
				mount --bind "$ROOT" "$ROOT"; exec "$@"' sh "$@"`,
		},
		"a user namespace, but the mount namespace of the parent": {
			script: `mount -t proc -o hidepid=2 proc /proc; mount --bind "$ROOT" "$ROOT"
				exec setpriv --reuid=65534 --regid=65534 --clear-groups unshare --user --map-root-user "$@"`,
			want: "compare its mount namespace with the host's",
		},
		"a user namespace that sees process 1": {
			script: `exec setpriv --reuid=65534 --regid=65534 --clear-groups \
				unshare --user --map-root-user --mount sh -ec '
				mount --bind "$ROOT" "$ROOT"; exec "$@"' sh "$@"`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := filepath.Join(t.TempDir(), "root")
			(&container{t: t, root: root}).write("/etc/empty", "")
			chown(t, root, 65534)
			before := testimage.Fingerprint(t, root)
			cmd := exec.Command(testenv.Command(t, "unshare"), "--mount", "sh", "-ec", tc.script, "sh",
				hookBinary(t), "create-container", "--link=/etc/link::target")
			cmd.Env = []string{"ROOT=" + root, "PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
			cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"id":"x","root":%q}`, root))
			out, err := cmd.CombinedOutput()
			changed := testimage.Fingerprint(t, root) != before
			if tc.want == "" && (err != nil || !changed) {
				t.Errorf("%v: %s, want a link", err, out)
			}
			if tc.want != "" && (cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(out), tc.want) ||
				changed) {
				t.Errorf("%v: %s, changed: %v, want %q and no change", err, out, changed, tc.want)
			}
		})
	}
}
