package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/test/lib/testenv"
)

type handler func(context.Context, Request, func(string)) (string, error)

func (h handler) Handle(ctx context.Context, r Request, progress func(string)) (string, error) {
	return h(ctx, r, progress)
}

// serve serves at the socket of a directory until end is called.
func serve(t *testing.T, dir string, h handler) (log *testenv.Log, end func()) {
	t.Helper()
	log = &testenv.Log{}
	s := &Server{Dir: dir, Handler: h, Log: slog.New(slog.NewTextHandler(log, nil)), retry: 10 * time.Millisecond}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(end)
	return log, end
}

func awaitSocket(t *testing.T, dir string) {
	t.Helper()
	testenv.Eventually(t, "the socket", func() bool {
		c, err := net.Dial("unix", SocketPath(dir))
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
}

func none(string) {}

func TestRequest(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	if _, err := Send(t.Context(), dir, Request{Act: Uncordon, Device: "1"}, none); !errors.Is(err, ErrNoServer) {
		t.Errorf("without a server: %v", err)
	}
	log, end := serve(t, dir, func(_ context.Context, r Request, progress func(string)) (string, error) {
		progress("working on " + r.Device)
		if r.Act == Uncordon {
			return "", errors.New("it is\nnot there")
		}
		return "cordoned for " + r.Reason, nil
	})
	awaitSocket(t, dir)
	info, err := os.Lstat(SocketPath(dir))
	if err != nil || info.Mode() != fs.ModeSocket|0o600 {
		t.Errorf("the socket has the mode %v, error %v", info.Mode(), err)
	}
	var progress []string
	result, err := Send(t.Context(), dir, Request{Act: Cordon, Device: "3:0", Reason: "<noise>"},
		func(text string) { progress = append(progress, text) })
	if err != nil || result != "cordoned for <noise>" || strings.Join(progress, "") != "working on 3:0" {
		t.Errorf("result %q, progress %q, error %v", result, progress, err)
	}
	_, err = Send(t.Context(), dir, Request{Act: Uncordon, Device: "1"}, none)
	if refused, ok := errors.AsType[*RefusedError](err); !ok || refused.Reason != "it is\nnot there" {
		t.Errorf("error %v", err)
	}
	for _, want := range []string{
		"request of an administrator (user 0, process ", "): cordon 3:0 (<noise>)", "uid=0", "failed: uncordon 1",
	} {
		if os.Geteuid() == 0 && !strings.Contains(log.String(), want) {
			t.Errorf("the log does not have %q:\n%s", want, log)
		}
	}
	end()
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the server left its directory: %v", err)
	}
}

// Whoever asks often who holds devices does not fill the log, and the answer may be long.
func TestTheAnswerAboutClaimsIsNotLogged(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	long := strings.Repeat("a", 1<<20)
	log, _ := serve(t, dir, func(context.Context, Request, func(string)) (string, error) { return long, nil })
	awaitSocket(t, dir)
	got, err := Send(t.Context(), dir, Request{Act: Claims}, none)
	if err != nil || got != long {
		t.Errorf("%d bytes, error %v, want %d bytes", len(got), err, len(long))
	}
	if log.String() != "" {
		t.Errorf("it is logged: %.200s", log.String())
	}
}

// A request that waits for long is not ended by the time that its reading may take, and ends when its client goes.
func TestTheRequestEndsWithItsClient(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	began, ended := make(chan struct{}), make(chan struct{})
	serve(t, dir, func(ctx context.Context, _ Request, _ func(string)) (string, error) {
		close(began)
		<-ctx.Done()
		close(ended)
		return "", ctx.Err()
	})
	awaitSocket(t, dir)
	ctx, cancel := context.WithCancel(t.Context())
	sent := make(chan error, 1)
	go func() { _, err := Send(ctx, dir, Request{Act: Uncordon, Device: "1"}, none); sent <- err }()
	<-began
	select {
	case <-ended:
		t.Error("the request ended by itself")
	case <-time.After(requestTime + time.Second):
	}
	cancel()
	if err := <-sent; !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	<-ended
}

// A socket of another instance is not touched, and one that was left is replaced.
func TestOneInstanceHasTheSocket(t *testing.T) {
	dir := t.TempDir()
	answer := func(text string) handler {
		return func(context.Context, Request, func(string)) (string, error) { return text, nil }
	}
	_, end := serve(t, dir, answer("first"))
	awaitSocket(t, dir)
	log, _ := serve(t, dir, answer("second"))
	testenv.Eventually(t, "the warning", func() bool {
		return strings.Contains(log.String(), "another instance holds it")
	})
	r := Request{Act: Uncordon, Device: "1"}
	if got, err := Send(t.Context(), dir, r, none); got != "first" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	end()
	testenv.Eventually(t, "an answer of the second", func() bool {
		got, _ := Send(t.Context(), dir, r, none)
		return got == "second"
	})
	if n := strings.Count(log.String(), "another instance holds it"); n != 1 {
		t.Errorf("%d warnings", n)
	}
}

// The pause between attempts grows, but not while another instance has the socket, which may be about to end.
func TestThePauseBetweenAttempts(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want time.Duration
	}{
		"another instance has the socket": {fmt.Errorf("make the control socket: %w", fileio.ErrHeld), retryHeld},
		"no space":                        {unix.ENOSPC, retryAfter},
	} {
		pause := firstRetry
		for range 20 {
			pause = nextPause(pause, retryAfter, c.err)
		}
		if pause != c.want {
			t.Errorf("%s: %v, want %v", name, pause, c.want)
		}
	}
}

