package proc

import (
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestCloseOnExec(t *testing.T) {
	for name, closeOnExec := range map[string]func(fd int) error{
		"by one call":        func(int) error { return CloseOnExec() },
		"on an older kernel": closeEachOnExec,
	} {
		t.Run(name, func(t *testing.T) {
			fd, err := unix.Open("/dev/null", unix.O_RDONLY, 0)
			testenv.Must(t, err)
			t.Cleanup(func() { _ = unix.Close(fd) })
			testenv.Must(t, closeOnExec(fd))
			for _, c := range []struct{ fd, want int }{{fd, unix.FD_CLOEXEC}, {0, 0}} {
				if flags, err := unix.FcntlInt(uintptr(c.fd), unix.F_GETFD, 0); flags != c.want || err != nil {
					t.Errorf("descriptor %d has the flags %d, %v, want %d", c.fd, flags, err, c.want)
				}
			}
		})
	}
}
