package unixsocket

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"

	"golang.org/x/sys/unix"
)

func TestListen(t *testing.T) {
	for name, c := range map[string]struct {
		before func(t *testing.T, path string) // makes what is at the path
		group  int
		mode   fs.FileMode
		want   string // in the error
	}{
		"nothing is there":        {func(*testing.T, string) {}, OwnerOnly, 0o600, ""},
		"a socket of the past":    {leaveSocket, OwnerOnly, 0o600, ""},
		"a group may connect too": {leaveSocket, os.Getgid(), 0o660, ""},
		"a file is there":         {leaveFile, OwnerOnly, 0, "is not a socket: remove it"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "socket")
			c.before(t, path)
			l, err := Listen(t.Context(), path, c.group)
			if c.want != "" {
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("error %v, want %q", err, c.want)
				}
				return
			}
			testenv.Must(t, err)
			defer l.Close()
			var st unix.Stat_t
			testenv.Must(t, unix.Stat(path, &st))
			if mode := fs.FileMode(st.Mode) & fs.ModePerm; mode != c.mode || int(st.Gid) != os.Getgid() {
				t.Errorf("mode %o of group %d, want %o", mode, st.Gid, c.mode)
			}
		})
	}
}

func TestDialFollowsNoLink(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	l, err := Listen(t.Context(), path, OwnerOnly)
	testenv.Must(t, err)
	defer l.Close()
	conn, err := Dial(t.Context(), path)
	testenv.Must(t, err)
	testenv.Must(t, conn.Close(), os.Symlink("socket", path+"-link"))
	if conn, err := Dial(t.Context(), path+"-link"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("by a link: %v, error %v", conn, err)
	}
	if conn, err := Dial(t.Context(), path+"-none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without a socket: %v, error %v", conn, err)
	}
}

func leaveSocket(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	testenv.Must(t, err)
	l.SetUnlinkOnClose(false)
	testenv.Must(t, l.Close())
}

func leaveFile(t *testing.T, path string) {
	t.Helper()
	testenv.Must(t, os.WriteFile(path, nil, 0o600))
}

func TestASocketThatIsMadeAnewHasAnotherID(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	seen := map[ID]bool{}
	for range 10 {
		l, err := Listen(t.Context(), path, OwnerOnly)
		testenv.Must(t, err)
		id, err := Identify(path)
		testenv.Must(t, err)
		testenv.Must(t, os.Chmod(path, 0o666)) // which changes nothing
		if again, _ := Identify(path); again != id || seen[id] {
			t.Errorf("the ID is %+v after %+v, and was seen before: %t", again, id, seen[id])
		}
		seen[id] = true
		l.SetUnlinkOnClose(false)
		testenv.Must(t, l.Close())
		time.Sleep(20 * time.Millisecond) // the clock of older kernels' file systems has steps of up to 10 ms
	}
}
