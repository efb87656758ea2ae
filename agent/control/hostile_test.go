package control

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/test/lib/testenv"

	"golang.org/x/sys/unix"
)

const uncordon = "POST /v1 HTTP/1.1\r\nHost: x\r\nContent-Length: 31\r\n\r\n" + `{"act":"uncordon","device":"1"}`

func connect(t *testing.T, dir string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", SocketPath(dir))
	testenv.Must(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func write(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

// Whatever a client does, the server ends its connection soon, and answers others meanwhile.
func TestTheServerEndsBrokenRequests(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		sends   string
		endless string // sent until the server ends the connection
	}{
		"nothing":         {},
		"half a header":   {sends: "POST /v1 HTTP/1.1\r\nHost:"},
		"junk":            {sends: "\x00\x01\x02\n\n\n"},
		"an endless line": {endless: strings.Repeat("x", 1000)},
		"endless headers": {sends: "POST /v1 HTTP/1.1\r\nHost: x\r\n", endless: "X-A: b\r\n"},
		"no body":         {sends: "POST /v1 HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"},
		"an endless body": {
			sends: "POST /v1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", endless: "5\r\n     \r\n",
		},
		"another path":     {sends: "POST /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"},
		"another method":   {sends: "GET /v1 HTTP/1.1\r\nHost: x\r\n\r\n"},
		"a huge length":    {sends: "POST /v1 HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", endless: "[[[["},
		"another protocol": {sends: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			var handled atomic.Int64
			serve(t, dir, func(context.Context, Request, func(string)) (string, error) {
				handled.Add(1)
				return "done", nil
			})
			awaitSocket(t, dir)
			conn := connect(t, dir)
			write(t, conn, c.sends)
			if c.endless != "" {
				go func() {
					for {
						if _, err := io.WriteString(conn, c.endless); err != nil {
							return
						}
					}
				}()
			}
			if got, err := Send(t.Context(), dir, Request{Act: Uncordon, Device: "1"}, none); got != "done" {
				t.Errorf("another request: %q, %v", got, err)
			}
			_ = conn.SetReadDeadline(time.Now().Add(time.Minute))
			answer, err := io.ReadAll(conn)
			if errors.Is(err, os.ErrDeadlineExceeded) || strings.HasPrefix(string(answer), "HTTP/1.1 200") {
				t.Errorf("%v after %q", err, answer)
			}
			if n := handled.Load(); n != 1 {
				t.Errorf("%d requests were handled", n)
			}
		})
	}
}

// A client that does not read, or that sends more than its request and goes, ends its request.
func TestTheRequestEndsWithABrokenClient(t *testing.T) {
	t.Parallel()
	for name, breaks := range map[string]func(*testing.T, net.Conn){
		"it does not read": func(*testing.T, net.Conn) {},
		"it sends junk and goes": func(t *testing.T, c net.Conn) {
			write(t, c, "junk")
			_ = c.Close()
		},
		"it closes half of the connection": func(t *testing.T, c net.Conn) {
			if err := c.(*net.UnixConn).CloseWrite(); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			ended := make(chan struct{})
			serve(t, dir, func(ctx context.Context, _ Request, progress func(string)) (string, error) {
				for ctx.Err() == nil {
					progress(strings.Repeat("x", 1000))
				}
				close(ended)
				return "", context.Cause(ctx)
			})
			awaitSocket(t, dir)
			c := connect(t, dir)
			write(t, c, uncordon)
			breaks(t, c)
			select {
			case <-ended:
			case <-time.After(time.Minute):
				t.Error("the request goes on")
			}
		})
	}
}

// More connections than a node's administrators need are closed at once, and cost nothing afterwards.
func TestThousandsOfConnections(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	serve(t, dir, func(context.Context, Request, func(string)) (string, error) { return "done", nil })
	awaitSocket(t, dir)
	var all []net.Conn
	// On a busy machine the first connections may be closed already, since they send no request.
	testenv.Eventually(t, "a refusal beside thousands of connections", func() bool {
		for range 1000 {
			all = append(all, connect(t, dir))
		}
		_, err := Send(t.Context(), dir, Request{Act: Uncordon, Device: "1"}, none)
		return errors.Is(err, unixsocket.ErrEnded)
	})
	testenv.Eventually(t, fmt.Sprintf("at most %d open connections", maxConnections), func() bool {
		open := 0
		for _, c := range all {
			_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
			if _, err := c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
				open++
			}
		}
		return open <= maxConnections
	})
	for _, c := range all {
		_ = c.Close()
	}
	testenv.Eventually(t, "an answer", func() bool {
		got, _ := Send(t.Context(), dir, Request{Act: Uncordon, Device: "1"}, none)
		return got == "done"
	})
}

