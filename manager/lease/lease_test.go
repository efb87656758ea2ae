package lease

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

// other is a user that is not this one.
const other = 12345

func TestDevicesAreFreeWhenTheCallerHasGone(t *testing.T) {
	t.Parallel()
	for name, gone := range map[string]func(s *service, c *child){
		"while it waits": func(s *service, c *child) {
			first := sleeper(s.T, os.Getuid())
			s.granted(s.askAs(first.ask(2)))
			a := s.askAs(c.ask(1))
			a.give()
			<-a.done
			testenv.Must(s, first.Process.Kill())
		},
		"while devices are chosen for it": func(s *service, c *child) {
			chooses, choose := make(chan bool), make(chan bool)
			s.m.lease = func([]string) error {
				chooses <- true
				<-choose
				return nil
			}
			a := s.askAs(c.ask(1))
			<-chooses
			a.give()
			<-a.done
			close(choose)
		},
		"while its devices are prepared": func(s *service, c *child) {
			s.m.start = func(ctx context.Context, _ []string) error {
				<-ctx.Done()
				return ctx.Err()
			}
			a := s.askAs(c.ask(1))
			s.until("the device is held", func() bool { return s.m.held() != "" })
			a.give()
			<-a.done
		},
		"just after the grant": func(s *service, c *child) {
			a := s.askAs(c.ask(2))
			s.granted(a)
			testenv.Must(s, c.Process.Kill())
		},
		"before the grant, but its connection stays": func(s *service, c *child) {
			first := sleeper(s.T, os.Getuid())
			s.granted(s.askAs(first.ask(2)))
			a := s.askAs(c.ask(1))
			testenv.Must(s, c.Process.Kill())
			_ = c.Wait()
			testenv.Must(s, first.Process.Kill())
			s.granted(a)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := run(t, newFake(t, 2))
			gone(s, sleeper(t, os.Getuid()))
			s.free()
		})
	}
}

func TestTheTimeOfALeaseIsOver(t *testing.T) {
	t.Parallel()
	const brief = 100 * time.Millisecond
	for name, c := range map[string]struct {
		script string
		limit  time.Duration
		want   syscall.Signal
		line   string // that it writes at the end
	}{
		"SIGTERM ends it":      {"echo ready; exec sleep 1000", brief, syscall.SIGTERM, ""},
		"it ends by itself":    {`trap 'echo bye; exit' TERM; echo ready; while :; do sleep 0.01; done`, brief, -1, "bye\n"},
		"it ignores SIGTERM":   {`trap '' TERM; echo ready; exec sleep 1000`, brief, syscall.SIGKILL, ""},
		"it is stopped, too":   {`trap '' TERM; echo ready; kill -STOP $$; exec sleep 1000`, brief, syscall.SIGKILL, ""},
		"it ended before that": {`echo ready; exec sleep 0.1`, time.Hour, -1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := run(t, newFake(t, 1))
			child := start(t, os.Getuid(), c.script)
			ask := child.ask(1)
			ask.For = c.limit
			s.granted(s.askAs(ask))
			s.free()
			line, _ := child.out.ReadString('\n')
			if got := child.signal(); got != c.want || line != c.line {
				t.Errorf("ended by %v, want %v; it wrote %q, want %q", got, c.want, line, c.line)
			}
			s.until("the log says so", func() bool { return strings.Contains(s.log.String(), " has ended after ") })
		})
	}
}

// A user has only processes of his own ended, also if they became those of another one. Their lease ends all the same.
func TestAProcessThatMayNotBeSignalled(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	c := sleeper(t, 0)
	record := model.Lease{Process: identify(t, c.Process.Pid), Ends: sinceBoot()}
	m := newFake(t, 1)
	id := m.hold(0, record, other)
	s := run(t, m)
	s.until("the log says why", func() bool { return strings.Contains(s.log.String(), "cannot be ended: process") })
	if s.m.held() != "d0" || c.Process.Signal(syscall.Signal(0)) != nil {
		t.Error("the process or its lease has ended")
	}
	asks := Ask{Request: Request{Count: 1}, By: model.Caller{UID: other, PID: c.Process.Pid}}
	if err := s.Acquire(t.Context(), asks, nil, nil); !errors.Is(err, ErrNotYours) {
		t.Errorf("a lease for another's process: %v", err)
	}
	s.stop()
	testenv.Must(t, m.ChangeLease(t.Context(), "lease-"+id, func(l *model.Lease) error {
		l.Ends = 1 // long over
		return nil
	}))
	s = run(t, m, func(o *Options) { o.Grace = 0 })
	s.free()
	if c.Process.Signal(syscall.Signal(0)) != nil {
		t.Error("the process has ended")
	}
	if !strings.Contains(s.log.String(), "ends, though its command still runs") {
		t.Errorf("the log does not say that the process runs:\n%s", s.log)
	}
}

// Users can end their leases whose command has become one of root, as by sudo: its containers are ended, and the
// command is left alone.
func TestAUserEndsTheLeaseOfACommandOfRoot(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	for name, hasContainer := range map[string]bool{"with a container": true, "without a container": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			command := sleeper(t, 0)
			m := newFake(t, 1)
			record := model.Lease{Process: identify(t, command.Process.Pid), Containers: true}
			a := &asked{Granted: Granted{ID: m.hold(0, record, other)}}
			s := run(t, m)
			s.until("it is followed", func() bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				return len(s.ends) == 1
			})
			var container *child
			if hasContainer {
				testenv.Must(t, s.mark(&a.Granted))
				container = s.inContainer(a, 0, "echo ready; exec sleep 1000")
			}
			if err := s.End(a.ID, model.Caller{UID: other}); err != nil {
				t.Fatal(err)
			}
			if hasContainer {
				if got := container.signal(); got != syscall.SIGTERM {
					t.Errorf("the container is ended by %v", got)
				}
			}
			s.until("the log says why the command goes on", func() bool {
				return strings.Contains(s.log.String(), "cannot be ended: process")
			})
			p, placed := m.Pod("lease-" + a.ID)
			if !placed || p.Lease.Ends == 0 || p.Lease.Ends > sinceBoot() {
				t.Errorf("the end is recorded as %+v", p.Lease)
			}
			s.stop()
			testenv.Must(t, m.ChangeLease(t.Context(), "lease-"+a.ID, func(l *model.Lease) error {
				l.Ends = 1 // long over
				return nil
			}))
			s = run(t, m, func(o *Options) { o.Grace = 0 })
			s.free()
			if command.Process.Signal(syscall.Signal(0)) != nil {
				t.Error("the command has ended")
			}
		})
	}
}

// The user of a process is known by the rule of kill(2).
func TestWhoseAProcessIs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		uids string // real, effective, saved, file system
		want error
	}{
		"all IDs are the user's":              {"12345 12345 12345 12345", nil},
		"a set-user-ID program, such as su":   {"12345 0 0 0", nil},
		"one that can become the user's":      {"0 0 12345 0", nil},
		"only its effective ID is the user's": {"0 12345 0 12345", ErrNotYours},
		"one that has become root's, by sudo": {"0 0 0 0", ErrNotYours},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := &process{Process: identify(t, os.Getpid()), procfs: t.TempDir()}
			dir := filepath.Join(p.procfs, fmt.Sprint(p.PID))
			stat, err := os.ReadFile("/proc/self/stat")
			testenv.Must(t, err, os.Mkdir(dir, 0o755), os.WriteFile(filepath.Join(dir, "stat"), stat, 0o600),
				os.WriteFile(filepath.Join(dir, "status"), []byte("Uid: "+c.uids+"\nCapEff: 0\n"), 0o600))
			if err := p.belongsTo(other); !errors.Is(err, c.want) {
				t.Errorf("error %v, want %v", err, c.want)
			}
		})
	}
}

// A set-user-ID program at its prompt has not become another user's, and does not prolong a lease.
func TestASetUserIDProgramIsEnded(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	c := start(t, 0, fmt.Sprintf("exec setpriv --ruid=%d sh -pc 'echo ready; exec sleep 1000'", other))
	m := newFake(t, 1)
	m.hold(0, model.Lease{Process: identify(t, c.Process.Pid), Ends: sinceBoot()}, other)
	s := run(t, m)
	if got := c.signal(); got != syscall.SIGTERM {
		t.Errorf("ended by %v", got)
	}
	s.free()
}

// identify returns what a record has of a process.
func identify(t *testing.T, pid int) model.Process {
	t.Helper()
	p, err := open("/proc", boot, pid)
	testenv.Must(t, err)
	defer p.close()
	return p.Process
}

