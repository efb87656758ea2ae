// Package boot runs scripts in throw-away roots, also with a real systemd as process 1.
package boot

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

//go:embed boot.sh
var script string

// Mode is what a script has around it.
type Mode string

// The modes.
const (
	Chroot     Mode = "chroot"
	Namespaces Mode = "namespaces" // with cgroup v2 at /sys/fs/cgroup
	// Controllers is Namespaces, but with the version of cgroups that has this machine's controllers.
	Controllers Mode = "controllers"
	Systemd     Mode = "systemd" // Namespaces, and systemd as process 1
)

// timeout is how long all boots of a root may take, on a busy machine too.
const timeout = 10 * time.Minute

// Root is a throw-away root: the files of Lower, and over them those of the test.
type Root struct {
	Lower string // "/" is that of this machine
	dir   string
}

// NewRoot makes a root over another one, for root only.
func NewRoot(t testing.TB, lower string) *Root {
	t.Helper()
	testenv.Root(t)
	r := &Root{Lower: lower, dir: t.TempDir()}
	for _, name := range []string{"root", "scratch", "out", "files/srv"} {
		testenv.Must(t, os.MkdirAll(filepath.Join(r.dir, name), 0o755))
	}
	testenv.Must(t, os.Chmod(r.dir, 0o755))
	return r
}

// File returns the path at which a test puts a file of the root before the first boot.
func (r *Root) File(name string) string { return filepath.Join(r.dir, "files", name) }

// Out returns the path of a file that a script has written to /media.
func (r *Root) Out(name string) string { return filepath.Join(r.dir, "out", name) }

// Written returns the path of a file, or directory, that was written below the root, while the test runs.
func (r *Root) Written(name string) string { return filepath.Join(r.dir, "scratch/upper", name) }

// boots numbers the cgroups of this process's boots.
var boots atomic.Int64

// Run runs each script in the root, with a boot before each. It may be called once.
func (r *Root) Run(t testing.TB, mode Mode, scripts ...string) proc.Result {
	t.Helper()
	testenv.MountNamespace(t)
	cgroup := fmt.Sprintf("/gpu-boot-%d-%d", os.Getpid(), boots.Add(1))
	testenv.Must(t, engine.MakeCgroups(cgroup))
	t.Cleanup(func() {
		_ = unix.Unmount(filepath.Join(r.dir, "root"), unix.MNT_DETACH)
		_ = unix.Unmount(filepath.Join(r.dir, "scratch"), unix.MNT_DETACH)
		testenv.Must(t, engine.RemoveCgroups(cgroup))
	})
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	args := append([]string{"/bin/sh", "-c", script, "boot.sh", r.Lower, r.dir, string(mode), cgroup}, scripts...)
	res, err := proc.Run(ctx, proc.Cmd{Args: args})
	testenv.Must(t, err)
	return res
}
