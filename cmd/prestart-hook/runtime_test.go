package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"

	"golang.org/x/sys/unix"
)

// newRuntime makes a node with that shell script as its runtime, and returns its directory and the environment of
// gpu-cdi-runtime.
func newRuntime(t *testing.T, script string) (dir string, env []string) {
	t.Helper()
	needRoot(t)
	dir = t.TempDir()
	testenv.Must(t, makeNode(dir, "#!/bin/sh\n"+script+"\n"))
	testenv.Must(t, os.Mkdir(filepath.Join(dir, "bundle"), 0o755))
	config := `{"process": {"cwd": "/"}, "annotations": {"cdi.k8s.io/gpu": "nvidia.com/gpu=0"}}`
	testenv.Must(t, os.WriteFile(filepath.Join(dir, "bundle/config.json"), []byte(config), 0o644))
	return dir, append(os.Environ(), "NODE="+dir)
}

// TestTheRuntimeInherits compares what a runtime finds behind gpu-cdi-runtime with what it finds without it: its
// process, arguments, environment, files, limits, umask and signals.
func TestTheRuntimeInherits(t *testing.T) {
	dir, _ := newRuntime(t, `echo "$# $*"; env | grep -v '^_=' | sort; umask; ulimit -Sn; pwd; echo $PPID
ls /proc/self/fd; cat <&3; grep -E 'Sig(Blk|Ign|Cgt)|Cap|NoNewPrivs|Seccomp:' /proc/self/status; cat; exit 7`)
	path, err := exec.LookPath(runtimeName)
	testenv.Must(t, err)
	inherited := filepath.Join(dir, "inherited")
	start := func(args ...string) string {
		t.Helper()
		testenv.Must(t, os.WriteFile(inherited, []byte("descriptor 3\n"), 0o644))
		// A shell that ignores signals, and has a umask, a limit and a file of its own.
		const script = `trap "" HUP INT; umask 027; ulimit -Sn 100; exec "$@" 3<"$0"`
		cmd := exec.Command("/bin/sh", append([]string{"-c", script, inherited}, args...)...)
		cmd.Dir, cmd.Env = dir, []string{"NODE=" + dir, "A=b", "EMPTY=", "PATH=/usr/bin:/bin", "LD_PRELOAD="}
		cmd.Stdin = strings.NewReader("standard input\n")
		out, _ := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != 7 {
			t.Errorf("exit status %d: %s", code, out)
		}
		return string(out)
	}
	arguments := []string{"--debug", "create", "--bundle", "bundle", "a b", "", "$x"}
	want := start(append([]string{filepath.Join(dir, "runtime")}, arguments...)...)
	got := start(append([]string{path}, arguments...)...)
	if got != want || !strings.Contains(got, "standard input") || !strings.Contains(got, "descriptor 3") {
		t.Errorf("the runtime finds\n%s\nwant\n%s", got, want)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "bundle/config.json")); !bytes.Contains(
		data,
		[]byte("/dev/nvidia0"),
	) {
		t.Errorf("%v\n%s", err, data)
	}
}

// The runtime is the process that was started, so signals reach it and its parent's death ends it.
func TestTheRuntimeIsTheProcess(t *testing.T) {
	_, env := newRuntime(t, `trap 'exit 42' TERM; echo $$; while :; do sleep 0.05; done`)
	for _, verb := range []string{"create", "state"} {
		cmd := exec.Command(runtimeName, verb, "--bundle", strings.TrimPrefix(env[len(env)-1], "NODE=")+"/bundle", "x")
		cmd.Env = env
		out, err := cmd.StdoutPipe()
		testenv.Must(t, err)
		testenv.Must(t, cmd.Start())
		var pid int
		if _, err := fmt.Fscan(out, &pid); err != nil || pid != cmd.Process.Pid {
			t.Errorf("the runtime's process is %d, want %d, %v", pid, cmd.Process.Pid, err)
		}
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		_ = cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != 42 {
			t.Errorf("exit status %d after the signal, want 42", code)
		}
	}
}