func TestWhoMayEndALease(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	for name, c := range map[string]struct {
		owner, by int
		id        string // instead of its own
		want      error
	}{
		"its user":              {other, other, "", nil},
		"root":                  {other, 0, "", nil},
		"another user":          {other, other + 1, "", ErrNotYours},
		"a user one of root":    {0, other, "", ErrNotYours},
		"root, what is not":     {other, 0, "no-such", ErrNotFound},
		"an ID that is a path":  {other, 0, "../d0", ErrNotFound},
		"the pod's UID instead": {other, 0, "lease-", ErrNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := run(t, newFake(t, 1))
			child := sleeper(t, c.owner)
			a := s.askAs(child.ask(1))
			s.granted(a)
			s.until("it is followed", func() bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				return len(s.ends) == 1
			})
			id := a.ID
			if c.id != "" {
				id = c.id
			}
			if err := s.End(id, model.Caller{UID: c.by}); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			if c.want == nil {
				_ = s.End(id, model.Caller{UID: c.by}) // twice
				s.free()
				return
			}
			if s.m.held() != "d0" || child.Process.Signal(syscall.Signal(0)) != nil {
				t.Error("the process or its lease has ended")
			}
		})
	}
}

// Who ends a lease while its devices are prepared knows that it has not ended.
func TestALeaseIsEndedBeforeItBegins(t *testing.T) {
	t.Parallel()
	m := newFake(t, 1)
	prepared := make(chan bool)
	m.start = func(context.Context, []string) error {
		<-prepared
		return nil
	}
	s := run(t, m)
	c := sleeper(t, os.Getuid())
	a := s.askAs(c.ask(1))
	s.until("the device is held", func() bool { return m.held() != "" })
	id := m.Pods()[0].Pod.Name
	if err := s.End(id, model.Caller{}); !errors.Is(err, manager.ErrRetry) {
		t.Error(err)
	}
	close(prepared)
	s.granted(a)
	s.until("it can be ended", func() bool { return s.End(id, model.Caller{}) == nil })
	s.free()
}

func TestLeasesOfAnEarlierManager(t *testing.T) {
	t.Parallel()
	runs, ended := sleeper(t, os.Getuid()), sleeper(t, os.Getuid())
	gone := identify(t, ended.Process.Pid)
	testenv.Must(t, ended.Process.Kill())
	zombie := sleeper(t, os.Getuid())
	unwaited := identify(t, zombie.Process.Pid)
	testenv.Must(t, zombie.Process.Kill())
	_ = ended.Wait()
	thread := make(chan int)
	stop := make(chan bool)
	defer close(stop)
	for range 2 { // one of them may have the main thread, whose ID is that of the process
		go func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			thread <- unix.Gettid()
			<-stop
		}()
	}
	tid := max(<-thread, <-thread)
	live := identify(t, sleeper(t, os.Getuid()).Process.Pid)
	later, elsewhere, asThread := live, live, live
	later.Start++
	elsewhere.Boot = "another boot"
	asThread.PID = tid
	for name, c := range map[string]struct {
		record model.Process
		stays  bool
	}{
		"its process runs":                         {identify(t, runs.Process.Pid), true},
		"its process has ended":                    {gone, false},
		"its process has ended, not waited for":    {unwaited, false},
		"its PID is that of a later process":       {later, false},
		"its PID is that of another one's thread":  {asThread, false},
		"its PID and start were of another boot":   {elsewhere, false},
		"there was never such a PID":               {model.Process{PID: 1 << 22, Start: 1, Boot: boot}, false},
		"the record is of a boot that had no name": {model.Process{PID: live.PID, Start: live.Start}, false},
	} {
		t.Run(name, func(t *testing.T) {
			m := newFake(t, 1)
			id := m.hold(0, model.Lease{Process: c.record}, os.Getuid())
			s := run(t, m)
			if !c.stays {
				s.free()
				return
			}
			s.until("it is followed", func() bool {
				s.mu.Lock()
				defer s.mu.Unlock()
				return len(s.ends) == 1
			})
			waits := s.ask(1)
			testenv.Must(t, s.End(id, model.Caller{UID: os.Getuid()}))
			s.granted(waits)
		})
	}
}

// inContainer starts a process in a container of a lease, as an engine does that root runs.
func (s *service) inContainer(a *asked, user int, script string) *child {
	s.Helper()
	return s.withMark(a, "unshare --mount --propagation private", fmt.Sprintf("setpriv --reuid=%d", user), script)
}

// withMark starts a process that sees the file of a lease in another mount namespace.
func (s *service) withMark(a *asked, namespace, as, script string) *child {
	s.Helper()
	i := slices.IndexFunc(a.Options.Mounts, func(m model.Mount) bool { return m.ContainerPath == MarkPath && m.ReadOnly })
	if i < 0 {
		s.Fatalf("containers get the mounts %+v", a.Options.Mounts)
	}
	return s.withMount(a.Options.Mounts[i].HostPath, MarkPath, namespace, as, script)
}

// withMount starts a process with a mount below /run in another mount namespace.
func (s *service) withMount(source, target, namespace, as, script string) *child {
	s.Helper()
	testenv.Root(s.T)
	testenv.Must(s, os.Chmod(filepath.Dir(s.m.dir), 0o755)) // other users reach the file
	const shell = `export SCRIPT="%s"; exec %s sh -ec '
		mount -t tmpfs tmpfs /run; mkdir -p %s; touch %s
		mount --bind %s %[4]s; exec %[6]s sh -c "$SCRIPT"'`
	return start(s.T, os.Getuid(), fmt.Sprintf(shell, script, namespace, filepath.Dir(target), target, source, as))
}

// A container that outlives the command of its engine has the lease, until its processes have ended.
func TestAContainerOutlivesItsCommand(t *testing.T) {
	t.Parallel()
	const sleeps = "echo ready; exec sleep 1000"
	type lease struct {
		*service
		*asked
		command *child
	}
	holder := func(l *lease, pid int) {
		l.Helper()
		l.until(fmt.Sprintf("process %d has the lease", pid), func() bool {
			list, _, _ := l.List()
			return len(list) == 1 && list[0].ID == l.ID && list[0].PID == pid && len(list[0].Devices) == 2
		})
	}
	kill := func(l *lease, c *child) {
		l.Helper()
		testenv.Must(l, c.Process.Kill())
		_ = c.Wait()
	}
	free := func(l *lease) {
		l.Helper()
		kill(l, l.command)
		l.free()
	}
	for name, c := range map[string]struct {
		limit time.Duration
		test  func(l *lease)
	}{
		"the command is killed": {0, func(l *lease) {
			first := l.inContainer(l.asked, os.Getuid(), sleeps)
			second := l.inContainer(l.asked, os.Getuid(), sleeps)
			kill(l, l.command)
			holder(l, first.Process.Pid)
			waits := l.ask(1)
			kill(l, first)
			holder(l, second.Process.Pid)
			if !strings.Contains(waits.reason(), "0 of 2 devices") {
				l.Errorf("another request waits since %q", waits.reason())
			}
			kill(l, second)
			l.granted(waits)
		}},
		"the manager is restarted meanwhile": {0, func(l *lease) {
			c := l.inContainer(l.asked, os.Getuid(), sleeps)
			l.stop()
			kill(l, l.command)
			l.service = run(l.T, l.m)
			holder(l, c.Process.Pid)
			l.stop()
			l.service = run(l.T, l.m)
			holder(l, c.Process.Pid)
			kill(l, c)
		}},
		"its time is over": {500 * time.Millisecond, func(l *lease) {
			c := l.inContainer(l.asked, os.Getuid(), "trap : TERM; echo ready; while :; do sleep 0.1; done")
			if got := c.signal(); got != syscall.SIGKILL {
				l.Errorf("the container is ended by %v", got)
			}
		}},
		"it is ended by its user": {0, func(l *lease) {
			c := l.inContainer(l.asked, os.Getuid(), sleeps)
			kill(l, l.command)
			holder(l, c.Process.Pid)
			l.until("it can be ended", func() bool { return l.End(l.ID, model.Caller{UID: os.Getuid()}) == nil })
			if got := c.signal(); got != syscall.SIGTERM {
				l.Errorf("the container is ended by %v", got)
			}
		}},
		"all that is left is killed when its time is over": {500 * time.Millisecond, func(l *lease) {
			const ignores = "trap : TERM; echo ready; while :; do sleep 0.1; done"
			containers := []*child{
				l.inContainer(l.asked, os.Getuid(), ignores), l.inContainer(l.asked, other, ignores),
				l.inContainer(l.asked, os.Getuid(), ignores),
			}
			for _, c := range containers {
				if got := c.signal(); got != syscall.SIGKILL {
					l.Errorf("a container is ended by %v", got)
				}
			}
		}},
		"a container that clears its environment": {0, func(l *lease) {
			c := l.inContainer(l.asked, os.Getuid(), "echo ready; exec env -i sleep 1000")
			kill(l, l.command)
			holder(l, c.Process.Pid)
			kill(l, c)
		}},
		"a file that is deleted meanwhile": {0, func(l *lease) {
			c := l.inContainer(l.asked, os.Getuid(), sleeps)
			testenv.Must(l, os.Remove(l.markPath(l.ID)))
			kill(l, l.command)
			holder(l, c.Process.Pid)
			kill(l, c)
		}},
		"a container of another user does not count": {0, func(l *lease) {
			l.withMark(l.asked,
				fmt.Sprintf("setpriv --reuid=%d --clear-groups unshare --user --map-root-user --mount", other), "", sleeps)
			free(l)
		}},
		"another user's file with the same name does not count": {0, func(l *lease) {
			theirs := filepath.Join(l.TempDir(), marksName, l.ID)
			testenv.Must(l, os.MkdirAll(filepath.Dir(theirs), 0o755), os.WriteFile(theirs, nil, 0o444))
			l.withMount(theirs, MarkPath, "unshare --mount --propagation private", "", sleeps)
			free(l)
		}},
		"a link to the file, which another container has as its volume, does not count": {0, func(l *lease) {
			link := filepath.Join(l.TempDir(), "volume")
			testenv.Must(l, os.Symlink(l.markPath(l.ID), link))
			l.withMount(link, "/run/volume", "unshare --mount --propagation private", "", sleeps)
			free(l)
		}},
		"a mount that a container has shared with the host does not count": {0, func(l *lease) {
			const shared = "unshare --mount --propagation private unshare --mount --propagation shared"
			l.withMark(l.asked, shared, "", sleeps)
			free(l)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := run(t, newFake(t, 2))
			command := sleeper(t, os.Getuid())
			ask := command.ask(2)
			ask.For = c.limit
			l := &lease{s, s.askAs(ask), command}
			l.granted(l.asked)
			c.test(l)
			_ = l.command.Process.Kill()
			if len(l.m.Pods()) > 0 && l.m.Pods()[0].Pod.Name != l.ID { // of a request that waited
				return
			}
			l.free()
		})
	}
}

