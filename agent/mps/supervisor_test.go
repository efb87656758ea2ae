package mps

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// helperName is the first argument of a test binary that becomes the control program.
const helperName = "mps-exec"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == helperName {
		fmt.Fprintln(os.Stderr, Enter(os.Args[2]))
		os.Exit(1)
	}
	if len(os.Args) > 2 && os.Args[1] == checkName {
		printPIDNamespaceCheck(os.Args[2])
		return
	}
	os.Exit(m.Run())
}

var testHelper = []string{"mps.test", helperName}

// startTestDaemon starts a GPU's daemon without a supervisor.
func startTestDaemon(gpuDir string, p Program) (*process, error) {
	c := &control{helper: testHelper, dir: gpuDir, program: p}
	return c.startDaemon()
}

// allowUnsafe allows what others can change: tests are below /tmp.
func allowUnsafe(check func(path string) error, path string) error {
	if err := check(path); !errors.Is(err, trust.ErrUnsafe) {
		return err
	}
	return nil
}

// checkStrictly allows nothing that others can change.
func checkStrictly(check func(path string) error, path string) error { return check(path) }

// modes records which GPUs are exclusive.
type modes struct {
	mu        sync.Mutex
	exclusive map[string]bool
	err       error
}

func (m *modes) SetExclusive(_ context.Context, uuid string, exclusive bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.err == nil {
		m.exclusive[uuid] = exclusive
	}
	return m.err
}

func (m *modes) fail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.err = err
}

func (m *modes) is(uuid string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exclusive[uuid]
}

// testSupervisor is a supervisor for the daemons of a simulated node.
type testSupervisor struct {
	*Supervisor
	t       *testing.T
	node    *sim.Node
	modes   *modes
	program Program
	stop    func()
}

// gpu returns the UUID of the nth GPU.
func (s *testSupervisor) gpu(n int) string { return s.node.Machine().GPUs[n].UUID }

func (s *testSupervisor) dir(n int) string { return filepath.Join(s.opts.Dir, s.gpu(n)) }

// The daemon prints both limits of memory alike, in gigabytes.
var (
	half         = resource.MPSLimits{MemoryBytes: 1500 << 20, ThreadPercent: 50, SharedMemoryBytes: testShm}
	lessThanHalf = resource.MPSLimits{MemoryBytes: 1100 << 20, ThreadPercent: 50, SharedMemoryBytes: testShm}
)

// newTestSupervisor returns a supervisor that does not run yet.
func newTestSupervisor(t *testing.T) *testSupervisor {
	t.Helper()
	testenv.Root(t)
	node := simtest.Node(t, "pcie-quad")
	s := &testSupervisor{
		t: t, node: node, modes: &modes{exclusive: map[string]bool{}}, stop: func() {},
		program: Program{
			Path: node.MPSControl(), Driver: "1", Root: node.Root(),
			Libraries: map[string]string{"libnvidia-ml.so.1": node.Library()},
		},
	}
	s.renew(makeShortDir(t))
	t.Cleanup(func() {
		s.stop()
		for n := range node.Machine().GPUs {
			if r, err := readRecord(s.dir(n)); err == nil && r.matches() {
				_ = unix.Kill(r.PID, unix.SIGKILL)
				eventually(t, "the daemon ends, which writes to the directory", func() bool { return !r.matches() })
			}
		}
	})
	return s
}

// renew replaces the supervisor by a new one for the directory.
func (s *testSupervisor) renew(dir string) {
	s.Supervisor = New(Options{
		Dir: dir, Check: allowUnsafe, Helper: testHelper, Modes: s.modes, Changed: func() {},
		Program: func() (Program, error) {
			_, err := os.Stat(s.program.Path)
			return s.program, err
		},
		Interval: 100 * time.Millisecond, Deadline: 20 * time.Second, Log: s.checkedLog(),
	})
}

// checkedLog returns a log that checks each line. A line must be complete without its attributes: it names the GPU, and
// the cause is in the message.
func (s *testSupervisor) checkedLog() *slog.Logger {
	options := slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		switch {
		case a.Key == slog.MessageKey && !strings.HasPrefix(a.Value.String(), "GPU-"):
			s.t.Errorf("the log does not name the GPU: %q", a.Value)
		case !slices.Contains([]string{slog.TimeKey, slog.LevelKey, slog.MessageKey, "gpu", "pid"}, a.Key):
			s.t.Errorf("the attribute %s is not in the message: %q", a.Key, a.Value)
		}
		return a
	}}
	return slog.New(slog.NewTextHandler(s.t.Output(), &options))
}

