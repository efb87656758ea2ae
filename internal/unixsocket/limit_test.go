package unixsocket

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// listenToAll makes a socket for all users. Others cannot reach it by its path, only from the working directory.
func listenToAll(t *testing.T, maxConnections int) *HTTPListener {
	t.Helper()
	testenv.Root(t)
	dir := t.TempDir()
	t.Chdir(dir)
	l, err := ListenHTTP(t.Context(), HTTPOptions{
		Path: filepath.Join(dir, "s"), LockPath: filepath.Join(dir, "lock"), Group: OwnerOnly, MaxConnections: maxConnections,
	})
	testenv.Must(t, err, os.Chmod(dir, 0o755), os.Chmod(filepath.Join(dir, "s"), 0o666))
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// connectAs connects as a user: a thread has a user of its own for the kernel.
func connectAs(t *testing.T, uid int) net.Conn {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	testenv.Must(t, err)
	connected := make(chan error)
	go func() {
		runtime.LockOSThread() // it stays locked, so that the thread ends with this goroutine
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); e != 0 {
			connected <- e
			return
		}
		connected <- unix.Connect(fd, &unix.SockaddrUnix{Name: "s"})
	}()
	testenv.Must(t, <-connected)
	f := os.NewFile(uintptr(fd), "s")
	defer f.Close()
	c, err := net.FileConn(f)
	testenv.Must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// count returns how many connections count.
func (l *limited) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.others)
	for _, own := range l.own {
		n += own
	}
	return n
}

// With 8 connections each user has a part of two, and the users from 100 on are one user.
func TestTheLimitsOfUsers(t *testing.T) {
	for name, c := range map[string]struct {
		users   []int
		refused []int // indexes of users
		closed  []int // those whose connection is given to another user later
	}{
		"one user above his part, and others": {users: []int{1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 0}, refused: []int{2, 3, 9}},
		"root has them all":                   {users: []int{0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1}, refused: []int{8, 11}},
		"many users have them all, and root": {
			users: []int{1, 1, 2, 2, 3, 3, 4, 4, 4, 0, 0, 0, 0, 0}, refused: []int{8},
		},
		"who has none gets one of who has most": {
			users: []int{1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 5}, refused: []int{10}, closed: []int{1, 3},
		},
		"all have as many":              {users: []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 1}, refused: []int{8, 9}},
		"the subordinate IDs of a user": {users: []int{100, 101, 102, 103, 1}, refused: []int{2, 3}},
	} {
		t.Run(name, func(t *testing.T) {
			l := listenToAll(t, 8)
			l.socket.(*limited).account = func(uid uint32) uint32 { return min(uid, 100) }
			accepted := make(chan net.Conn, len(c.users))
			go func() {
				defer close(accepted)
				for {
					conn, err := l.Socket().Accept()
					if err != nil {
						return
					}
					_, _ = conn.Write([]byte("x"))
					accepted <- conn
				}
			}()
			for range 2 { // the connections of the first time do not count the second time
				var refused []int
				clients := map[int]net.Conn{}
				for i, uid := range c.users {
					clients[i] = connectAs(t, uid)
					if _, err := clients[i].Read(make([]byte, 1)); errors.Is(err, io.EOF) {
						refused = append(refused, i)
						delete(clients, i)
					} else if err != nil {
						t.Fatal(err)
					}
				}
				if !slices.Equal(refused, c.refused) {
					t.Errorf("refused: %v, want %v", refused, c.refused)
				}
				for i, client := range clients {
					_ = client.SetReadDeadline(time.Unix(1, 0))
					if slices.Contains(c.closed, i) {
						_ = client.SetReadDeadline(time.Now().Add(time.Minute))
					}
					_, err := client.Read(make([]byte, 1))
					if errors.Is(err, io.EOF) != slices.Contains(c.closed, i) {
						t.Errorf("connection %d: %v, and closed should be %v", i, err, c.closed)
					}
				}
				for range len(c.users) - len(refused) {
					conn := <-accepted
					_, _ = conn.Close(), conn.Close() // a second time does not count
				}
				if n := l.socket.(*limited).count(); n != 0 {
					t.Errorf("after the end %d connections count", n)
				}
			}
			testenv.Must(t, l.Close())
			<-accepted
		})
	}
}

// However a connection ends, it no longer counts. A client that sends nothing does not keep others away for long.
func TestConnectionsOfAServerEnd(t *testing.T) {
	l := listenToAll(t, 4)
	socket := l.socket.(*limited)
	hijacked := make(chan net.Conn, 1)
	handler := http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		switch q.URL.Path {
		case "/hijack":
			c, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
			}
			hijacked <- c
		case "/panic":
			panic(http.ErrAbortHandler)
		}
	})
	ctx, end := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Serve(ctx, handler, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() {
		end()
		testenv.Must(t, <-done)
	})
	noneCount := func() bool { return socket.count() == 0 }
	get := func(path string) func(*testing.T, net.Conn) {
		return func(t *testing.T, c net.Conn) {
			_, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: x\r\n\r\n")
			testenv.Must(t, err)
		}
	}
	for name, sends := range map[string]func(*testing.T, net.Conn){
		"after an answer": get("/"),
		"after a panic":   get("/panic"),
		"without a request": func(t *testing.T, _ net.Conn) {
			testenv.Eventually(t, "it counts", func() bool { return !noneCount() })
		},
		"by the client": func(t *testing.T, c net.Conn) {
			testenv.Eventually(t, "it counts", func() bool { return !noneCount() })
			_ = c.Close()
		},
		"in another server's hands": func(t *testing.T, c net.Conn) {
			get("/hijack")(t, c)
			given := <-hijacked
			if n := socket.count(); n != 1 {
				t.Errorf("%d connections count", n)
			}
			testenv.Must(t, given.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := connectAs(t, 1)
			sends(t, c)
			_ = c.SetReadDeadline(time.Now().Add(time.Minute))
			if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the server does not close it")
			}
			testenv.Eventually(t, "no connection counts", noneCount)
		})
	}
}

// Whenever the server closes a connection above the limits, before or after the client has sent its request, the
// client's error says so.
func TestTheErrorOfARefusedClient(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := ListenHTTP(t.Context(), HTTPOptions{
		Path: path, LockPath: path + ".lock", Group: OwnerOnly, MaxConnections: 0,
	})
	testenv.Must(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := l.Socket().Accept()
		done <- err
	}()
	for range 500 {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://x/", nil)
		testenv.Must(t, err)
		answer, err := NewHTTPClient(path, time.Minute).Do(q)
		if err == nil {
			_ = answer.Body.Close()
		}
		if !IsEnd(err) {
			t.Fatal(err)
		}
	}
	testenv.Must(t, l.Close())
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept: %v", err)
	}
}