// A user has the containers of his lease ended, whatever user their processes are of.
func TestTheEndOfAContainerOfAnotherUser(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	for name, c := range map[string]struct{ timed, restart bool }{
		"the lease has no other process": {timed: true}, "its command has ended": {},
		"its command has ended, and the manager is restarted": {restart: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := run(t, newFake(t, 1))
			command := sleeper(t, other)
			ask := command.ask(1)
			if ask.Timed = c.timed; c.timed {
				ask.For = time.Hour
			}
			a := s.askAs(ask)
			s.granted(a)
			container := s.inContainer(a, other+1, "echo ready; exec sleep 1000")
			if !c.timed {
				testenv.Must(t, command.Process.Kill())
				s.until("the lease is the container's", func() bool {
					list, _, _ := s.List()
					return len(list) == 1 && list[0].PID == container.Process.Pid
				})
			}
			if c.restart {
				s.stop()
				s = run(t, s.m)
			}
			s.until("it can be ended", func() bool { return s.End(a.ID, model.Caller{UID: other}) == nil })
			if got := container.signal(); got != syscall.SIGTERM {
				t.Errorf("ended by %v", got)
			}
			s.free()
		})
	}
}

// Each container of a lease that is over is asked to end.
func TestTheEndOfSeveralContainers(t *testing.T) {
	t.Parallel()
	for name, background := range map[string]bool{"of a lease for a time": false, "in the background": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := run(t, newFake(t, 1))
			command := sleeper(t, os.Getuid())
			ask := command.ask(1)
			if ask.Timed = !background; ask.Timed {
				ask.For = time.Hour
			}
			a := s.askAs(ask)
			s.granted(a)
			stubborn := s.inContainer(a, os.Getuid(), "trap : TERM; echo ready; while :; do sleep 0.1; done")
			obedient := s.inContainer(a, other, "echo ready; exec sleep 1000")
			if background {
				testenv.Must(t, command.Process.Kill())
				s.until("the lease is a container's", func() bool {
					list, _, _ := s.List()
					return len(list) == 1 && list[0].PID == stubborn.Process.Pid
				})
			}
			s.until("it can be ended", func() bool { return s.End(a.ID, model.Caller{UID: os.Getuid()}) == nil })
			if got := obedient.signal(); got != syscall.SIGTERM {
				t.Errorf("ended by %v", got)
			}
			if got := stubborn.signal(); got != syscall.SIGKILL {
				t.Errorf("what ignores SIGTERM is ended by %v", got)
			}
			s.free()
		})
	}
}

// A process outside of the containers cannot prolong a lease that is over, whatever it starts.
func TestContainersThatAreStartedOneAfterTheOther(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ forced bool }{
		"root ends it": {true},
		"its time was over long before the manager was restarted": {false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := run(t, newFake(t, 1), func(o *Options) { o.Grace = 100 * time.Millisecond })
			command := sleeper(t, other)
			a := s.askAs(command.ask(1))
			s.granted(a)
			starter := s.startsContainers(a)
			testenv.Must(t, command.Process.Kill())
			s.until("the lease is a container's", func() bool {
				return strings.Contains(s.log.String(), "goes on: its container")
			})
			if c.forced {
				s.until("it can be ended", func() bool { return s.End(a.ID, model.Caller{}) == nil })
			} else {
				s.stop()
				testenv.Must(t, s.m.ChangeLease(t.Context(), "lease-"+a.ID, func(l *model.Lease) error {
					l.Ends = 1
					return nil
				}))
				s = run(t, s.m, func(o *Options) { o.Grace = 100 * time.Millisecond })
			}
			s.free()
			if starter.Process.Signal(syscall.Signal(0)) != nil {
				t.Error("the process that starts containers has ended")
			}
			if _, err := os.Lstat(s.markPath(a.ID)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the file of the lease: %v", err)
			}
		})
	}
}

// startsContainers starts a process that starts a container of a lease ten times a second, outside of them.
func (s *service) startsContainers(a *asked) *child {
	s.Helper()
	testenv.Root(s.T)
	kept := filepath.Join(s.TempDir(), "kept") // a mount of the file stays when the file is removed
	testenv.Must(s, os.WriteFile(kept, nil, 0o600))
	return start(s.T, os.Getuid(), fmt.Sprintf(`
		exec unshare --mount --propagation private --pid --fork --kill-child sh -ec '
		mount --bind %s %s; echo ready
		while :; do
			unshare --mount --propagation private sh -ec "
				mount -t tmpfs tmpfs /run; mkdir -p /run/gpu; touch %s; mount --bind %[2]s %[3]s; exec sleep 5" &
			sleep 0.1
		done'`, s.markPath(a.ID), kept, MarkPath))
}

// A lease that is over ends a bounded time after its recorded end, also if the manager is restarted.
func TestTheLastMomentOfALease(t *testing.T) {
	t.Parallel()
	const grace = 10 * time.Second
	for name, c := range map[string]struct {
		since  time.Duration // the recorded end
		forced bool
		want   time.Duration // from now
	}{
		"its time is just over":                    {0, false, grace + unknownTime},
		"its time was over a moment ago":           {20 * time.Second, false, grace + unknownTime - 20*time.Second},
		"its time was over long ago":               {time.Hour, false, grace + startTime},
		"root ends it":                             {0, true, grace + startTime},
		"root ends it when its time was long over": {time.Hour, true, grace + startTime},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newFake(t, 1)
			m.hold(0, model.Lease{Ends: sinceBoot() - c.since}, other)
			b := newBegun(m.Pods()[0], nil)
			b.forced.Store(c.forced)
			New(Options{Manager: m, Grace: grace}).over(b)
			if got := time.Until(b.last); got > c.want || got < c.want-5*time.Second {
				t.Errorf("it ends in %v, want %v", got, c.want)
			}
		})
	}
}

// In a container with the host's process IDs, no process takes others with it.
func TestTheEndOfAContainerOfManyProcesses(t *testing.T) {
	t.Parallel()
	s := run(t, newFake(t, 1))
	a := s.askAs(Ask{
		Request: Request{Count: 1}, By: model.Caller{UID: os.Getuid(), PID: os.Getpid()}, Timed: true, For: time.Hour,
	})
	s.granted(a)
	const processes = 40
	container := s.inContainer(a, other, "trap '' TERM; "+strings.Repeat("sleep 1000 & ", processes)+"echo ready; wait")
	s.until("it can be ended", func() bool { return s.End(a.ID, model.Caller{UID: os.Getuid()}) == nil })
	if got := container.signal(); got != syscall.SIGKILL {
		t.Errorf("ended by %v", got)
	}
	s.free()
	// A process that is about to end may have the lease once more.
	if n := strings.Count(s.log.String(), "goes on: its container runs"); n > processes/2 {
		t.Errorf("%d processes had the lease one after the other", n)
	}
}

