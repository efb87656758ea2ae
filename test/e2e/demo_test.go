package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"
)

// demo returns the command that runs scripts/demo for a machine, with the programs under test and with dir before the
// other directories of PATH. At its end the test checks that the demo left nothing on the host.
func demo(t *testing.T, machine, dir string) *exec.Cmd {
	t.Helper()
	t.Parallel() // each demo has a namespace of its own
	testenv.Root(t)
	for _, name := range []string{"cc", "runc", "unshare", "podman"} {
		testenv.Command(t, name)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	cmd := exec.CommandContext(ctx, "../../scripts/demo", machine)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	// The demo needs no exception for insecure paths: all that root loads or runs is in its own directory.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "GPU_CDI_") })
	cache, err := os.UserCacheDir() // the simulated driver is compiled only once
	testenv.Must(t, err)
	cmd.Env = append(cmd.Env, "BIN="+filepath.Dir(shared.Program(t, "gpu-sim")), "PATH="+dir+":"+os.Getenv("PATH"),
		"XDG_CACHE_HOME="+cache)
	_, before := os.Stat("/run/cdi")
	t.Cleanup(func() {
		cancel()
		if _, err := os.Stat("/run/demo"); err == nil {
			t.Error("the demo left /run/demo")
		}
		if _, after := os.Stat("/run/cdi"); (before == nil) != (after == nil) {
			t.Errorf("/run/cdi: %v before the demo, %v after it", before, after)
		}
		group := fmt.Sprintf("gpu-demo-%d", cmd.Process.Pid)
		_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, _ fs.DirEntry, _ error) error {
			if filepath.Base(path) == group {
				t.Errorf("the demo left control group %s", path)
			}
			return nil // an error is of a control group that another test has removed meanwhile
		})
	})
	return cmd
}

// writeProgram writes a shell script of that name and returns its directory.
func writeProgram(t *testing.T, name, script string) string {
	t.Helper()
	dir := t.TempDir()
	testenv.WriteProgram(t, filepath.Join(dir, name), []byte("#!/bin/sh\n"+script))
	return dir
}

func TestDemoShowsGPUsInContainers(t *testing.T) {
	for machine, want := range map[string][]string{
		"dgx-h100": {
			`node +SIMULATED: gpu-sim create --machine dgx-h100 /run/demo/node +\d+\.\d\d s`,
			`devices +gpu-cdi-plugin devices: containers can get 8 +\d+\.\d\d s`,
			`generate +gpu-cdi-plugin cdi generate --write: /var/run/cdi/nvidia.com-gpu.json +\d+\.\d\d s`,
			`runc +runc run .*\n    \| GPU 0: NVIDIA H100 .*\n    \| GPU 1: NVIDIA H100 .*`,
			`podman +podman run .*\n    \| GPU 0: NVIDIA H100 .*\n    \| GPU 1: NVIDIA H100 .*`,
			`clean up +done: .* \d+\.\d\d s`,
		},
		"mig-h100": {
			`runc +runc run .*\n    \| GPU 0: .*\n    \|   MIG .*\n    \|   MIG .*`,
			`podman +podman run .*\n    \| GPU 0: .*\n    \|   MIG .*\n    \|   MIG .*`,
		},
	} {
		t.Run(machine, func(t *testing.T) {
			out, err := demo(t, machine, "").CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for _, lines := range want {
				if !regexp.MustCompile(`(?m)^` + lines + `$`).Match(out) {
					t.Errorf("want lines %q in\n%s", lines, out)
				}
			}
		})
	}
}

func TestDemoWithoutPodmanShowsTheRest(t *testing.T) {
	dir := t.TempDir() // all programs but podman
	for _, from := range []string{"/usr/bin", "/usr/sbin"} {
		entries, err := os.ReadDir(from)
		testenv.Must(t, err)
		for _, e := range entries {
			if e.Name() != "podman" {
				_ = os.Symlink(filepath.Join(from, e.Name()), filepath.Join(dir, e.Name()))
			}
		}
	}
	cmd := demo(t, "workstation", "")
	cmd.Env = append(cmd.Env, "PATH="+dir)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "podman    skipped: podman is not installed") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestDemoFailsWhenAStepFails(t *testing.T) {
	for name, c := range map[string]struct{ machine, program, script, want string }{
		"a machine that does not exist": {"no-such-machine", "unused", "", "unknown machine"},
		"an engine that fails":          {"workstation", "podman", "echo no luck >&2; exit 125", "no luck"},
		"a container without its GPU":   {"workstation", "podman", "", "given to the container: yes, listed there"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := demo(t, c.machine, writeProgram(t, c.program, c.script)).CombinedOutput()
			for _, want := range []string{c.want, "demo: not finished"} {
				if err == nil || !strings.Contains(string(out), want) {
					t.Errorf("want a failure with %q, got %v\n%s", want, err, out)
				}
			}
		})
	}
}

// TestInterruptedDemoLeavesNothing ends the demo while its first container runs.
func TestInterruptedDemoLeavesNothing(t *testing.T) {
	runc := testenv.Command(t, "runc")
	// The signal comes while the container is there, and has not been started.
	dir := writeProgram(t, "runc", fmt.Sprintf(`for arg; do
	[ "$arg" = run ] || continue
	shift 3
	%[1]s --root /run/demo/runtime create "$@" </dev/null >/dev/null 2>&1 && echo created >&2
	exec sleep 1000
done
exec %[1]s "$@"
`, runc))
	cmd := demo(t, "workstation", dir)
	stderr, err := cmd.StderrPipe()
	testenv.Must(t, err)
	testenv.Must(t, cmd.Start())
	lines := bufio.NewScanner(stderr)
	if !lines.Scan() || lines.Text() != "created" {
		t.Errorf("want the container created, got %q", lines.Text())
	}
	// A terminal sends Ctrl-C to all processes in the foreground.
	testenv.Must(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGINT))
	rest := ""
	for lines.Scan() {
		rest += lines.Text() + "\n"
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 130 || !strings.Contains(rest, "nothing is left") {
		t.Errorf("exit status %d, want 130; stderr:\n%s", code, rest)
	}
}
