package prepare

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// withoutHybrid runs a command without the tree of cgroup version 2 that a machine may have beside version 1, which
// crun refuses. It needs a mount namespace of its own.
const withoutHybrid = `
if [ -d /sys/fs/cgroup/unified ]; then umount -n /sys/fs/cgroup/unified || exit; fi
exec "$@"`

// The rule for orphans rests on what runtimes do: a container that shares the host's PID namespace runs, then has only
// an exec and orphans of its first process, and then only these orphans.
func TestOrphansOfRuntimes(t *testing.T) {
	for _, runtime := range []string{"runc", "crun"} {
		t.Run(runtime, func(t *testing.T) {
			t.Parallel()
			testenv.Root(t)
			h := realHost(t)
			bundle := makeBundle(t, testenv.Command(t, runtime))
			id := make([]byte, 32)
			_, _ = rand.Read(id)
			output := filepath.Join(bundle.Dir, "output") // a file, since what is detached keeps it open
			run := func(args ...string) (text string, err error) {
				t.Helper()
				f, err := os.Create(output)
				if err != nil {
					t.Fatal(err)
				}
				defer f.Close()
				args = append([]string{
					"-c", withoutHybrid, "sh", bundle.Runtime, "--root", filepath.Join(bundle.Dir, "state"),
				}, args...)
				cmd := exec.Command("/bin/sh", args...)
				cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
				cmd.Stdout, cmd.Stderr = f, f
				err = cmd.Run()
				data, _ := os.ReadFile(output)
				return string(data), err
			}
			name := hex.EncodeToString(id)
			text, err := run("run", "--detach", "--bundle", bundle.Dir, name)
			if err != nil {
				t.Fatal(text, err)
			}
			defer func() { _, _ = run("delete", "--force", name) }()
			text, err = run("state", name)
			if err != nil {
				t.Fatal(text, err)
			}
			var state struct{ Pid int }
			if err := json.Unmarshal([]byte(text), &state); err != nil {
				t.Fatal(err)
			}
			child := childOf(t, state.Pid)
			p, err := openProcess(h, child)
			if err != nil {
				t.Fatal(err)
			}
			defer p.close()
			check := func(when string, want bool) {
				t.Helper()
				if got, err := p.orphaned(h); got != want || err != nil {
					t.Errorf("%s: orphaned %t, error %v; %s", when, got, err, p)
				}
			}
			if !strings.Contains(p.String(), name) {
				t.Errorf("the container is not in %s", p)
			}
			check("while the container runs", false)
			execPID := filepath.Join(bundle.Dir, "exec.pid")
			text, err = run("exec", "--detach", "--pid-file", execPID, name, "/bin/sleep", "1000")
			if err != nil {
				t.Fatal(text, err)
			}
			kill(t, state.Pid)
			check("while an exec runs", false)
			data, err := os.ReadFile(execPID)
			if err != nil {
				t.Fatal(err)
			}
			pid, err := strconv.Atoi(string(data))
			if err != nil {
				t.Fatal(err)
			}
			kill(t, pid)
			check("after its first process", true)
			if err := p.end(t.Context()); err != nil || runs(child) {
				t.Errorf("error %v, runs %t", err, runs(child))
			}
		})
	}
}

func makeBundle(t *testing.T, runtime string) *image.Bundle {
	t.Helper()
	root, dir := t.TempDir(), t.TempDir()
	if err := image.Build(t.Context(), image.Static, root); err != nil {
		t.Fatal(err)
	}
	bundle, err := image.NewBundle(t.Context(), runtime, dir, image.BundleOptions{
		Root: root, Args: []string{"/bin/sh", "-c", "/bin/sleep 1000 & /bin/sleep 1000; true"},
	})
	if err != nil {
		t.Fatal(err)
	}
	err = bundle.Edit(func(s *specs.Spec) error {
		s.Linux.Namespaces = slices.DeleteFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
			return n.Type == specs.PIDNamespace
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return bundle
}

// childOf waits for a child of a process and returns the first.
func childOf(t *testing.T, pid int) int {
	t.Helper()
	for range 1000 {
		data, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
		if fields := strings.Fields(string(data)); len(fields) > 0 {
			child, err := strconv.Atoi(fields[0])
			if err != nil {
				t.Fatal(err)
			}
			return child
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("process %d has no child", pid)
	return 0
}

// kill kills a process and waits until it was collected.
func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for range 5000 {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err != nil {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("process %d was not collected", pid)
}