// start runs the supervisor until stop or the end of the test.
func (s *testSupervisor) start() {
	ctx, cancel := context.WithCancel(s.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			s.t.Error(err)
		}
	})
}

// problem returns why the nth GPU's daemon cannot be used with these limits, or "".
func (s *testSupervisor) problem(n int, limits resource.MPSLimits) string {
	return s.Reason(&resource.Device{UUID: s.gpu(n), MPS: &limits})
}

// share sets the GPUs to share.
func (s *testSupervisor) share(gpus ...int) {
	var list []Daemon
	for _, n := range gpus {
		list = append(list, Daemon{UUID: s.gpu(n), Limits: half})
	}
	s.Set(list)
}

// awaitReady waits until the GPU's daemon can be used, and returns its PID.
func (s *testSupervisor) awaitReady(n int) int {
	s.t.Helper()
	eventually(s.t, "a daemon that can be used", func() bool { return s.problem(n, half) == "" })
	r, err := readRecord(s.dir(n))
	must(s.t, err)
	return r.PID
}

// awaitProblem waits until the GPU's daemon cannot be used for a reason that contains the text.
func (s *testSupervisor) awaitProblem(n int, text string) {
	s.t.Helper()
	eventually(s.t, "the problem "+text, func() bool { return strings.Contains(s.problem(n, half), text) })
}

var eventually = testenv.Eventually

// What is put into a GPU's pipe directory affects neither the host nor other GPUs, and not for long.
func TestHostilePipeDirectory(t *testing.T) {
	for name, attack := range map[string]func(t *testing.T, control, elsewhere string){
		"a FIFO without a reader": func(t *testing.T, control, _ string) { must(t, unix.Mkfifo(control, 0o666)) },
		"a link to a socket of the host": func(t *testing.T, control, elsewhere string) {
			listen(t, elsewhere, func(net.Conn) { t.Error("the link was followed") })
			must(t, os.Symlink(elsewhere, control))
		},
		"a socket that never answers": func(t *testing.T, control, _ string) {
			listen(t, control, func(c net.Conn) { _, _ = c.Read(make([]byte, 1)); time.Sleep(time.Minute) })
		},
		"a socket that answers without end": func(t *testing.T, control, _ string) {
			listen(t, control, func(c net.Conn) {
				for line := []byte("." + strings.Repeat("GPU\n", 1000)); ; {
					if _, err := c.Write(line); err != nil {
						return
					}
				}
			})
		},
		"a directory": func(t *testing.T, control, _ string) { must(t, os.MkdirAll(control+"/a/b", 0o755)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newTestSupervisor(t)
			s.opts.Deadline = 2 * time.Second
			s.start()
			s.share(0, 1)
			first := s.awaitReady(0)
			s.awaitReady(1)
			control := filepath.Join(s.dir(0), pipeName, "control")
			must(t, os.Remove(control))
			must(
				t,
				os.WriteFile(
					filepath.Join(s.dir(0), pipeName, "nvidia-cuda-mps-control.pid"),
					[]byte(strconv.Itoa(os.Getpid())),
					0o644,
				),
			)
			attack(t, control, filepath.Join(makeShortDir(t), "socket"))
			s.awaitProblem(0, "does not answer")
			s.awaitReady(1)
			if again := s.awaitReady(0); again == first {
				t.Error("the unreachable daemon is used")
			}
		})
	}
}

// listen serves a socket of the kind that the simulated program connects to.
func listen(t *testing.T, path string, serve func(net.Conn)) {
	t.Helper()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	must(t, err)
	l.SetUnlinkOnClose(false)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serve(c)
		}
	}()
}