// A hook whose request ends with the service sends it again, to the instance that takes over.
func TestTheEndOfTheServiceDoesNotAnswerAHook(t *testing.T) {
	dir := t.TempDir()
	began := make(chan struct{})
	_, end := serve(t, dir, func(ctx context.Context, _ Request, _ func(string)) (string, error) {
		close(began)
		<-ctx.Done()
		return "", context.Cause(ctx)
	})
	awaitSocket(t, dir)
	sent := make(chan error, 1)
	go func() {
		_, err := Send(t.Context(), dir, Request{Act: Allocation, Namespace: "ns", Pod: "job", Container: "main"}, none)
		sent <- err
	}()
	<-began
	end()
	if err := <-sent; !errors.Is(err, unixsocket.ErrEnded) {
		t.Errorf("error %v", err)
	}
}

func TestASocketThatWasLeftIsReplaced(t *testing.T) {
	dir := t.TempDir()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: SocketPath(dir), Net: "unix"})
	testenv.Must(t, err)
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	if _, err := Send(t.Context(), dir, Request{Act: Uncordon, Device: "1"}, none); !errors.Is(err, ErrNoServer) {
		t.Errorf("at a socket that was left: %v", err)
	}
	serve(t, dir, func(context.Context, Request, func(string)) (string, error) { return "new", nil })
	testenv.Eventually(t, "an answer", func() bool {
		got, _ := Send(t.Context(), dir, Request{Act: Uncordon, Device: "1"}, none)
		return got == "new"
	})
}

func TestWrongRequests(t *testing.T) {
	for text, want := range map[string]string{
		``:                              "EOF",
		`{}`:                            `unknown act ""`,
		`{"act":"shut"}`:                `unknown act "shut"`,
		`{"act":"cordon","device":"1"}`: "cordon: give a reason",
		`{"act":"uncordon","device":"1","reason":"x"}`:           "uncordon: takes no reason",
		`{"act":"uncordon","device":"1","force":true}`:           "takes neither wait nor force",
		`{"act":"release","device":"1"}`:                         "release: takes no device",
		`{"act":"release","pod":"p"}`:                            "release: takes no container",
		`{"act":"allocation","namespace":"ns","pod":"p"}`:        "allocation: name a container, its pod and its namespace",
		`{"act":"uncordon"}`:                                     "uncordon: name a device",
		`{"act":"uncordon","device":"1\n"}`:                      "not one line",
		`{"act":"uncordon","device":"1","x":1}`:                  "unknown field",
		`{"act":"uncordon","device":"1"} {}`:                     "unexpected data after",
		`{"act":"uncordon","device":"` + long(maxDevice) + `1"}`: "more than the maximum of 100",
	} {
		if _, err := parseRequest(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", text, err, want)
		}
	}
}

func long(n int) string { return strings.Repeat("1", n) }

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte(`{"act":"cordon","device":"3:0","reason":"a fan is loud"}`))
	f.Add([]byte(`{"act":"uncordon","device":"GPU-1"}`))
	f.Add([]byte(`{"act":"reset","device":"1","wait":true,"force":true}`))
	f.Add([]byte(`{"act":`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := parseRequest(bytes.NewReader(data))
		if err != nil {
			if r != (Request{}) {
				t.Errorf("a request %+v with the error %v", r, err)
			}
			return
		}
		if err := r.Check(); err != nil {
			t.Errorf("%+v: %v", r, err)
		}
	})
}