// Who is not root adopts what his process uses. Other devices are prepared like those of any lease.
func TestWhoAdoptsDevices(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		user     int
		busy     bool
		prepared bool // and otherwise only given to root
	}{
		"root, one that another process uses":         {0, true, false},
		"root, one that is free":                      {0, false, false},
		"another user, one that is free":              {other, false, true},
		"another user, one that another process uses": {other, true, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newFake(t, 1)
			var prepared atomic.Bool
			m.start = func(context.Context, []string) error {
				prepared.Store(true)
				return nil
			}
			if c.busy {
				m.use(0, "process 7 uses it")
			}
			s := run(t, m)
			ask := sleeper(t, c.user).ask(1)
			ask.Devices = []string{"d0"}
			a := s.askAs(ask)
			if c.busy && c.user != 0 {
				s.until("it waits", func() bool { return strings.Contains(a.reason(), "d0 is left out: process 7 uses it") })
				a.give()
				return
			}
			s.granted(a)
			if prepared.Load() != c.prepared {
				t.Errorf("prepared: %t, want %t", prepared.Load(), c.prepared)
			}
		})
	}
}

// Root can have a process ended that the user of the lease may not end, also by SIGKILL.
func TestRootEndsAProcess(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	c := start(t, 0, "trap : TERM; echo ready; while :; do sleep 0.1; done")
	m := newFake(t, 1)
	id := m.hold(0, model.Lease{Process: identify(t, c.Process.Pid)}, other)
	s := run(t, m)
	s.until("it can be ended", func() bool { return s.End(id, model.Caller{}) == nil })
	if got := c.signal(); got != syscall.SIGKILL {
		t.Errorf("ended by %v", got)
	}
	s.free()
}

// confiner notes what it is asked.
type confiner struct {
	mu    sync.Mutex
	calls []string
}

func (c *confiner) note(call string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, call)
}

func (c *confiner) Confine(_ context.Context, id string, _ model.Caller, _ *os.File, _ model.RunOptions) error {
	c.note("confine " + id)
	return nil
}

func (c *confiner) Revoke(_ context.Context, id string) { c.note("revoke " + id) }

// What is left of a confined process can open no devices before others get them. Its containers are not looked for.
func TestAProcessIsConfined(t *testing.T) {
	t.Parallel()
	m, confiner := newFake(t, 1), &confiner{}
	s := run(t, m, func(o *Options) { o.Confiner = confiner })
	m.release = func(uid string) error {
		confiner.note("release " + strings.TrimPrefix(uid, "lease-"))
		return nil
	}
	c := sleeper(t, os.Getuid())
	ask := c.ask(1)
	ask.Confine = true
	a := s.askAs(ask)
	s.granted(a)
	if !a.Confined || len(a.Options.Mounts) > 0 {
		t.Errorf("confined: %t; containers get %v", a.Confined, a.Options.Mounts)
	}
	testenv.Must(t, c.Process.Kill())
	s.free()
	want := []string{"confine " + a.ID, "revoke " + a.ID, "release " + a.ID}
	if diff := cmp.Diff(want, confiner.calls); diff != "" {
		t.Errorf("the calls (-want +got):\n%s", diff)
	}
}

func TestALeaseHasTheIndexesOnTheHost(t *testing.T) {
	t.Parallel()
	s := run(t, newFake(t, 3), func(o *Options) {
		o.Describe = func(id string) Info { return Info{Index: map[string]string{"d0": "7", "d2": "1:0"}[id]} }
	})
	a := s.ask(3)
	s.granted(a)
	want := []string{"7", "", "1:0"}
	if diff := cmp.Diff(want, a.Indexes); diff != "" {
		t.Errorf("the indexes of %q (-want +got):\n%s", a.Devices, diff)
	}
}

// Who passes others has ended before they can begin, even if his command ignores SIGTERM.
func TestADemandIsForTheWholeTime(t *testing.T) {
	s := New(Options{Grace: 10 * time.Second})
	for limit, want := range map[time.Duration]time.Duration{0: 0, time.Minute: 70 * time.Second} {
		if got := s.demand(&waiter{limit: limit}).takes; got != want {
			t.Errorf("with the limit %v it takes %v, want %v", limit, got, want)
		}
	}
}

// The end of a lease is not forgotten with the manager.
func TestAnEndIsRecorded(t *testing.T) {
	t.Parallel()
	m := newFake(t, 1)
	s := run(t, m)
	c := start(t, os.Getuid(), "trap : TERM; echo ready; while :; do sleep 0.1; done")
	a := s.askAs(c.ask(1))
	s.granted(a)
	s.until("it can be ended", func() bool { return s.End(a.ID, model.Caller{UID: os.Getuid()}) == nil })
	s.stop()
	s = run(t, m)
	if got := c.signal(); got != syscall.SIGKILL {
		t.Errorf("the next manager has it ended by %v", got)
	}
	s.free()
}

// While it is unknown whether the process or a container of a lease runs, the lease keeps its devices, but not for
// ever, and root can end it at once.
func TestWhatIsUnknownOfALease(t *testing.T) {
	t.Parallel()
	const fraction = 10 * time.Second // more than passes before the recorded end, which is of the real clock, is read
	root, user := &model.Caller{}, &model.Caller{UID: other}
	timed := model.Lease{Process: model.Process{Boot: boot}, Containers: true}
	runs := model.Lease{Process: model.Process{Boot: boot, PID: os.Getpid(), Start: 1}}
	for name, c := range map[string]struct {
		lease model.Lease
		ends  *model.Caller // who ends the lease
		kept  time.Duration
	}{
		"its containers":                       {timed, nil, 2*time.Second + unknownTime},
		"its containers, and its user ends it": {timed, user, 2*time.Second + unknownTime},
		"its containers, and root ends it":     {timed, root, 0},
		"its process":                          {runs, nil, unknownTime},
		"its process, and its user ends it":    {runs, user, unknownTime},
		"its process, and root ends it":        {runs, root, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			procfs := t.TempDir() // with a process that cannot be read
			dir := filepath.Join(procfs, fmt.Sprint(os.Getpid()))
			testenv.Must(t, os.MkdirAll(filepath.Join(dir, "ns"), 0o755), os.Symlink("mnt:[1]", filepath.Join(dir, "ns/mnt")),
				os.WriteFile(filepath.Join(dir, "stat"), []byte("damaged"), 0o600),
				os.Symlink("/proc/thread-self", filepath.Join(procfs, "thread-self")))
			synctest.Test(t, func(t *testing.T) {
				m := newFake(t, 1)
				if c.lease.Containers { // no process has it, so its time is over
					c.lease.Ends = sinceBoot()
				}
				id := m.hold(0, c.lease, other)
				s := run(t, m, func(o *Options) { o.Procfs = procfs })
				synctest.Wait()
				if !strings.Contains(s.log.String(), "is kept until its ") {
					t.Errorf("the log does not say why the lease is kept:\n%s", s.log)
				}
				if c.ends != nil {
					testenv.Must(t, s.End(id, *c.ends))
					synctest.Wait()
				}
				if c.kept > 0 {
					time.Sleep(c.kept - fraction)
					if m.held() != "d0" {
						t.Errorf("it has ended before %v", c.kept)
					}
					time.Sleep(fraction)
					synctest.Wait()
				}
				if m.held() != "" || !strings.Contains(s.log.String(), " ends, though it is unknown whether ") {
					t.Errorf("after %v %q is held; the log:\n%s", c.kept, m.held(), s.log)
				}
				s.stop()
			})
		})
	}
}

// A mount namespace is read once, however many processes are in it. One that cannot be read hides no other one.
func TestTheReadingOfMountNamespaces(t *testing.T) {
	t.Parallel()
	s := run(t, newFake(t, 1))
	command := sleeper(t, other)
	a := s.askAs(command.ask(1))
	s.granted(a)
	const two = "sleep 1000 & echo ready; exec sleep 1000"
	own := s.inContainer(a, other, two)
	unread := s.inContainer(a, other, two)
	procfs := t.TempDir()
	testenv.Must(t, os.Symlink("/proc/thread-self", filepath.Join(procfs, "thread-self")),
		os.Symlink("/proc/1", filepath.Join(procfs, "1")))
	for first, mounts := range map[*child]string{own: "", unread: "damaged"} {
		second := childOf(t, first.Process.Pid) // its mounts cannot be read
		t.Cleanup(func() { _ = syscall.Kill(second, syscall.SIGKILL) })
		for pid, damage := range map[int]string{first.Process.Pid: mounts, second: "damaged"} {
			dir, real := filepath.Join(procfs, fmt.Sprint(pid)), filepath.Join("/proc", fmt.Sprint(pid))
			testenv.Must(t, os.Mkdir(dir, 0o755), os.Symlink(filepath.Join(real, "ns"), filepath.Join(dir, "ns")))
			for _, name := range []string{"stat", "mountinfo"} {
				data, err := os.ReadFile(filepath.Join(real, name))
				testenv.Must(t, err)
				if name == "mountinfo" && damage != "" {
					data = []byte(damage)
				}
				testenv.Must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
			}
		}
	}
	reader := &Service{o: Options{Procfs: procfs}, marks: s.marks}
	list, err := reader.containers(t.Context(), a.ID, other)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d: ", unread.Process.Pid)) {
		t.Errorf("the error %v does not name process %d", err, unread.Process.Pid)
	}
	want := []int{own.Process.Pid, childOf(t, own.Process.Pid)}
	if len(list) != 1 || !slices.Equal(list[0].pids, want) {
		t.Errorf("containers: %+v, want one with %v", list, want)
	}
	for i := range list {
		list[i].close()
	}
	done, cancel := context.WithCancel(t.Context())
	cancel()
	if list, err := reader.containers(done, a.ID, other); len(list) > 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("when the time is over: %+v, %v", list, err)
	}
}

