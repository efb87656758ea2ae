package pluginsocket

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/test/lib/testenv"
)

// newSocket returns a Socket that is not made yet, and its log.
func newSocket(dir string, beside bool) (*Socket, *testenv.Log) {
	log := &testenv.Log{}
	return New(Options{
		Path: filepath.Join(dir, "s"), Second: filepath.Join(dir, "s2"), Beside: beside,
		Server: grpc.NewServer(), Log: slog.New(slog.NewTextHandler(log, nil)),
	}), log
}

// open returns a Socket that serves until the test ends.
func open(t *testing.T, dir string) (*Socket, *testenv.Log) {
	t.Helper()
	s, log := newSocket(dir, false)
	testenv.Must(t, s.Maintain(t.Context()))
	t.Cleanup(func() { testenv.Must(t, s.Close(time.Minute)) })
	return s, log
}

// mustServe checks that a gRPC server serves the socket at the path.
func mustServe(t *testing.T, path string) {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(t, err)
	defer conn.Close()
	err = conn.Invoke(t.Context(), "/service/Method", &emptypb.Empty{}, &emptypb.Empty{})
	if status.Code(err) != codes.Unimplemented {
		t.Errorf("a call on %s: %v", path, err)
	}
}

func mustHave(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	testenv.Must(t, err)
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("in the directory (-want +got):\n%s", diff)
	}
}

func TestASocketAndItsLockAreRestored(t *testing.T) {
	for name, c := range map[string]struct {
		disturb func(t *testing.T, s *Socket)
		logged  int
	}{
		"nothing happened": {func(*testing.T, *Socket) {}, 0},
		"the lock was removed": {func(t *testing.T, s *Socket) {
			testenv.Must(t, os.Remove(lockPath(s.Path())))
		}, 0},
		"a kubelet removed all files": {func(t *testing.T, s *Socket) {
			testenv.Must(t, os.Remove(lockPath(s.Path())), os.Remove(s.Path()))
		}, 1},
		"another program's socket is there": {func(t *testing.T, s *Socket) {
			other := s.Path() + ".other"
			leaveSocket(t, other)
			testenv.Must(t, os.Rename(other, s.Path()))
		}, 1},
		"the server ended": {func(t *testing.T, s *Socket) {
			testenv.Must(t, s.current.Close()) // as gRPC's server does after an error such as a lack of memory
			<-s.Ended
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s, log := open(t, dir)
			c.disturb(t, s)
			testenv.Must(t, s.Maintain(t.Context()))
			mustServe(t, s.Path())
			if got := strings.Count(log.String(), "is restored: it was removed or closed"); got != c.logged {
				t.Errorf("it is logged %d times, want %d:\n%s", got, c.logged, log)
			}
			mustHave(t, dir, ".s.lock", "s")
		})
	}
}

// leaveSocket leaves a socket on which no process listens.
func leaveSocket(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	testenv.Must(t, err)
	l.SetUnlinkOnClose(false)
	testenv.Must(t, l.Close())
}

// If two had the lock, they would take the kubelet's connection from each other.
func TestAnInstanceThatLosesItsLock(t *testing.T) {
	dir := t.TempDir()
	s, _ := newSocket(dir, false)
	testenv.Must(t, s.Maintain(t.Context()), os.Remove(lockPath(s.Path())))
	other, err := fileio.AcquireLock(lockPath(s.Path()))
	testenv.Must(t, err)
	if err := s.Maintain(t.Context()); !errors.Is(err, fileio.ErrHeld) {
		t.Errorf("%v, want %v", err, fileio.ErrHeld)
	}
	testenv.Must(t, s.Close(time.Minute))
	mustHave(t, dir, ".s.lock")
	testenv.Must(t, other.Release())
}

