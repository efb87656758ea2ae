package mps

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// useScript replaces the control program by a script: the daemon sleeps, and the cases print the answers. They can
// write to the directory that is returned.
func (s *testSupervisor) useScript(cases string) (dir string) {
	s.t.Helper()
	dir = filepath.Join(s.dir(0), logName) // where a daemon can write
	root := s.t.TempDir()
	script := filepath.Join(root, "bin", "control")
	must(s.t, os.Mkdir(filepath.Dir(script), 0o755))
	testenv.WriteProgram(s.t, script, []byte(`#!/bin/sh
cd "$CUDA_MPS_LOG_DIRECTORY"
if [ "$1" = -f ]; then
	date +%s%N >> started
	exec sleep 600
fi
read command
case $command in
`+cases+`
get_default_device*) echo 1G ;;
get_default_active*) echo 50.0 ;;
esac
`))
	s.program = Program{Path: script, SearchPath: []string{"/usr/bin", "/bin"}, Driver: "1", Root: root}
	return dir
}

// replaceDriver changes the version of the driver, so that the worker requests the daemon's clients.
func (s *testSupervisor) replaceDriver() {
	s.setup.Lock()
	defer s.setup.Unlock()
	s.Supervisor.program.Driver = "2"
}

// Each answer arrives before the deadline, but not all of them together.
func TestACheckHasOneDeadline(t *testing.T) {
	t.Parallel()
	s := newTestSupervisor(t)
	s.opts.Deadline = 5 * time.Second
	s.useScript(`get_server_list) seq 2 4 ;;
get_client_list*) sleep 3 ;;`)
	s.start()
	s.share(0)
	s.awaitReady(0)
	s.replaceDriver()
	s.awaitProblem(0, "does not answer: get_client_list")
}

func TestTooManyServersAreRefused(t *testing.T) {
	t.Parallel()
	s := newTestSupervisor(t)
	dir := s.useScript(fmt.Sprintf(`get_server_list) seq 2 %d ;;
set_device*) : > asked ;;`, maxServers+2))
	s.start()
	s.share(0)
	s.awaitProblem(0, "want at most 16 PIDs")
	if _, err := os.Stat(filepath.Join(dir, "asked")); err == nil {
		t.Error("a server was given limits")
	}
}

// A container delays an answer, and the daemon ends meanwhile.
func TestADaemonEndsDuringARequest(t *testing.T) {
	for command, lead := range map[string]func(s *testSupervisor){
		"get_server_list":    func(s *testSupervisor) { s.replaceDriver() },
		"quit":               func(s *testSupervisor) { s.replaceDriver() },
		"set_default_device": func(s *testSupervisor) { s.Set([]Daemon{{UUID: s.gpu(0), Limits: lessThanHalf}}) },
	} {
		t.Run(command, func(t *testing.T) {
			t.Parallel()
			s := newTestSupervisor(t)
			s.opts.Deadline = time.Hour
			dir := s.useScript(command + `*) [ -e stall ] && : > asked && exec sleep 600; : ;;`)
			s.start()
			s.share(0)
			pid := s.awaitReady(0)
			must(t, os.WriteFile(filepath.Join(dir, "stall"), nil, 0o644))
			lead(s)
			eventually(
				t,
				"a command",
				func() bool { _, err := os.Stat(filepath.Join(dir, "asked")); return err == nil },
			)
			must(t, os.Remove(filepath.Join(dir, "stall")))
			must(t, unix.Kill(pid, unix.SIGKILL))
			eventually(
				t,
				"another daemon",
				func() bool { r, err := readRecord(s.dir(0)); return err == nil && r.PID != pid },
			)
		})
	}
}

// A daemon that does not answer has its time to start.
func TestASilentDaemonIsEndedAfterSomeTime(t *testing.T) {
	t.Parallel()
	s := newTestSupervisor(t)
	s.opts.Deadline = time.Second
	dir := s.useScript(`*) exit 1 ;;`)
	s.start()
	s.share(0)
	var starts []int64
	eventually(t, "a second daemon", func() bool {
		text, _ := os.ReadFile(filepath.Join(dir, "started"))
		starts = nil
		for line := range strings.FieldsSeq(string(text)) {
			n, err := strconv.ParseInt(line, 10, 64)
			must(t, err)
			starts = append(starts, n)
		}
		return len(starts) > 1
	})
	// The second daemon may have noted its time sooner after its start than the first.
	if lived := time.Duration(starts[1] - starts[0]); lived < (patience-1)*s.opts.Deadline {
		t.Errorf("it was ended after %v", lived)
	}
}

// A daemon that does not answer can end by itself before it is killed.
func TestASilentDaemonIsTerminatedThenKilled(t *testing.T) {
	deadline := time.Hour
	s := New(Options{Dir: t.TempDir(), Deadline: deadline, Changed: func() {}, Log: slog.New(slog.DiscardHandler)})
	for script, want := range map[string]string{
		"echo; exec cat":               "was ended by signal SIGTERM",
		"trap '' TERM; echo; exec cat": "was ended by signal SIGKILL",
	} {
		cmd := exec.Command("sh", "-c", script)
		stdin, err := cmd.StdinPipe() // cat waits for it
		must(t, err)
		defer stdin.Close()
		stdout, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		_, err = stdout.Read(make([]byte, 1)) // the signal is ignored from now on
		must(t, err)
		p, err := openProcess(cmd.Process.Pid, nil)
		must(t, err)
		defer p.close()
		w := newWorker(s, testGPU)
		w.take(p, "1")
		for n := time.Duration(0); p.runs() && n <= patience+1; n++ {
			w.silent = time.Now().Add(-n * deadline)
			_, _ = w.handleSilence(errors.New("no answer"))
			if want := n >= patience; w.ending != want {
				t.Errorf("after %d deadlines: ending is %t", n, w.ending)
			}
			select {
			case <-p.done():
			case <-time.After(200 * time.Millisecond):
			}
		}
		if got := fmt.Sprint(context.Cause(p.ended)); got != want {
			t.Errorf("it %s, want: it %s", got, want)
		}
	}
}