// childOf returns the PID of the only child of a process.
func childOf(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
	testenv.Must(t, err)
	child, err := strconv.Atoi(strings.TrimSpace(string(text)))
	testenv.Must(t, err)
	return child
}

// When the manager ends, leases stay and requests do not.
func TestTheManagerEnds(t *testing.T) {
	t.Parallel()
	m := newFake(t, 2)
	c := sleeper(t, os.Getuid())
	s := run(t, m)
	a := s.askAs(c.ask(2))
	s.granted(a)
	waits := s.ask(1)
	begin := time.Now()
	s.stop()
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
	waits.give() // as the API does, whose requests end with it
	<-waits.done
	if !errors.Is(waits.err, context.Canceled) {
		t.Errorf("the waiting request: %v", waits.err)
	}
	if m.held() != "d0 d1" || c.Process.Signal(syscall.Signal(0)) != nil {
		t.Errorf("%q is held", m.held())
	}
	s = run(t, m)
	leases, _, _ := s.List()
	if len(leases) != 1 || leases[0].ID != a.ID || leases[0].PID != c.Process.Pid || leases[0].Command != "sleep" {
		t.Errorf("the leases: %+v", leases)
	}
	testenv.Must(t, c.Process.Kill())
	s.free()
}

// Changes of the clock move neither the end of a lease nor what it counts.
func TestTheClockJumps(t *testing.T) {
	t.Parallel()
	for name, jump := range map[string]time.Duration{
		"forward by a year": 365 * 24 * time.Hour, "back by a year": -365 * 24 * time.Hour, "not at all": 0,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c, stays := sleeper(t, os.Getuid()), sleeper(t, os.Getuid())
			now := sinceBoot()
			m := newFake(t, 2)
			m.hold(0, model.Lease{
				Process: identify(t, c.Process.Pid), Begins: now - 10*time.Second, Ends: now + 300*time.Millisecond,
			}, os.Getuid())
			id := m.hold(1, model.Lease{
				Process: identify(t, stays.Process.Pid), Begins: now, Ends: now + time.Hour,
			}, os.Getuid())
			for i := range m.pods {
				m.pods[i].Admitted = time.Now().Add(-jump).Round(0) // by the clock before the jump
			}
			s := run(t, m)
			if got := c.signal(); got != syscall.SIGTERM || sinceBoot() < now+300*time.Millisecond {
				t.Errorf("ended by %v after %v", got, sinceBoot()-now)
			}
			s.until("its devices are free", func() bool { return m.held() == "d1" })
			s.until("the log has what it took", func() bool {
				return strings.Contains(s.log.String(), "lease old0 has ended after 10.")
			})
			leases, _, _ := s.List()
			if len(leases) != 1 || leases[0].ID != id || time.Until(*leases[0].Ends).Round(time.Minute) != time.Hour {
				t.Errorf("the leases: %+v", leases)
			}
		})
	}
}

// A full queue has a place for who has fewer requests in it than others, and for root. All subordinate IDs of a user
// are one user; here they are those from 1000 on.
func TestTheQueueHasLimits(t *testing.T) {
	t.Parallel()
	of := func(user, n int) []int { return slices.Repeat([]int{user}, n) }
	users := func(n int) (list []int) { // each with one request
		for user := range n {
			list = append(list, user+1)
		}
		return list
	}
	const most = maxWaitingOfUser
	six := slices.Concat(of(1, most), of(2, most), of(3, most), of(4, most), of(5, most), of(6, most))
	for name, c := range map[string]struct {
		waiting []int // the users
		user    int   // who comes then
		refused bool
		loser   int // whose newest request gives way, or 0
	}{
		"one user has more than his part":              {of(1, most), 1, true, 0},
		"and another user comes":                       {of(1, most), 2, false, 0},
		"root has more than any user":                  {of(0, most), 0, false, 0},
		"subordinate IDs of a user have his part":      {slices.Concat(of(1000, most-1), of(1001, 1)), 1002, true, 0},
		"six users have all places":                    {six, 7, false, 1},
		"six users have all places, and root comes":    {six, 0, false, 1},
		"each of many has one place":                   {users(maxWaiting), maxWaiting + 1, true, 0},
		"each of many has one place, and root comes":   {users(maxWaiting), 0, false, 1},
		"root has all places":                          {of(0, maxWaiting), 1, true, 0},
		"root has all places, and root comes":          {of(0, maxWaiting), 0, true, 0},
		"one user has more than the others, who comes": {slices.Concat(six[2:], of(7, 2)), 7, false, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := New(Options{})
			s.account = func(uid uint32) uint32 { return min(uid, 1000) }
			enter := func(user int) (*waiter, error) {
				return s.enter(Ask{Request: Request{Count: 1}, By: model.Caller{UID: user}}, &process{})
			}
			newest := map[int]*waiter{}
			for _, user := range c.waiting {
				w, err := enter(user)
				testenv.Must(t, err)
				newest[user] = w
			}
			if _, err := enter(c.user); errors.Is(err, ErrTooMany) != c.refused {
				t.Errorf("the request of user %d: %v", c.user, err)
			}
			if len(s.queue) > maxWaiting {
				t.Errorf("%d requests wait", len(s.queue))
			}
			for user, w := range newest {
				lost := w.err != nil && errors.Is(w.err, ErrTooMany) && !slices.Contains(s.queue, w)
				if lost != (user == c.loser && c.loser > 0) {
					t.Errorf("the newest request of user %d has given way: %t (%v)", user, lost, w.err)
				}
			}
		})
	}
}

// Who gives way learns that, and gets no devices that were just chosen for him.
func TestARequestThatGivesWay(t *testing.T) {
	t.Parallel()
	m := newFake(t, 1)
	chooses, choose := make(chan bool), make(chan bool)
	m.lease = func([]string) error {
		chooses <- true
		<-choose
		return nil
	}
	s := run(t, m)
	waits := s.askAs(sleeper(t, os.Getuid()).ask(1))
	<-chooses
	s.mu.Lock()
	s.queue[0].account = 7
	for len(s.queue) < maxWaiting {
		s.queue = append(s.queue, &waiter{by: model.Caller{UID: 8}, account: 8, err: ErrImpossible})
	}
	made := s.makePlace(0)
	s.mu.Unlock()
	<-waits.done
	if !made || !errors.Is(waits.err, ErrTooMany) {
		t.Errorf("there is a place: %t; the request: %v", made, waits.err)
	}
	s.mu.Lock()
	s.queue = nil
	s.mu.Unlock()
	close(choose)
	s.free()
}

func TestRequestsThatFailAtOnce(t *testing.T) {
	t.Parallel()
	ended := sleeper(t, os.Getuid())
	testenv.Must(t, ended.Process.Kill())
	_ = ended.Wait()
	for name, c := range map[string]struct {
		ask  Ask
		want error
	}{
		"no devices":               {Ask{By: model.Caller{PID: os.Getpid()}}, ErrInvalid},
		"more than the host has":   {Ask{Request: Request{Count: 3}, By: model.Caller{PID: os.Getpid()}}, ErrImpossible},
		"a process that has ended": {ended.ask(1), ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			s := run(t, newFake(t, 2))
			if err := s.Acquire(t.Context(), c.ask, func(Waiting) {}, nil); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
			s.free()
		})
	}
	s := run(t, newFake(t, 2))
	err := s.Acquire(t.Context(), ended.ask(1), nil, nil)
	if want := fmt.Sprintf("invalid request: process %d has ended", ended.Process.Pid); err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	err = s.Acquire(t.Context(), Ask{Request: Request{Count: 1}}, nil, nil)
	if err == nil || !strings.Contains(err.Error(), "another PID namespace") {
		t.Errorf("a process of another PID namespace: %v", err)
	}
}