// The daemon runs as root and creates files in directories that containers can write to.
func TestTheDaemonFollowsNoLink(t *testing.T) {
	s := newTestSupervisor(t)
	dir := t.TempDir()
	script := filepath.Join(dir, "bin", "control")
	must(t, os.Mkdir(filepath.Dir(script), 0o755))
	prepareGPU(t, s.opts.Dir, testGPU)
	gpuDir := filepath.Join(s.opts.Dir, testGPU)
	secret := filepath.Join(gpuDir, logName, "secret") // where it can write
	must(t, os.WriteFile(secret, []byte("secret"), 0o644))
	testenv.WriteProgram(t, script, []byte(`#!/bin/sh
for dir in "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY" /dev/shm; do
	ln -s `+secret+` "$dir/link" || exit 9
	(echo spoilt > "$dir/link") 2>/dev/null && echo "followed in $dir"
	[ -e "$dir/null" ] && (echo x > "$dir/null") 2>/dev/null && echo "device in $dir"
	ls "$dir" | tr '\n' ' '
done
echo "$1 $CUDA_VISIBLE_DEVICES"
env | sed 's/=.*//' | sort | tr '\n' ' '
`))
	for _, name := range []string{pipeName + "/old/a/b", shmName + "/container"} {
		must(t, os.MkdirAll(filepath.Join(gpuDir, name), 0o755))
	}
	must(t, os.Symlink(secret, filepath.Join(gpuDir, pipeName, "control_lock")))
	for _, name := range []string{logName, shmName} {
		must(t, unix.Mknod(filepath.Join(gpuDir, name, "null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	}
	p := Program{Path: script, SearchPath: []string{"/usr/bin", "/bin"}, Driver: "1", Root: dir}
	daemon, err := startTestDaemon(gpuDir, p)
	must(t, err)
	<-daemon.done()
	ended, printed := how(daemon), outputTail(gpuDir)
	daemon.close()
	want := "link link null secret container link null -f " + testGPU +
		"\nCUDA_MPS_LOG_DIRECTORY CUDA_MPS_PIPE_DIRECTORY CUDA_VISIBLE_DEVICES PATH PWD "
	if ended != "ended with status 0" || printed != want {
		t.Errorf("it %s and printed\n%s\nwant\n%s", ended, printed, want)
	}
	if text, err := os.ReadFile(secret); string(text) != "secret" || err != nil {
		t.Errorf("the secret is %q now, %v", text, err)
	}
	if _, err := os.Lstat("/dev/shm/container"); err == nil {
		t.Error("the mount is visible on the host")
	}
}

// A container that answers in the daemon's place must not keep the host busy.
func TestChangingAnswersAreNotChased(t *testing.T) {
	s := newTestSupervisor(t)
	dir := t.TempDir()
	script, asked := filepath.Join(dir, "bin", "control"), filepath.Join(s.dir(0), logName, "asked")
	must(t, os.Mkdir(filepath.Dir(script), 0o755))
	testenv.WriteProgram(t, script, []byte(`#!/bin/sh
[ "$1" = -f ] && exec sleep 600
read command
echo "$command" >> `+asked+`
case $command in
get_default_device*) [ $(grep -c "$command" `+asked+`) -gt 2 ] && `+
		`[ $(($(grep -c "$command" `+asked+`) % 2)) = 1 ] && echo 7G || echo 1G ;;
get_default_active*) echo 50.0 ;;
esac
`))
	s.program = Program{Path: script, SearchPath: []string{"/usr/bin", "/bin"}, Driver: "1", Root: dir}
	s.start()
	s.share(0)
	begin, text := time.Now(), ""
	times := func() int {
		data, _ := os.ReadFile(asked)
		text = string(data)
		return strings.Count(text, "set_default_device")
	}
	eventually(t, "the limits are set again", func() bool { return times() > 1 })
	time.Sleep(3*time.Second - time.Since(begin))
	if n := times(); n > 3+int(time.Since(begin)/time.Second) {
		t.Errorf("in %s the limits were set %d times:\n%s", time.Since(begin), n, text)
	}
}

func TestAGPUHasOneDaemon(t *testing.T) {
	s := newTestSupervisor(t)
	prepareGPU(t, s.opts.Dir, s.gpu(0))
	first, err := startTestDaemon(s.dir(0), s.program)
	must(t, err)
	defer first.close()
	eventually(
		t,
		"a daemon",
		func() bool { _, err := os.Stat(filepath.Join(s.dir(0), pipeName, "control")); return err == nil },
	)
	second, err := startTestDaemon(s.dir(0), s.program)
	must(t, err)
	defer second.close()
	<-second.done()
	text, err := os.ReadFile(filepath.Join(s.dir(0), outputName)) // both print there
	must(t, err)
	if how(second) != "ended with status 1" || !strings.Contains(string(text), "is the GPU's daemon already") {
		t.Errorf("it %s and printed %q", how(second), text)
	}
	if !first.runs() {
		t.Error("the first one has ended")
	}
}

func TestSupervisorAdoptsRunningDaemons(t *testing.T) {
	s := newTestSupervisor(t)
	s.start()
	s.share(0, 1, 2)
	first, second := s.awaitReady(0), s.awaitReady(1)
	s.awaitReady(2)
	s.stop()

	// Meanwhile one daemon dies, and its PID passes to another process.
	must(t, unix.Kill(second, unix.SIGKILL))
	innocent := exec.Command("sleep", "600")
	must(t, innocent.Start())
	defer func() { _ = innocent.Process.Kill(); _ = innocent.Wait() }()
	r, err := readRecord(s.dir(1))
	must(t, err)
	r.PID = innocent.Process.Pid
	must(t, r.write(s.dir(1)))
	// Another daemon dies, and its record is damaged.
	third, err := readRecord(s.dir(2))
	must(t, err)
	must(t, unix.Kill(third.PID, unix.SIGKILL))
	must(t, os.WriteFile(filepath.Join(s.dir(2), recordName), []byte("{"), 0o600))

	s.renew(s.opts.Dir)
	s.start()
	s.share(0, 1, 2)
	if now := s.awaitReady(0); now != first {
		t.Errorf("daemon %d, want %d still", now, first)
	}
	if now := s.awaitReady(1); now == innocent.Process.Pid {
		t.Error("another process was adopted")
	}
	s.awaitReady(2)

	// They are no longer desired.
	s.share()
	for n := range 3 {
		eventually(t, "the release of each GPU", func() bool { return !prepared(s.dir(n)) && !s.modes.is(s.gpu(n)) })
	}
	if err := innocent.Process.Signal(unix.Signal(0)); err != nil {
		t.Errorf("the innocent process: %v", err)
	}
}

// The record is enough to know a GPU that an earlier plugin shared.
func TestAGPUWithoutItsShmIsReleased(t *testing.T) {
	s := newTestSupervisor(t)
	s.start()
	s.share(0)
	s.awaitReady(0)
	s.stop()
	daemon, err := readRecord(s.dir(0))
	must(t, err)
	must(t, unmountShm(s.dir(0)))
	s.renew(s.opts.Dir)
	if reason := s.Reason(&resource.Device{UUID: "MIG-1", Parent: s.gpu(0)}); reason == "" {
		t.Error("a device of the GPU is healthy before the release")
	}
	s.start()
	s.share()
	eventually(t, "the release of the GPU", func() bool { return !prepared(s.dir(0)) && !s.modes.is(s.gpu(0)) })
	if daemon.matches() {
		t.Error("the daemon runs")
	}
}

// lateModes calls do once, before a GPU becomes exclusive.
type lateModes struct {
	*modes
	once sync.Once
	do   func()
}

func (m *lateModes) SetExclusive(ctx context.Context, uuid string, exclusive bool) error {
	m.once.Do(m.do)
	return m.modes.SetExclusive(ctx, uuid, exclusive)
}

// A plugin that is killed while it starts a daemon leaves one that appears after the next plugin has searched for it.
func TestSupervisorAdoptsADaemonThatAppearsLate(t *testing.T) {
	s := newTestSupervisor(t)
	var late *process
	s.opts.Modes = &lateModes{modes: s.modes, do: func() {
		var err error
		if late, err = startTestDaemon(s.dir(0), s.program); err != nil {
			t.Error(err)
		}
		// Until it answers, the daemon that the supervisor starts could be the first.
		c := &control{helper: testHelper, dir: s.dir(0), program: s.program}
		for _, err := c.servers(t.Context()); late.runs() && err != nil; _, err = c.servers(t.Context()) {
			time.Sleep(time.Millisecond)
		}
	}}
	s.start()
	s.share(0)
	pid := s.awaitReady(0)
	s.stop()
	defer late.close()
	if pid != late.pid {
		t.Errorf("daemon %d, want the one that was there: %d", pid, late.pid)
	}
}

func TestSupervisorAdoptsNoZombie(t *testing.T) {
	s := newTestSupervisor(t)
	prepareGPU(t, s.opts.Dir, s.gpu(0))
	dead := exec.Command("sleep", "600")
	must(t, dead.Start())
	defer func() { _ = dead.Wait() }()
	r, err := recordOf(dead.Process.Pid, s.program.Driver)
	must(t, err)
	must(t, r.write(s.dir(0)))
	must(t, dead.Process.Kill())
	eventually(t, "a zombie", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", dead.Process.Pid))
		return err == nil && strings.Contains(string(stat), ") Z ")
	})
	s.start()
	s.share(0)
	if pid := s.awaitReady(0); pid == r.PID {
		t.Error("it was adopted")
	}
}

// Of two instances that use the same directory by mistake, the second changes nothing.
func TestOneSupervisorForADirectory(t *testing.T) {
	s := newTestSupervisor(t)
	s.start()
	s.share(0)
	pid := s.awaitReady(0)
	second := New(s.opts)
	if err := second.Claim(); !errors.Is(err, lock.ErrHeld) {
		t.Errorf("Claim returns %v", err)
	}
	for _, list := range [][]Daemon{nil, {{UUID: s.gpu(1), Limits: half}}} {
		ctx, cancel := context.WithCancel(t.Context())
		second = New(s.opts)
		second.Set(list)
		ended := make(chan error)
		go func() { ended <- second.Run(ctx) }()
		if list == nil {
			time.Sleep(500 * time.Millisecond)
		} else {
			eventually(t, "the second has no directory", func() bool {
				reason := second.Reason(&resource.Device{UUID: s.gpu(1), MPS: &half})
				return strings.Contains(reason, lock.ErrHeld.Error())
			})
		}
		cancel()
		must(t, <-ended)
	}
	if now := s.awaitReady(0); now != pid || !s.modes.is(s.gpu(0)) || s.modes.is(s.gpu(1)) {
		t.Errorf("daemon %d, want %d as before, and modes %v", now, pid, s.modes.exclusive)
	}
}

func TestSupervisorFollowsTheDesiredState(t *testing.T) {
	s := newTestSupervisor(t)
	s.start()
	s.share(0)
	first := s.awaitReady(0)
	if !s.modes.is(s.gpu(0)) || s.modes.is(s.gpu(1)) {
		t.Error("the wrong GPUs are exclusive")
	}

	// Other limits.
	s.Set([]Daemon{{UUID: s.gpu(0), Limits: lessThanHalf}})
	eventually(t, "the other limits", func() bool { return s.problem(0, lessThanHalf) == "" })
	text, err := os.ReadFile(filepath.Join(s.dir(0), outputName))
	must(t, err)
	if !strings.Contains(string(text), "set_default_device_pinned_mem_limit 0 1100M") {
		t.Errorf("the daemon did not get them: %s", text)
	}
	s.share(0)

	// A container changes them.
	s.awaitReady(0)
	c, err := s.control(s.dir(0))
	must(t, err)
	_, err = c.ask(t.Context(), "set_default_active_thread_percentage 100")
	must(t, err)
	eventually(t, "the limits again", func() bool { ok, err := c.limited(t.Context(), half); return ok && err == nil })

	// It is killed and restarted; then the driver changes, and it is replaced.
	must(t, unix.Kill(first, unix.SIGKILL))
	s.awaitProblem(0, "was ended by signal SIGKILL")
	second := s.awaitReady(0)
	s.replaceDriver()
	eventually(t, "a daemon of the other driver", func() bool {
		r, err := readRecord(s.dir(0))
		return err == nil && r.PID != second && r.Driver == "2"
	})
	s.awaitReady(0)

	// The daemon of an unhealthy GPU is left alone.
	third := s.awaitReady(0)
	s.Set([]Daemon{{UUID: s.gpu(0), Limits: half, Hold: true}, {UUID: s.gpu(1), Limits: half, Hold: true}})
	time.Sleep(300 * time.Millisecond)
	if r, err := readRecord(s.dir(0)); err != nil || r.PID != third || prepared(s.dir(1)) {
		t.Errorf("record %+v, %v, and one of the other GPU: %t", r, err, prepared(s.dir(1)))
	}
}

func TestDaemonsThatCannotBeStarted(t *testing.T) {
	for name, c := range map[string]struct {
		spoil, mend func(s *testSupervisor) error
		want        string
	}{
		"no permission": {
			func(s *testSupervisor) error {
				s.modes.fail(errors.New("no permission to use the NVIDIA driver"))
				return nil
			},
			func(s *testSupervisor) error { s.modes.fail(nil); return nil },
			"its MPS control daemon cannot be started: no permission to use the NVIDIA driver",
		},
		"a program that is gone": {
			func(s *testSupervisor) error { return os.Rename(s.program.Path, s.program.Path+".gone") },
			func(s *testSupervisor) error { return os.Rename(s.program.Path+".gone", s.program.Path) },
			"its MPS control daemon cannot be started: stat ",
		},
		"a file that is not a program": {
			func(s *testSupervisor) error {
				return errors.Join(
					os.Rename(s.program.Path, s.program.Path+".not"), os.WriteFile(s.program.Path, nil, 0o755))
			},
			func(s *testSupervisor) error { return os.Rename(s.program.Path+".not", s.program.Path) },
			"ended with status 1",
		},
		"a directory that is a link": {
			func(s *testSupervisor) error { return os.Symlink("/", s.dir(0)) },
			func(s *testSupervisor) error { return os.Remove(s.dir(0)) },
			"not a directory",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newTestSupervisor(t)
			must(t, c.spoil(s))
			s.start()
			s.share(0)
			s.awaitProblem(0, c.want)
			must(t, c.mend(s))
			s.awaitReady(0)
		})
	}
}
