package proc

import (
	"fmt"
	"math"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// CloseOnExec keeps the programs that this process starts from inheriting descriptors which it has inherited itself:
// those of a lock, or of a terminal's or supervisor's pipe, whose end others wait for. Go opens all files in this way.
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