// What others see of a request cannot change their terminals, and is not long.
func TestACommandIsPrintable(t *testing.T) {
	t.Parallel()
	s := New(Options{})
	command := "a\x1b]0;x\a\nb\xff" + strings.Repeat("c", 1000)
	w, err := s.enter(Ask{Request: Request{Count: 1}, Command: command}, &process{})
	testenv.Must(t, err)
	got, want := w.lease.Command, "a\ufffd]0;x\ufffd b"
	if len(got) > maxCommand || printable(got) != got || !strings.HasPrefix(got, want) {
		t.Errorf("the command: %q", got)
	}
}

// The tests below have a clock of their own. It stands still while a process is followed, so they end at a grant.

// A plugin registers one resource after the other, so at the start it is not known what the host has.
func TestARequestWaitsUntilThePluginHasRegistered(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		devices int
		want    error
		took    time.Duration
	}{
		"with enough devices":    {2, nil, time.Second},
		"with too few after all": {1, ErrImpossible, registerTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFake(t, 1)
				begin := time.Now()
				s := run(t, m)
				a := s.ask(2)
				time.Sleep(time.Second)
				if want := "this host cannot give 2 devices: it has 1 x example.com/gpu so far"; a.reason() != want {
					t.Errorf("it waits since %q, want %q", a.reason(), want)
				}
				m.mu.Lock()
				m.devices = append(m.devices, manager.Device{ID: "d1", Health: manager.Healthy})[:c.devices]
				m.changed()
				m.mu.Unlock()
				<-a.done
				if took := time.Since(begin); !errors.Is(a.err, c.want) || took != c.took {
					t.Errorf("%v after %v, want %v after %v", a.err, took, c.want, c.took)
				}
				s.stop()
			})
		})
	}
}

// A device that cannot be prepared is left alone for a while, and the request gets another one.
func TestADeviceThatCannotBePrepared(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newFake(t, 2)
		var tried []string
		m.start = func(_ context.Context, ids []string) error {
			tried = append(tried, ids...)
			if ids[0] == "d0" {
				return errors.New("it is in use")
			}
			return nil
		}
		begin := time.Now()
		s := run(t, m)
		a := s.ask(1)
		<-a.done
		if a.err != nil || a.Devices[0] != "d1" || strings.Join(tried, " ") != "d0 d1" || time.Since(begin) > time.Second {
			t.Errorf("got %v, %v; tried %v; after %v", a.Devices, a.err, tried, time.Since(begin))
		}
		s.stop()
	})
}

// While none can be prepared, a request keeps its place, knows why it waits, and each device is tried again at times.
func TestNoDeviceCanBePrepared(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newFake(t, 2)
		begin := time.Now()
		var failures atomic.Int64
		m.start = func(context.Context, []string) error {
			if time.Since(begin) < 25*time.Second {
				failures.Add(1)
				return errors.New("it is\nin use")
			}
			return nil
		}
		s := run(t, m)
		a := s.ask(1)
		time.Sleep(5 * time.Second)
		late := s.ask(1)
		synctest.Wait()
		if got, want := a.reason(), "; d1 is left out: it is; in use"; !strings.HasSuffix(got, want) {
			t.Errorf("it waits since %q, want %q", got, want)
		}
		<-a.done
		if took := time.Since(begin); a.err != nil || took != 3*refusalTime || failures.Load() != 6 {
			t.Errorf("%v, after %v and %d failures", a.err, took, failures.Load())
		}
		s.granted(late)
		s.stop()
	})
}

// What a plugin says against devices is shown without the calls by which it came.
func TestReasonOfAPlugin(t *testing.T) {
	t.Parallel()
	m := newFake(t, 1)
	refused := &endpoint.PluginError{
		Code: codes.FailedPrecondition, Message: "process 7\nuses d0" + strings.Repeat("\x1b", 3000),
	}
	m.start = func(context.Context, []string) error { return fmt.Errorf("start container: try again: %w", refused) }
	s := run(t, m)
	a := s.ask(1)
	want := "process 7; uses d0\ufffd"
	isShown := func(text string) bool {
		return strings.Contains(text, want) && strings.HasSuffix(text, "...") && len(text) < 2*maxReason &&
			text == printable(text)
	}
	s.until("the request waits for this reason", func() bool {
		return strings.HasPrefix(a.reason(), "0 of 1 device that would do is free; d0 is left out: process 7") &&
			isShown(a.reason())
	})
	if _, _, busy := s.List(); len(busy) != 1 || !isShown(busy[0].Reason) || !strings.HasPrefix(busy[0].Reason, want) {
		t.Errorf("the list says: %+v", busy)
	}
	if log := s.log.String(); !strings.Contains(log, `"devices cannot be leased now: process 7; uses d0`) {
		t.Errorf("the log says:\n%s", log)
	}
	a.give()
	<-a.done
}

// A device that something uses without a lease is shown with what uses it, and is given only to requests that take busy
// devices or name it. When the use ends, the request that waits gets it.
func TestADeviceThatIsInUseWithoutALease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newFake(t, 2)
		m.devices[1].Health = manager.Unhealthy // for another reason
		s := run(t, m)
		m.use(0, "process 7 uses it")
		if _, _, busy := s.List(); len(busy) != 1 || busy[0].Device != "d0" || busy[0].Reason != "process 7 uses it" {
			t.Errorf("busy are %+v", busy)
		}
		a := s.ask(1)
		synctest.Wait()
		if want := "0 of 1 device that would do is free; d0 is left out: process 7 uses it"; a.reason() != want {
			t.Errorf("it waits since %q, want %q", a.reason(), want)
		}
		by := model.Caller{PID: os.Getpid()}
		for name, r := range map[string]Request{
			"who takes busy devices":  {Count: 1, AllowBusy: true},
			"the process that has it": {Count: 1, Devices: []string{"d0"}},
		} {
			ask := s.askAs(Ask{Request: r, By: by, Timed: true, For: time.Minute})
			s.granted(ask)
			if _, _, busy := s.List(); ask.Devices[0] != "d0" || len(busy) > 0 {
				t.Errorf("%s gets %v, and busy are %+v", name, ask.Devices, busy)
			}
			s.until("the lease can be ended", func() bool { return s.End(ask.ID, by) == nil })
			s.until("the lease has ended", func() bool { return m.held() == "" })
		}
		broken := s.askAs(Ask{Request: Request{Count: 1, Devices: []string{"d1"}}, By: by})
		synctest.Wait()
		broken.give()
		if <-broken.done; broken.err == nil {
			t.Errorf("the broken device is given: %v", broken.Devices)
		}
		m.use(0, "")
		if got := s.granted(a); got != "d0" {
			t.Errorf("after the use %s is given", got)
		}
		s.stop()
	})
}

// A request for all devices, one of which can never be prepared, does not keep the others from later requests.
func TestARequestThatNeverGetsItsDevicesLetsOthersPass(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newFake(t, 3)
		m.start = func(_ context.Context, ids []string) error {
			if ids[0] == "d0" {
				return errors.New("it is in use")
			}
			return nil
		}
		begin := time.Now()
		s := run(t, m)
		all := s.ask(3)
		late := s.ask(1)
		<-late.done
		if took := time.Since(begin); late.err != nil || late.Devices[0] != "d1" || took > 2*refusalTime {
			t.Errorf("the later request: %v, %v after %v", late.Devices, late.err, took)
		}
		if _, waiting, _ := s.List(); len(waiting) != 1 || waiting[0].Position != 1 || waiting[0].Reason != "it is in use" {
			t.Errorf("the first one waits: %+v", waiting)
		}
		all.give()
		<-all.done
		s.stop()
	})
}

// What one plugin refuses, another one's device of the same ID is not left out for, nor does it count as held.
func TestTwoPluginsListOneID(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newFake(t, 1)
		m.twins = slices.Clone(m.devices)
		fails := true
		m.start = func(context.Context, []string) error {
			if fails {
				return errors.New("boom")
			}
			return nil
		}
		s := run(t, m)
		ask := func(resource string) *asked {
			return s.askAs(Ask{Request: Request{Count: 1, Resource: resource}, By: model.Caller{PID: os.Getpid()}})
		}
		evil := ask(twinResource)
		synctest.Wait()
		if _, _, busy := s.List(); len(busy) != 1 || busy[0].Resource != twinResource || busy[0].Device != "d0" {
			t.Errorf("left out are %+v, want d0 of %s", busy, twinResource)
		}
		fails = false
		begin := time.Now()
		other := ask(resource)
		<-other.done
		if took := time.Since(begin); other.err != nil || took > 0 {
			t.Errorf("the other one's device: %v after %v", other.err, took)
		}
		if want := "0 of 1 device that would do is free; d0 is left out: boom"; evil.reason() != want {
			t.Errorf("the first request waits since %q, want %q", evil.reason(), want)
		}
		evil.give()
		<-evil.done
		s.stop()
	})
}

