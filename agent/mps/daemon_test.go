package mps

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// host is a simulated host whose first GPU can be shared.
type host struct {
	t    *testing.T
	node *sim.Node
	opts Options
	uuid string
}

func newHost(t *testing.T) *host {
	t.Helper()
	testenv.Root(t)
	dir, node := makeShortDir(t), simtest.Node(t, "pcie-quad")
	h := &host{t: t, node: node, uuid: node.Machine().GPUs[0].UUID, opts: Options{
		Dir: filepath.Join(dir, "mps"), Descriptors: filepath.Join(dir, "devices"), Program: programOf(node),
		Check: allowUnsafe, Output: t.Output(), Log: testLog(t),
	}}
	testenv.Must(t, os.Mkdir(h.opts.Descriptors, 0o755))
	linkShm(t, h.opts.Dir)
	return h
}

func programOf(node *sim.Node) func() (Program, error) {
	return func() (Program, error) {
		return Program{
			Path: node.MPSControl(), Root: node.Root(),
			Libraries: map[string]string{"libnvidia-ml.so.1": node.Library()},
		}, nil
	}
}

// share writes the GPU's descriptor. Without limits MPS does not share the GPU.
func (h *host) share(limits *resource.MPSLimits) {
	h.t.Helper()
	text := "{}"
	if limits != nil {
		text = fmt.Sprintf(`{"sharing": {"replicas": 2, "mps": {"memoryLimitBytes": %d, "activeThreadPercentage": %d}}}`,
			limits.MemoryBytes, limits.ThreadPercent)
	}
	path := filepath.Join(h.opts.Descriptors, h.uuid+descriptorSuffix)
	testenv.Must(h.t, os.WriteFile(path+".new", []byte(text), 0o644))
	testenv.Must(h.t, os.Rename(path+".new", path))
}

// run runs the daemon of the GPU.
func (h *host) run() (stop func() error, ended <-chan error) {
	h.t.Helper()
	return start(h.t, func(ctx context.Context) error { return Run(ctx, h.opts, h.uuid) })
}