// containerd's shim has the kernel kill its runtimes when it dies (PR_SET_PDEATHSIG). The kernel does so only if the
// main thread executes the runtime.
func TestTheRuntimeDiesWithItsParent(t *testing.T) {
	dir, _ := newRuntime(t, `echo started; exec sleep 60`)
	// The program as it is released: that of the tests has locked its main thread already.
	program := filepath.Join(dir, runtimeName)
	etc := filepath.Join(dir, "etc/gpu-cdi-plugin")
	err := errors.Join(os.Symlink(hookBinary(t), program), os.MkdirAll(etc, 0o755),
		os.Rename(filepath.Join(dir, "hook.yaml"), filepath.Join(etc, "hook.yaml")))
	testenv.Must(t, err)
	// A large one takes so long to read that Go uses several threads.
	bundle := filepath.Join(dir, "bundle")
	config := `{"process": {"env": ["` + strings.Repeat("x", 4<<20) + `"]}}`
	testenv.Must(t, os.WriteFile(filepath.Join(bundle, "config.json"), []byte(config), 0o644))
	r, w, err := os.Pipe()
	testenv.Must(t, err)
	defer func() { _ = r.Close() }()
	testenv.Must(t, r.SetReadDeadline(time.Now().Add(20*time.Second)))
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			t.Error("the main thread cannot end")
		}
		const script = `mount -n -t overlay -o "lowerdir=$1:/etc" overlay /etc && exec "$0" create -b "$2" x`
		cmd := exec.Command("/bin/sh", "-c", script, program, filepath.Dir(etc), bundle)
		cmd.Stdout, cmd.Stderr = w, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Unshareflags: syscall.CLONE_NEWNS}
		err := cmd.Start()
		if err == nil {
			_, err = io.ReadFull(r, make([]byte, len("started")))
		}
		done <- err
	}()
	testenv.Must(t, <-done)
	_ = w.Close()
	if _, err := io.ReadAll(r); err != nil { // the end of the pipe is the end of the process
		t.Errorf("the runtime lives on without its parent: %v", err)
	}
}

// An input that does not end must not hold up the engine.
func TestPrecreateDoesNotWaitForEver(t *testing.T) {
	t.Parallel()
	needRoot(t)
	r, w, err := os.Pipe()
	testenv.Must(t, err)
	defer func() { _ = r.Close(); _ = w.Close() }()
	if _, err := io.WriteString(w, `{"process": {`); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	cmd := exec.Command(hookBinary(t), "precreate")
	cmd.Stdin = r
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	_ = cmd.Run()
	took := time.Since(begin)
	if code := cmd.ProcessState.ExitCode(); code != statusFailure || stdout.Len() > 0 ||
		!strings.Contains(stderr.String(), "not done after 10s") || took > deadline+5*time.Second {
		t.Errorf("exit status %d after %v, %q, %s", code, took, stdout.String(), stderr.String())
	}
}

// TestPrecreateOfALargeConfig: the largest config.json is edited before the deadline, and a larger one is refused.
func TestPrecreateOfALargeConfig(t *testing.T) {
	needRoot(t)
	for name, tc := range map[string]struct {
		size int
		want string // of the error; empty for none
	}{
		"at the limit":     {maxConfig, ""},
		"beyond the limit": {maxConfig + 1, fmt.Sprintf("larger than %d bytes", maxConfig)},
	} {
		t.Run(name, func(t *testing.T) {
			config := append([]byte(`{"process": {"cwd": "/"}, "x": [`), bytes.Repeat([]byte("0,"), tc.size/2-20)...)
			config = append(config, "0]}"...)
			config = append(config, bytes.Repeat([]byte(" "), tc.size-len(config))...)
			cmd := exec.Command(hookBinary(t), "precreate")
			cmd.Stdin = bytes.NewReader(config)
			var stdout, stderr bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			_ = cmd.Run()
			if ok := tc.want == ""; ok != bytes.Equal(stdout.Bytes(), config) || ok == (stdout.Len() == 0) ||
				!strings.Contains(stderr.String(), tc.want) {
				t.Errorf("%d bytes, %s", stdout.Len(), stderr.String())
			}
		})
	}
}
