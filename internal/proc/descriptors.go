package proc

import (
	"fmt"
	"math"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// CloseOnExec marks the descriptors that this process has inherited, so that programs which it starts do not inherit
// them. One may be a lock, or a pipe whose reader waits until all copies are closed. Go marks what it opens itself.
func CloseOnExec() error {
	const first = 3 // after the standard ones
	if unix.CloseRange(first, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC) == nil {
		return nil
	}
	return closeEachOnExec(first) // before Linux 5.11
}

func closeEachOnExec(first int) error {
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("find the inherited descriptors: %w", err)
	}
	for _, name := range names {
		if fd, err := strconv.Atoi(name.Name()); err == nil && fd >= first {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}
