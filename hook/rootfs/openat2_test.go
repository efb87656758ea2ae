package rootfs

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// withoutOpenat2 is an environment variable with the error that openat2 returns in this process.
const withoutOpenat2 = "ROOTFS_TEST_OPENAT2_ERROR"

func TestMain(m *testing.M) {
	if value := os.Getenv(withoutOpenat2); value != "" {
		var errno unix.Errno
		if _, err := fmt.Sscan(value, &errno); err != nil {
			panic(err)
		}
		if err := refuseOpenat2(errno); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// refuseOpenat2 installs a seccomp filter for all threads.
func refuseOpenat2(errno unix.Errno) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("prctl: %w", err)
	}
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // the system call's number
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: 0, Jf: 1, K: unix.SYS_OPENAT2},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, err := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program)))
	if err != 0 {
		return fmt.Errorf("seccomp: %w", err)
	}
	return nil
}

// Kernels before 5.6 have no openat2, and filters of old container engines refuse it.
func TestWithoutOpenat2(t *testing.T) {
	if os.Getenv(withoutOpenat2) != "" {
		return
	}
	for name, errno := range map[string]unix.Errno{"before Linux 5.6": unix.ENOSYS, "a filter": unix.EPERM} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.timeout=1m", "-test.skip=Race")
			cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", withoutOpenat2, errno))
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("this package's tests without openat2: %v\n%s", err, out)
			}
		})
	}
}