// The next instance has the path that the last one left.
func TestInstancesBesideEachOther(t *testing.T) {
	dir := t.TempDir()
	old, _ := newSocket(dir, true)
	testenv.Must(t, old.Maintain(t.Context()))
	alone, _ := newSocket(dir, false)
	if err := alone.Maintain(t.Context()); !errors.Is(err, fileio.ErrHeld) {
		t.Errorf("an instance that is not to be beside another: %v, want %v", err, fileio.ErrHeld)
	}
	for _, name := range []string{"s2", "s"} {
		next, _ := newSocket(dir, true)
		testenv.Must(t, next.Maintain(t.Context()))
		if got := filepath.Base(next.Path()); got != name {
			t.Errorf("the next socket is %s, want %s", got, name)
		}
		mustHave(t, dir, ".s.lock", ".s2.lock", "s", "s2")
		mustServe(t, old.Path())
		mustServe(t, next.Path())
		third, _ := newSocket(dir, true)
		if err := third.Maintain(t.Context()); !errors.Is(err, fileio.ErrHeld) {
			t.Errorf("a third instance: %v, want %v", err, fileio.ErrHeld)
		}
		testenv.Must(t, third.Close(time.Minute))
		if !next.OtherServes() {
			t.Error("the old instance does not serve")
		}
		testenv.Must(t, old.Close(time.Minute))
		if next.OtherServes() {
			t.Error("an instance that has ended serves")
		}
		mustHave(t, dir, "."+name+".lock", name)
		old = next
	}
	testenv.Must(t, old.Close(time.Minute))
	mustHave(t, dir)
}

// A kubelet that dials a socket which is gone fails, so its open connections are served on.
func TestConnectionsOutliveTheSocket(t *testing.T) {
	conns := &Connections{Closed: wake.New()}
	log := &testenv.Log{}
	s := New(Options{
		Path: filepath.Join(t.TempDir(), "s"), Server: grpc.NewServer(grpc.StatsHandler(conns)),
		Log: slog.New(slog.NewTextHandler(log, nil)),
	})
	testenv.Must(t, s.Maintain(t.Context()))
	conn, err := grpc.NewClient("unix:"+s.Path(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(t, err)
	defer conn.Close()
	call := func() codes.Code {
		return status.Code(conn.Invoke(t.Context(), "/service/Method", &emptypb.Empty{}, &emptypb.Empty{}))
	}
	if got := call(); got != codes.Unimplemented || !conns.Open() || conns.Lost() {
		t.Fatalf("a call: %v; a connection is open: %t, lost: %t", got, conns.Open(), conns.Lost())
	}
	s.Remove()
	s.Remove() // again
	mustHave(t, filepath.Dir(s.Path()), ".s.lock")
	if got := call(); got != codes.Unimplemented || !conns.Open() {
		t.Errorf("a call without the socket: %v; a connection is open: %t", got, conns.Open())
	}
	testenv.Must(t, conn.Close())
	<-conns.Closed
	if conns.Open() || !conns.Lost() {
		t.Errorf("a connection is open: %t, lost: %t", conns.Open(), conns.Lost())
	}
	if conns.Forget(); conns.Lost() {
		t.Error("a connection is lost that was forgotten")
	}
	testenv.Must(t, s.Close(time.Minute))
	mustHave(t, filepath.Dir(s.Path()))
	if log.String() != "" {
		t.Errorf("it is logged: %s", log)
	}
}

func TestAFileAtThePathIsKept(t *testing.T) {
	dir := t.TempDir()
	s, _ := newSocket(dir, false)
	testenv.Must(t, os.WriteFile(s.Path(), nil, 0o600))
	for range 2 {
		if err := s.Maintain(t.Context()); err == nil || !strings.Contains(err.Error(), "is not a socket: remove it") {
			t.Error(err)
		}
	}
	testenv.Must(t, s.Close(time.Minute))
	mustHave(t, dir, "s")
}

func TestASocketCanBeMadeWhenItsDirectoryExists(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "later")
	s, log := newSocket(dir, false)
	if err := s.Maintain(t.Context()); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	testenv.Must(t, os.Mkdir(dir, 0o700), s.Maintain(t.Context()))
	mustServe(t, s.Path())
	testenv.Must(t, s.Close(time.Minute))
	if log.String() != "" {
		t.Errorf("it is logged: %s", log)
	}
}

func TestASocketOfAnotherProgramIsNotTakenForOurs(t *testing.T) {
	s, _ := open(t, t.TempDir())
	path := s.Path()
	if !s.inPlace() {
		t.Error("our socket is not in its place")
	}
	testenv.Must(t, os.Rename(path, path+".away"))
	if s.inPlace() {
		t.Error("a socket that was moved away is in its place")
	}
	leaveSocket(t, path)
	if s.inPlace() {
		t.Error("another program's socket is in the place of ours, and is taken for it")
	}
	testenv.Must(t, os.Rename(path+".away", path))
	if !s.inPlace() {
		t.Error("our socket is back and not in its place")
	}
}

// A kubelet that starts may remove a socket that has just been made. The next call of Maintain finds that out.
func TestASocketThatIsRemovedAtOnceIsNotInPlace(t *testing.T) {
	s, _ := open(t, t.TempDir())
	var removing sync.WaitGroup
	done := make(chan struct{})
	removing.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
				_ = os.Remove(s.Path())
			}
		}
	})
	for range 300 {
		testenv.Must(t, s.Renew(t.Context()))
		testenv.Eventually(t, "the socket is removed", func() bool { return !s.inPlace() })
	}
	close(done)
	removing.Wait()
}