// awaitReady waits until the daemon has limits, and returns its process ID.
func (h *host) awaitReady(limits resource.MPSLimits) int {
	h.t.Helper()
	eventually(h.t, "a daemon with "+describe(limits), func() bool {
		a, err := ask(h.t, h.opts.Dir, h.uuid, request{})
		return err == nil && a == answer{Limits: limits}
	})
	text, err := os.ReadFile(filepath.Join(h.opts.Dir, h.uuid, pipeName, "nvidia-cuda-mps-control.pid"))
	testenv.Must(h.t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	testenv.Must(h.t, err)
	return pid
}

// client starts a client of the daemon and returns what it prints when it is connected.
func (h *host) client() (*exec.Cmd, string) {
	h.t.Helper()
	cmd := exec.CommandContext(h.t.Context(), h.node.MPSClient(), "600")
	cmd.Env = []string{
		"LD_LIBRARY_PATH=" + filepath.Dir(h.node.Library()),
		"CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(h.opts.Dir, h.uuid, pipeName),
	}
	out, err := cmd.StdoutPipe()
	testenv.Must(h.t, err)
	testenv.Must(h.t, cmd.Start())
	h.t.Cleanup(func() { _ = cmd.Process.Kill() })
	buffer := make([]byte, 4096)
	n, err := out.Read(buffer)
	testenv.Must(h.t, err)
	return cmd, string(buffer[:n])
}

func hasEnded(pid int) bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

func TestADaemonGetsTheLimitsOfItsDescriptor(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	stop, _ := h.run() // before the GPU is shared
	h.share(&half)
	pid := h.awaitReady(half)
	_, printed := h.client()
	if want := fmt.Sprintf("uuid=%s pinned_mem_limit=%d", h.uuid, half.MemoryBytes); !strings.Contains(printed, want) ||
		!strings.Contains(printed, "active_thread_percentage=50.0") {
		t.Errorf("a client prints %q, want %q and 50 %%", printed, want)
	}

	// The running server gets other limits too.
	h.share(&lessThanHalf)
	if now := h.awaitReady(lessThanHalf); now != pid {
		t.Errorf("daemon %d after %d", now, pid)
	}
	_, printed = h.client()
	if want := fmt.Sprintf("pinned_mem_limit=%d", lessThanHalf.MemoryBytes); !strings.Contains(printed, want) ||
		!strings.Contains(printed, "active_thread_percentage=25.0") {
		t.Errorf("a client prints %q, want %q and 25 %%", printed, want)
	}

	// Its end does not wait for clients.
	testenv.Must(t, stop())
	if !hasEnded(pid) {
		t.Error("the daemon did not end")
	}
}

// NVIDIA's daemon prints five lines for each command.
func TestADaemonAtRestGetsNoCommands(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	commands := filepath.Join(t.TempDir(), "commands")
	program := h.node.MPSControl() + ".real"
	testenv.Must(t, os.Rename(h.node.MPSControl(), program))
	testenv.WriteProgram(t, h.node.MPSControl(), fmt.Appendf(nil, `#!/bin/sh
		[ $# -gt 0 ] || echo >>%s
		exec %s "$@"
	`, commands, program))
	h.share(&half)
	h.run()
	h.awaitReady(half)
	before, err := os.ReadFile(commands)
	testenv.Must(t, err)
	for range 20 {
		if a, err := ask(t, h.opts.Dir, h.uuid, request{}); err != nil || a != (answer{Limits: half}) {
			t.Errorf("the status is %+v, %v", a, err)
		}
	}
	after, err := os.ReadFile(commands)
	testenv.Must(t, err)
	if n := len(after) - len(before); n != 0 || len(before) == 0 {
		t.Errorf("%d commands set the limits, and 20 checks sent %d; want none for checks", len(before), n)
	}
}

func TestADaemonThatDoesNotAnswerIsNotReady(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.opts.Interval = time.Nanosecond
	h.share(&half)
	h.run()
	pid := h.awaitReady(half)
	testenv.Must(t, syscall.Kill(pid, syscall.SIGSTOP))
	for range 2 {
		if a, err := ask(t, h.opts.Dir, h.uuid, request{}); err != nil || !strings.Contains(a.Error, "does not answer") {
			t.Errorf("the status is %+v, %v", a, err)
		}
	}
	testenv.Must(t, syscall.Kill(pid, syscall.SIGCONT))
	h.awaitReady(half)
}

func TestADaemonEndsAfterItsLastClientWhenItsGPUIsNoLongerShared(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.share(&half)
	_, ended := h.run()
	pid := h.awaitReady(half)
	client, _ := h.client()
	h.share(nil)
	const want = "ends when its last client has ended, since MPS no longer shares the GPU"
	for range 2 {
		if a, err := ask(t, h.opts.Dir, h.uuid, request{}); err != nil || !strings.Contains(a.Error, want) {
			t.Errorf("the status is %+v, %v; want %q", a, err, want)
		}
	}
	if hasEnded(pid) {
		t.Error("the daemon has ended before its client")
	}
	testenv.Must(t, client.Process.Kill())
	_ = client.Wait()
	testenv.Must(t, <-ended)
}

func TestADaemonEndsOnRequest(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.share(&half)
	_, ended := h.run()
	pid := h.awaitReady(half)
	h.client() // so that there is a server
	testenv.Must(t, New(MonitorOptions{Dir: h.opts.Dir}).End(t.Context(), h.uuid))
	if !hasEnded(pid) {
		t.Error("the daemon has not ended")
	}
	testenv.Must(t, <-ended)
	testenv.Must(t, New(MonitorOptions{Dir: h.opts.Dir}).End(t.Context(), h.uuid)) // there is none
}

func TestTheEndOfADaemonIsAnError(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.share(&half)
	_, ended := h.run()
	testenv.Must(t, syscall.Kill(h.awaitReady(half), syscall.SIGKILL))
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "nvidia-cuda-mps-control ended (signal: killed)") {
		t.Errorf("error %v", err)
	}
}

func TestADaemonIsReplacedAfterTheDriverWas(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.share(&half)
	_, ended := h.run()
	h.awaitReady(half)
	program, err := os.ReadFile(h.node.MPSControl())
	testenv.Must(t, err)
	testenv.Must(t, os.Remove(h.node.MPSControl()))
	testenv.WriteProgram(t, h.node.MPSControl(), program)
	a, err := ask(t, h.opts.Dir, h.uuid, request{})
	if err != nil || !strings.Contains(a.Error, "since the driver was replaced") {
		t.Errorf("the status is %+v, %v", a, err)
	}
	testenv.Must(t, <-ended)
}

func TestRunRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(t *testing.T, h *host)
		want   string
		is     error
	}{
		"what is no UUID": {
			func(_ *testing.T, h *host) { h.uuid = "GPU-../x" }, `"GPU-../x" is not the UUID of a GPU`, ErrNotGPU,
		},
		"a directory whose sockets would have too long paths": {
			func(_ *testing.T, h *host) { h.opts.Dir += "/" + strings.Repeat("x", 60) }, "set a shorter runtime-dir", nil,
		},
		"a directory that others can change": {
			func(t *testing.T, h *host) {
				h.opts.Check = checkStrictly
				testenv.Must(t, os.Chmod(h.opts.Dir, 0o777))
			}, "set another runtime-dir", nil,
		},
		"another /dev/shm than that of the clients": {
			func(t *testing.T, h *host) {
				testenv.Must(t, os.MkdirAll(filepath.Join(h.opts.Dir, h.uuid, shmName), 0o755))
			},
			"the directory /dev/shm is not ", ErrShm,
		},
		"to run beside another process": {
			func(t *testing.T, h *host) {
				dir := filepath.Join(h.opts.Dir, h.uuid, daemonName)
				testenv.Must(t, os.MkdirAll(dir, 0o755))
				held, err := fileio.AcquireLock(filepath.Join(dir, lockName))
				testenv.Must(t, err)
				t.Cleanup(func() { _ = held.Release() })
			}, "another instance holds it", fileio.ErrHeld,
		},
		"limits that make no sense": {
			func(_ *testing.T, h *host) { h.share(&resource.MPSLimits{}) }, "want at least 1 MiB", nil,
		},
		"a driver without limits of memory": {
			func(t *testing.T, h *host) {
				program := h.node.MPSControl() + ".real"
				testenv.Must(t, os.Rename(h.node.MPSControl(), program))
				// As driver 470 answers.
				testenv.WriteProgram(t, h.node.MPSControl(), fmt.Appendf(nil, `#!/bin/sh
					[ $# -eq 0 ] || exec %[1]s "$@"
					read -r command
					case $command in
					*_pinned_mem_limit*) echo "Unknown command \"${command%%%% *}\"" ;;
					*) echo "$command" | %[1]s ;;
					esac
				`, program))
			}, "cannot limit the memory of clients", ErrNoLimits,
		},
		"a program that ends": {
			func(t *testing.T, h *host) {
				testenv.WriteProgram(t, h.node.MPSControl(), []byte("#!/bin/sh\nexit 7\n"))
			}, "nvidia-cuda-mps-control ended (exit status 7)", nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHost(t)
			h.share(&half)
			c.change(t, h)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			err := Run(ctx, h.opts, h.uuid)
			if err == nil || !strings.Contains(err.Error(), c.want) || c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}

// A daemon that outlived its process would keep the GPU from the next one. The daemon has none of the files that its
// process inherited from whoever started it.
func TestADaemonEndsWithItsProcess(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.share(&half)
	held, err := os.Create(filepath.Join(t.TempDir(), "held"))
	testenv.Must(t, err)
	defer held.Close()
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), helperVariable+"="+strings.Join([]string{
		h.opts.Dir, h.opts.Descriptors, h.uuid, h.node.MPSControl(), h.node.Root(), h.node.Library(),
	}, ":"))
	cmd.ExtraFiles = []*os.File{held}
	testenv.Must(t, cmd.Start())
	pid := h.awaitReady(half)
	if files := openFiles(t, cmd.Process.Pid); !slices.Contains(files, held.Name()) {
		t.Errorf("the process inherited %q", files)
	}
	if files := openFiles(t, pid); slices.Contains(files, held.Name()) {
		t.Errorf("the daemon inherited %q", files)
	}
	testenv.Must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	eventually(t, "the end of the daemon", func() bool { return hasEnded(pid) })
}

// openFiles returns what the descriptors of a process are.
func openFiles(t *testing.T, pid int) (files []string) {
	t.Helper()
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	testenv.Must(t, err)
	for _, link := range links {
		if file, err := os.Readlink(link); err == nil {
			files = append(files, file)
		}
	}
	return files
}

// helperVariable makes the test binary run a daemon.
const helperVariable = "MPS_TEST_DAEMON"

func TestMain(m *testing.M) {
	if text := os.Getenv(helperVariable); text != "" {
		runHelper(strings.Split(text, ":"))
	}
	os.Exit(m.Run())
}

func runHelper(args []string) {
	o := Options{
		Dir: args[0], Descriptors: args[1], Check: allowUnsafe, Output: io.Discard, Log: discardLog,
		Program: func() (Program, error) {
			return Program{Path: args[3], Root: args[4], Libraries: map[string]string{"libnvidia-ml.so.1": args[5]}}, nil
		},
	}
	if err := Run(context.Background(), o, args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(1)
}

func TestLimitsOfADescriptor(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want *resource.MPSLimits
		err  string
	}{
		"a GPU that is not shared":      {`{"version": 1}`, nil, ""},
		"a GPU that is shared in turns": {`{"sharing": {"replicas": 2}}`, nil, ""},
		"a GPU without a thread limit": {
			`{"sharing": {"mps": {"memoryLimitBytes": 1048576}}}`, &resource.MPSLimits{MemoryBytes: 1 << 20}, "",
		},
		"memory and threads": {
			`{"sharing": {"mps": {"memoryLimitBytes": 1572864000, "activeThreadPercentage": 50}}}`, &half, "",
		},
		"no memory": {`{"sharing": {"mps": {}}}`, nil, "want at least 1 MiB"},
		"more than all threads": {
			`{"sharing": {"mps": {"memoryLimitBytes": 1048576, "activeThreadPercentage": 101}}}`, nil, "at most 100 %",
		},
		"not JSON": {`{`, nil, "unexpected end"},
	} {
		got, err := parseLimits([]byte(c.text))
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, want %q", name, err, c.err)
		}
		if (got == nil) != (c.want == nil) || got != nil && *got != *c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}
