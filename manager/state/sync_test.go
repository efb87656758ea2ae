package state_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/manager/state"
)

// The child of TestAChangeThatIsNotSyncedIsNotMade gets the path of the state.
const syncEnvironment = "TEST_STATE_SYNC"

// A change is acknowledged only after fdatasync(2). The child makes one change, then fdatasync fails.
func TestAChangeThatIsNotSyncedIsNotMade(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), program)
	cmd.Env = append(os.Environ(), syncEnvironment+"="+path)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got := string(out); !strings.Contains(got, "input/output error, broken: false") {
		t.Errorf("the change was answered with %q", got)
	}
	if _, loaded := open(t, path); cmp.Diff(placements(1), loaded.Placements) != "" {
		t.Errorf("placements (-want +got):\n%s", cmp.Diff(placements(1), loaded.Placements))
	}
}

func changeWithoutSync(path string) error {
	s, _, err := state.Open(path, state.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	if err := s.Put(context.Background(), placement(0)); err != nil {
		return err
	}
	if err := refuseSync(); err != nil {
		return err
	}
	err = s.Put(context.Background(), placement(1))
	fmt.Printf("%v, broken: %v\n", err, errors.Is(err, state.ErrBroken))
	return s.Close()
}

// refuseSync makes fdatasync fail with EIO in all threads, by a filter of seccomp(2).
func refuseSync() error {
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // seccomp_data.nr
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: unix.SYS_FDATASYNC},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(syscall.EIO)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	runtime.LockOSThread() // for both calls; the second one sets the other threads too
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return fmt.Errorf("set the filter: %w", errno)
	}
	return nil
}