func TestWhatAKilledInstanceHasLeft(t *testing.T) {
	for name, c := range map[string]struct {
		first  bool // whether it had the first path
		socket bool // whether it had made its socket
		young  bool // whether its files are so young that it may be about to lock them
	}{
		"a new one":                   {socket: true},
		"a new one before its socket": {},
		"the old one":                 {first: true, socket: true},
		"one that has just begun":     {socket: true, young: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			left, own := filepath.Join(dir, "s2"), "s"
			if c.first {
				left, own = filepath.Join(dir, "s"), "s2"
			}
			other, err := fileio.AcquireLock(lockPath(left))
			testenv.Must(t, err)
			made := func(at time.Time) {
				testenv.Must(t, os.Chtimes(lockPath(left), at, at))
				if c.socket {
					testenv.Must(t, os.Chtimes(left, at, at))
				}
			}
			if c.socket {
				leaveSocket(t, left)
			}
			made(time.Now().Add(-settled))
			s, log := newSocket(dir, c.first)
			testenv.Must(t, s.Maintain(t.Context()))
			if _, err := os.Lstat(lockPath(left)); err != nil {
				t.Errorf("the lock of an instance that runs: %v", err)
			}
			testenv.Must(t, other.File().Close()) // as when it is killed: the files stay
			if c.young {
				made(time.Now())
			}
			testenv.Must(t, s.Maintain(t.Context()))
			if _, err := os.Lstat(lockPath(left)); (err == nil) != c.young {
				t.Errorf("the lock that is left: %v", err)
			}
			if !c.young {
				mustHave(t, dir, "."+own+".lock", own)
			}
			testenv.Must(t, s.Close(time.Minute))
			mustHave(t, dir)
			want := "the socket " + left + " is removed: the instance that made it was killed"
			if strings.Count(log.String(), want) != 1 {
				t.Errorf("want one line %q:\n%s", want, log)
			}
		})
	}
}

// Each attempt changes the directory, and so wakes a door that watches it.
func TestWhatCannotBeRemovedIsTriedOnce(t *testing.T) {
	s, log := newSocket(t.TempDir(), false)
	testenv.Must(t, os.WriteFile(s.other(), nil, 0o600), os.Chtimes(s.other(), time.Time{}, time.Now().Add(-settled)))
	for range 3 {
		testenv.Must(t, s.Maintain(t.Context()))
	}
	testenv.Must(t, s.Close(time.Minute))
	if got := strings.Count(log.String(), "of an instance that has ended cannot be removed"); got != 1 {
		t.Errorf("it is logged %d times, want once:\n%s", got, log)
	}
	if _, err := os.Lstat(lockPath(s.other())); err == nil {
		t.Error("a lock is left")
	}
}