// Devices that the manager cannot place are told from those that it can.
func TestADeviceThatCannotBeAllocated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newFake(t, 4)
		m.lease = func(among []string) error {
			if among[0] == "d0" { // the fake chooses the first
				return errors.New("Allocate failed")
			}
			return nil
		}
		begin := time.Now()
		s := run(t, m)
		a := s.ask(2)
		<-a.done
		if got := strings.Join(a.Devices, " "); a.err != nil || got != "d2 d3" || time.Since(begin) > time.Second {
			t.Errorf("got %q, %v after %v", got, a.err, time.Since(begin))
		}
		s.stop()
	})
}

// A request that takes devices in use too is not tried again at once when it fails, and keeps nothing from the others.
func TestARequestForBusyDevicesFails(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(*fake, func() error){
		"as they are chosen":   func(m *fake, f func() error) { m.lease = func([]string) error { return f() } },
		"as they are prepared": func(m *fake, f func() error) { m.options = f },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newFake(t, 2)
				begin := time.Now()
				var failures atomic.Int64
				fail(m, func() error {
					if time.Since(begin) < 15*time.Second {
						failures.Add(1)
						return errors.New("it cannot be done")
					}
					return nil
				})
				s := run(t, m)
				a := s.askAs(Ask{
					Request: Request{Count: 1, AllowBusy: true}, By: model.Caller{UID: os.Getuid(), PID: os.Getpid()},
				})
				<-a.done
				if took := time.Since(begin); a.err != nil || took != 2*refusalTime || failures.Load() > 3 {
					t.Errorf("%v after %v and %d failures", a.err, took, failures.Load())
				}
				if a.reason() != "it cannot be done" {
					t.Errorf("it waited since %q", a.reason())
				}
				s.stop()
			})
		})
	}
}

// Who ends before an earlier request can be met may pass it, and cannot stay for longer then.
func TestALeaseThatPassesOthers(t *testing.T) {
	t.Parallel()
	m := newFake(t, 2)
	m.hold(0, model.Lease{Process: model.Process{Boot: boot}, Ends: sinceBoot() + time.Hour}, os.Getuid())
	s := run(t, m)
	first := s.ask(2)
	s.until("the first waits", func() bool { return first.reason() != "" })
	name := UserName(os.Getuid())
	if got, want := first.reason(), "1 of 2 devices that would do is free: user "+name+" has 1; enough will be by "+
		clockTime(time.Now(), time.Hour+s.o.Grace)[:1]; !strings.HasPrefix(got, want) {
		t.Errorf("the reason is %q, want %q", got, want)
	}
	timed := func(limit time.Duration) *asked {
		c := sleeper(t, os.Getuid())
		ask := c.ask(1)
		ask.For = limit
		return s.askAs(ask)
	}
	long := timed(2 * time.Hour)
	short := timed(time.Minute)
	s.granted(short)
	if long.reason() == "" || first.reason() == "" {
		t.Error("one of the others does not wait")
	}
	err := s.Extend(t.Context(), short.ID, model.Caller{UID: os.Getuid()}, 2*time.Minute)
	if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "passed others") {
		t.Errorf("extended: %v", err)
	}
	first.give()
	long.give()
}

// A lease without a process ends with its time, which can be extended, or when someone ends it. It outlives
// the manager.
func TestALeaseWithoutAProcess(t *testing.T) {
	t.Parallel()
	caller := model.Caller{UID: other, PID: sleeper(t, other).Process.Pid}
	timed := func(limit time.Duration) Ask {
		return Ask{Request: Request{Count: 1}, Timed: true, For: limit, By: caller}
	}
	owner := model.Caller{UID: other}
	t.Run("its time is over", func(t *testing.T) {
		t.Parallel()
		s := run(t, newFake(t, 1))
		begin := sinceBoot()
		s.granted(s.askAs(timed(300 * time.Millisecond)))
		s.free()
		if took := sinceBoot() - begin; took < 300*time.Millisecond {
			t.Errorf("it ended after %v", took)
		}
	})
	t.Run("it is extended", func(t *testing.T) {
		t.Parallel()
		s := run(t, newFake(t, 1))
		begin := sinceBoot()
		a := s.askAs(timed(200 * time.Millisecond))
		s.granted(a)
		testenv.Must(t, s.Extend(t.Context(), a.ID, owner, time.Second))
		for by, want := range map[int]error{other: ErrInvalid, other + 1: ErrNotYours} {
			err := s.Extend(t.Context(), a.ID, model.Caller{UID: by}, time.Millisecond)
			if !errors.Is(err, want) {
				t.Errorf("made shorter by %d: %v", by, err)
			}
		}
		s.free()
		if took := sinceBoot() - begin; took < time.Second {
			t.Errorf("it ended after %v", took)
		}
		if err := s.Extend(t.Context(), a.ID, owner, time.Hour); !errors.Is(err, ErrNotFound) {
			t.Errorf("extended after its end: %v", err)
		}
	})
	t.Run("it is ended, after a restart of the manager", func(t *testing.T) {
		t.Parallel()
		m := newFake(t, 1)
		s := run(t, m)
		a := s.askAs(timed(time.Hour))
		s.granted(a)
		s.stop()
		s = run(t, m)
		s.until("it is found again", func() bool { return errors.Is(s.End(a.ID, model.Caller{UID: 1}), ErrNotYours) })
		s.until("it can be ended", func() bool { return s.End(a.ID, owner) == nil })
		s.free()
	})
	t.Run("its time was over while the manager was away, or it was of another boot", func(t *testing.T) {
		t.Parallel()
		m := newFake(t, 2)
		m.hold(0, model.Lease{Process: model.Process{Boot: boot}, Ends: 1}, other)
		m.hold(1, model.Lease{Process: model.Process{Boot: "another"}, Ends: sinceBoot() + time.Hour}, other)
		run(t, m).free()
	})
	for name, ask := range map[string]Ask{
		"no time":              timed(0),
		"less than no time":    timed(-1),
		"a process too":        {Request: Request{Count: 1}, Timed: true, For: 1, PID: 1},
		"a process without ID": {Request: Request{Count: 1}, PID: -1},
	} {
		if err := New(Options{}).Acquire(t.Context(), ask, nil, nil); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A user has leases for his own processes, and root for any.
func TestALeaseForAnotherProcess(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	for name, c := range map[string]struct {
		owner, by int
		want      error
	}{
		"his own":             {other, other, nil},
		"another user's":      {other + 1, other, ErrNotYours},
		"root's":              {0, other, ErrNotYours},
		"any user's, by root": {other, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := run(t, newFake(t, 1))
			child := sleeper(t, c.owner)
			ask := Ask{
				Request: Request{Count: 1}, PID: child.Process.Pid,
				By: model.Caller{UID: c.by, PID: sleeper(t, c.by).Process.Pid},
			}
			given := func(Granted) error { return nil }
			if err := s.Acquire(t.Context(), ask, func(Waiting) {}, given); !errors.Is(err, c.want) {
				t.Fatal(err)
			}
			testenv.Must(t, child.Process.Kill())
			s.free()
		})
	}
}

// On a full disk requests wait, and devices are given back as soon as that can be written.
func TestAFullDisk(t *testing.T) {
	t.Parallel()
	full := fmt.Errorf("write the placements: no space left: %w", manager.ErrRetry)
	t.Run("at the begin of a lease", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newFake(t, 2)
			begin := time.Now()
			m.lease = func([]string) error {
				if time.Since(begin) < 15*time.Second {
					return full
				}
				return nil
			}
			s := run(t, m)
			a := s.ask(1)
			<-a.done
			if took := time.Since(begin); a.err != nil || took != 15*time.Second {
				t.Errorf("%v after %v", a.err, took)
			}
			if !strings.Contains(a.reason(), "no space left") {
				t.Errorf("it waited since %q", a.reason())
			}
			s.stop()
		})
	})
	t.Run("when the devices of a caller that has gone could not be prepared", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newFake(t, 1)
			begin := time.Now()
			m.start = func(context.Context, []string) error { return errors.New("it is in use") }
			m.release = func(string) error {
				if time.Since(begin) < 5*time.Second {
					return full
				}
				return nil
			}
			s := run(t, m)
			a := s.ask(1)
			time.Sleep(time.Second)
			a.give()
			<-a.done
			time.Sleep(10 * time.Second)
			if m.held() != "" {
				t.Error("the device is never given back")
			}
			s.stop()
		})
	})
	t.Run("at the end of a lease", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newFake(t, 1)
			m.hold(0, model.Lease{Process: model.Process{PID: 1, Start: 1, Boot: "another"}}, 0)
			var tries atomic.Int64
			m.release = func(string) error {
				if tries.Add(1) < 4 {
					return full
				}
				return nil
			}
			begin := time.Now()
			s := run(t, m)
			a := s.ask(1)
			<-a.done
			if took := time.Since(begin); a.err != nil || took != 3*retryTime {
				t.Errorf("%v after %v", a.err, took)
			}
			if n := strings.Count(s.log.String(), "cannot be given back yet"); n != 1 {
				t.Errorf("the log says so %d times", n)
			}
			s.stop()
		})
	})
	t.Run("when a caller has gone while its devices were chosen, others are served", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			m := newFake(t, 2)
			chooses, choose := make(chan bool, 1), make(chan bool)
			m.lease = func([]string) error {
				chooses <- true
				<-choose
				return nil
			}
			m.release = func(string) error { return full }
			s := run(t, m)
			a := s.ask(1)
			<-chooses
			a.give()
			<-a.done
			close(choose)
			late := s.ask(1)
			<-late.done
			if late.err != nil {
				t.Error(late.err)
			}
			s.stop()
		})
	})
}

