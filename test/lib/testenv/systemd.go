package testenv

import (
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Systemd listens for notifications like systemd. until waits for one that contains a text.
func Systemd(t *testing.T) (socket string, until func(string) string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = systemd.Close() })
	next := func() string {
		t.Helper()
		if err := systemd.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 4096)
		n, err := systemd.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		return string(b[:n])
	}
	until = func(want string) string {
		t.Helper()
		got := next()
		for ; !strings.Contains(got, want); got = next() {
			t.Logf("before %q: %q", want, got)
		}
		return got
	}
	return socket, until
}