// answerWith answers the requests to a listener.
func answerWith(t *testing.T, l net.Listener, answer func(net.Conn)) {
	t.Helper()
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				if _, err := http.ReadRequest(bufio.NewReader(c)); err == nil {
					answer(c)
				}
			}()
		}
	}()
}

func TestTheClientBoundsTheAnswer(t *testing.T) {
	t.Parallel()
	const ok = "HTTP/1.1 200 OK\r\n\r\n"
	for name, c := range map[string]struct{ answer, want string }{
		"none":            {"", "closed the connection"},
		"half an answer":  {ok + `{"progress":"x"}`, "closed the connection"},
		"no JSON":         {ok + "hello\n", "read the answer: invalid character"},
		"an endless line": {ok + strings.Repeat("x", maxLine+1), "token too long"},
		"a long refusal":  {"HTTP/1.1 500 no\r\n\r\n" + strings.Repeat("x", maxLine) + "END", "xxx"},
		"a redirect":      {"HTTP/1.1 307 no\r\nLocation: http://other/\r\n\r\n", "stopped after 10 redirects"},
		"what a terminal obeys": {
			ok + `{"progress":"\u001b[2J\r"}` + "\n" + `{"error":"a\u001b]0;b\u0007\nc"}` + "\n", "a\uFFFD]0;b\uFFFD\nc",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			l, err := net.Listen("unix", SocketPath(dir))
			testenv.Must(t, err)
			answerWith(t, l, func(conn net.Conn) { _, _ = io.WriteString(conn, c.answer) })
			_, err = Send(t.Context(), dir, Request{Act: Uncordon, Device: "1"}, func(text string) {
				if strings.ContainsAny(text, "\x1b\r") {
					t.Errorf("progress %q", text)
				}
			})
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "END") {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

// A program that hangs is no reason to wait for ever.
func TestTheClientDoesNotWaitForAProgramThatHangs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	l, err := net.Listen("unix", SocketPath(dir))
	testenv.Must(t, err)
	defer l.Close()
	sent := make(chan error, 1)
	go func() { _, err := Send(t.Context(), dir, Request{Act: Uncordon, Device: "1"}, none); sent <- err }()
	select {
	case err := <-sent:
		if err == nil || !strings.Contains(err.Error(), "timeout") || errors.Is(err, ErrNoServer) {
			t.Errorf("error %v", err)
		}
	case <-time.After(time.Minute):
		t.Error("it waits")
	}
}

func TestTheClientAsksNoOtherUser(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	dir := t.TempDir()
	for at := dir; len(at) > len(os.TempDir()); at = filepath.Dir(at) { // the directories of the test are root's alone
		testenv.Must(t, os.Chmod(at, 0o777))
	}
	l, err := listenAs(65534, SocketPath(dir))
	testenv.Must(t, err)
	answerWith(t, l, func(conn net.Conn) { t.Error("it was asked") })
	_, err = Send(t.Context(), dir, Request{Act: Uncordon, Device: "1"}, none)
	if err == nil || !strings.Contains(err.Error(), "another user's program listens there") {
		t.Errorf("error %v", err)
	}
}

// listenAs listens as another user.
func listenAs(uid uintptr, path string) (net.Listener, error) {
	runtime.LockOSThread()
	const same = ^uintptr(0)
	if _, _, err := syscall.RawSyscall(unix.SYS_SETRESUID, same, uid, same); err != 0 {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if _, _, err := syscall.RawSyscall(unix.SYS_SETRESUID, same, 0, same); err == 0 {
		runtime.UnlockOSThread() // otherwise the thread ends with its goroutine
	}
	return l, err
}