// The service watches again when it has missed changes, and ends at once while it waits for that.
func TestTheServiceMissesChanges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newFake(t, 1)
		m.devices[0].Health = manager.Unhealthy
		s := run(t, m)
		a := s.ask(1)
		synctest.Wait()
		m.mu.Lock()
		close(m.watchers[0])
		m.watchers = nil
		m.devices[0].Health = manager.Healthy
		m.mu.Unlock()
		<-a.done
		if a.err != nil {
			t.Error(a.err)
		}
		s.stop()
	})
	synctest.Test(t, func(t *testing.T) {
		m := newFake(t, 1)
		s := run(t, m)
		synctest.Wait()
		m.mu.Lock()
		close(m.watchers[0])
		m.watchers = nil
		m.mu.Unlock()
		synctest.Wait()
		begin := time.Now()
		s.stop()
		if took := time.Since(begin); took > 0 {
			t.Errorf("it ended after %v", took)
		}
	})
}

// A request that the host could meet fails when it no longer can.
func TestDevicesGoWhileARequestWaits(t *testing.T) {
	t.Parallel()
	m := newFake(t, 2)
	s := run(t, m)
	s.granted(s.ask(1))
	a := s.ask(2)
	m.mu.Lock()
	m.devices = m.devices[:1]
	m.changed()
	m.mu.Unlock()
	<-a.done
	if !errors.Is(a.err, ErrImpossible) {
		t.Error(a.err)
	}
}

// 200 callers at once, which end at random times and ways, never share a device, and all get their turn.
func TestManyCallers(t *testing.T) {
	t.Parallel()
	m := newFake(t, 8)
	s := run(t, m)
	var callers sync.WaitGroup
	var granted atomic.Int64
	for i := range 200 {
		random := rand.New(rand.NewPCG(uint64(i), 0))
		callers.Go(func() {
			c := sleeper(t, os.Getuid())
			kill := func() { _ = c.Process.Kill() }
			ask := c.ask(1 + random.IntN(4))
			ask.Confine = true // it starts no containers, which would be looked for
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			after := time.Duration(random.IntN(1000)) * time.Millisecond
			switch random.IntN(8) {
			case 0: // it gives up
				time.AfterFunc(after, cancel)
			case 1: // it ends, and its connection stays
				time.AfterFunc(after, kill)
			}
			var g Granted
			err := s.Acquire(ctx, ask, func(Waiting) {}, func(given Granted) error {
				g = given
				return nil
			})
			switch {
			case err == nil && len(g.Devices) == ask.Count:
				granted.Add(1)
				time.Sleep(after / 20)
			case !errors.Is(err, context.Canceled) && !errors.Is(err, proc.ErrEnded):
				t.Errorf("%v: %v", g.Devices, err)
			}
			kill()
			_ = c.Wait()
		})
	}
	callers.Wait()
	s.free()
	if granted.Load() < 120 {
		t.Errorf("only %d got devices", granted.Load())
	}
}

// While a lease for another process or for a time is prepared, its process is the caller: if he is gone, nobody knows
// of the lease.
func TestALeaseIsTheCallersUntilItIsGranted(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	holder := sleeper(t, other)
	for name, ask := range map[string]Ask{
		"for another process": {PID: holder.Process.Pid},
		"for a time":          {Timed: true, For: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newFake(t, 1)
			caller := sleeper(t, other)
			record := func() model.Process { return m.Pods()[0].Lease.Process }
			m.start = func(context.Context, []string) error {
				if record().PID != caller.Process.Pid {
					t.Errorf("while it is prepared, the record has %+v", record())
				}
				return nil
			}
			s := run(t, m)
			ask.Request, ask.By = Request{Count: 1}, model.Caller{UID: other, PID: caller.Process.Pid}
			s.granted(s.askAs(ask))
			if record().PID != ask.PID || record().Boot != boot {
				t.Errorf("then it has %+v", record())
			}
		})
	}
}

func TestALeaseThatCannotBeHandedOver(t *testing.T) {
	t.Parallel()
	s := run(t, newFake(t, 1))
	gone := errors.New("the client has gone")
	ask := Ask{Request: Request{Count: 1}, By: model.Caller{UID: os.Getuid(), PID: os.Getpid()}}
	err := s.Acquire(t.Context(), ask, func(Waiting) {}, func(Granted) error { return gone })
	if !errors.Is(err, gone) {
		t.Errorf("%v, want %v", err, gone)
	}
	s.free()
}

// One device of three cannot be prepared. Who wants two gets the others at once.
func TestOneDeviceOfSeveralCannotBePrepared(t *testing.T) {
	t.Parallel()
	m := newFake(t, 3)
	m.start = func(_ context.Context, ids []string) error {
		if slices.Contains(ids, "d0") {
			return errors.New("d0 is not ready for a container (check): process 7 uses it")
		}
		return nil
	}
	s := run(t, m)
	a := s.ask(2)
	<-a.done
	if a.err != nil || slices.Contains(a.Devices, "d0") {
		t.Errorf("%v, %v", a.Devices, a.err)
	}
}

// Each device that a plugin's error names is left out, however long the error is, and no other one.
func TestWhichDevicesAnErrorNames(t *testing.T) {
	t.Parallel()
	ids := []string{"d0", "d1", "d10", "d2", "d3"}
	const long = " is not ready for a container (check): process 7 (" // and where it is
	for name, c := range map[string]struct {
		text string
		want string
	}{
		"one":                    {"d1 is not ready for a container: it is", "d1"},
		"a shared one":           {"d1::3 is not ready for a container: it is", "d1"},
		"one with a longer name": {"d10 is not ready for a container: it is", "d10"},
		"more than are shown": {
			"d0" + long + strings.Repeat("x", 2000) + ")\nd2" + long + strings.Repeat("x", 2000) + ")\nd3" + long + ")",
			"d0 d2 d3",
		},
		"one, and a cgroup that is named like another": {"d1" + long + "in /user.slice/d2 is not ready/d3::1)", "d1"},
		"none": {"allocate: the device plugin ends, with d1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			refused := &endpoint.PluginError{Code: codes.FailedPrecondition, Message: c.text}
			err := fmt.Errorf("start container main: %w", refused)
			var got []string
			for _, id := range ids {
				if names(err, id) {
					got = append(got, id)
				}
			}
			if got := strings.Join(got, " "); got != c.want {
				t.Errorf("it names %q, want %q", got, c.want)
			}
		})
	}
}

// A request for all devices fails again and again, since one cannot be prepared. The others can be had meanwhile.
func TestARequestThatFailsHoldsBackNobody(t *testing.T) {
	t.Parallel()
	m := newFake(t, 3)
	m.start = func(_ context.Context, ids []string) error {
		if slices.Contains(ids, "d0") {
			return errors.New("d0 is not ready for a container (check): process 7 uses it")
		}
		return nil
	}
	s := run(t, m)
	all := s.ask(3)
	s.until("the first one waits", func() bool { return strings.Contains(all.reason(), "process 7 uses it") })
	two := s.ask(2)
	<-two.done
	if two.err != nil || len(two.Devices) != 2 {
		t.Errorf("%v, %v", two.Devices, two.err)
	}
	all.give()
	<-all.done
}

func TestWhatThePluginRefusesForGood(t *testing.T) {
	t.Parallel()
	m := newFake(t, 3)
	m.lease = func([]string) error { return status.Error(codes.InvalidArgument, "more than one replica") }
	s := run(t, m)
	a := s.ask(2)
	<-a.done
	if !errors.Is(a.err, ErrImpossible) || !strings.Contains(a.err.Error(), "more than one replica") {
		t.Errorf("%v", a.err)
	}
	m.lease = func([]string) error { return nil }
	s.granted(s.ask(3)) // no device is left alone
}