// A server may have clients, whose work would be lost.
func TestASilentDaemonWithServersIsNotKilled(t *testing.T) {
	t.Parallel()
	s := newTestSupervisor(t)
	s.opts.Deadline = 500 * time.Millisecond // the daemon has three of them to start its server
	root := s.t.TempDir()
	script := filepath.Join(root, "bin", "control")
	must(t, os.Mkdir(filepath.Dir(script), 0o755))
	testenv.WriteProgram(t, script, []byte("#!/bin/sh\n[ \"$1\" = -f ] || exit 1\nsleep 600 &\nwait\n"))
	s.program = Program{Path: script, SearchPath: []string{"/usr/bin", "/bin"}, Driver: "1", Root: root}
	s.start()
	for _, desired := range [][]Daemon{{{UUID: s.gpu(0), Limits: half}}, nil} {
		s.Set(desired)
		s.awaitProblem(0, "does not answer: get_")
		time.Sleep(2 * patience * s.opts.Deadline)
	}
	if r, err := readRecord(s.dir(0)); err != nil || !r.matches() {
		t.Errorf("the daemon has ended: %v", err)
	}
	eventually(t, "the server", func() bool { return endChildren(t, pidOf(t, s.dir(0))) })
	eventually(t, "the release of the GPU", func() bool { return !prepared(s.dir(0)) && !s.modes.is(s.gpu(0)) })
}

// endChildren kills the children of a process, and reports whether it had some.
func endChildren(t *testing.T, pid int) bool {
	t.Helper()
	pids, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	must(t, err)
	for child := range strings.FieldsSeq(string(pids)) {
		n, err := strconv.Atoi(child)
		must(t, err)
		must(t, unix.Kill(n, unix.SIGKILL))
	}
	return len(pids) > 0
}

// The daemon of another driver version, or of a GPU that is no longer shared, ends after its last client.
func TestADaemonWithClientsIsNotEnded(t *testing.T) {
	t.Parallel()
	s := newTestSupervisor(t)
	s.start()
	s.share(0)
	pid := s.awaitReady(0)
	end := s.startClient(0, 0)
	s.replaceDriver()
	s.Set([]Daemon{{UUID: s.gpu(0), Limits: lessThanHalf}})
	eventually(t, "the other limits", func() bool { return s.problem(0, lessThanHalf) == "" })
	s.Set(nil)
	s.awaitProblem(0, "ends when its last client has ended")
	time.Sleep(time.Second)
	if now := pidOf(t, s.dir(0)); now != pid || !s.modes.is(s.gpu(0)) {
		t.Errorf("daemon %d, want %d, exclusive %t", now, pid, s.modes.is(s.gpu(0)))
	}
	end()
	eventually(t, "the release of the GPU", func() bool { return !prepared(s.dir(0)) && !s.modes.is(s.gpu(0)) })
}

// A daemon that ends at once does not keep the node busy. One that ran for a while is restarted without a pause.
func TestRestartsHaveAPause(t *testing.T) {
	t.Parallel()
	s := newTestSupervisor(t)
	s.opts.Interval = 6 * time.Second
	s.start()
	s.share(0)
	started := func() time.Time {
		info, err := os.Stat(filepath.Join(s.dir(0), recordName)) // which is written when the daemon starts
		must(t, err)
		return info.ModTime()
	}
	for _, ran := range []time.Duration{0, s.opts.Interval} {
		pid, first := s.awaitReady(0), started()
		time.Sleep(ran)
		killed := time.Now()
		must(t, unix.Kill(pid, unix.SIGKILL))
		eventually(t, "another daemon", func() bool {
			r, err := readRecord(s.dir(0))
			return err == nil && r.PID != pid && r.matches()
		})
		since := first
		if ran > 0 {
			since = killed
		}
		if pause := started().Sub(since); (pause > s.opts.Interval/2) != (ran == 0) {
			t.Errorf("after it ran for %v it was restarted after %v", ran, pause)
		}
	}
}

// A daemon without its limits cannot be used, and the reason is reported.
func TestLimitsThatAreNotAccepted(t *testing.T) {
	for cases, problem := range map[string]string{
		`get_default_device*) echo 7G ;;`:    "cannot be limited: it did not accept the limits 1500 MiB, 50% of the threads",
		`get_default_active*) echo 100.0 ;;`: "cannot be limited: it did not accept the limits",
		`set_default_active*) exit 3 ;;`:     "cannot be limited: set_default_active_thread_percentage 50: exit status 3",
		`get_server_list) exit 3 ;;`:         "cannot be limited: get_server_list: exit status 3",
		`get_server_list) echo 7 ;; set_active*) exit 3 ;;`: "cannot be limited: " +
			"set_active_thread_percentage 7 50: exit status 3",
	} {
		t.Run(problem, func(t *testing.T) {
			t.Parallel()
			s := newTestSupervisor(t)
			s.useScript(cases)
			s.start()
			s.share(0)
			s.awaitProblem(0, problem)
		})
	}
}
