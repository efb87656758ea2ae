// Package memory gives back what a program needed only for a while, as to start.
package memory

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// GiveBack collects garbage, returns free memory to the system, and unmaps those pages of the program and its libraries
// that are as they are in their files. Such a page is mapped again from the page cache when it is used, which takes about a
// microsecond. They count as the process's resident memory, though the page cache has them in any case: the kernel maps
// all around what is touched once, 64 KB and more, and never unmaps it unless memory is short.
//
// No library may be loaded meanwhile: a part of it that is about to be relocated looks like one that never is. An error
// means that something is still there, and no more.
func GiveBack() error {
	debug.FreeOSMemory()
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return fmt.Errorf("list this program's mappings: %w", err)
	}
	defer f.Close()
	list, err := clean(f)
	if err != nil {
		return fmt.Errorf("read this program's mappings: %w", err)
	}
	var errs []error
	for _, m := range list {
		if _, _, errno := unix.Syscall(unix.SYS_MADVISE, m.start, m.end-m.start, unix.MADV_DONTNEED); errno != 0 {
			errs = append(errs, fmt.Errorf("unmap pages of %s: %w", m.file, errno))
		}
	}
	return errors.Join(errs...)
}

// mapping is a range of addresses, [start, end), of a file.
type mapping struct {
	start, end uintptr
	file       string
}

// clean lists the mappings that can be read again from their file: private ones that nobody can write to and that have no
// page of the process's own, as relocations are. The format is that of /proc/PID/smaps, see proc_pid_smaps(5).
func clean(smaps io.Reader) ([]mapping, error) {
	var list []mapping
	var m *mapping
	lines := bufio.NewScanner(smaps)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 {
			continue
		}
		if name, ok := strings.CutSuffix(fields[0], ":"); ok {
			if m != nil && isOwn(name, fields[1:]) {
				list, m = list[:len(list)-1], nil
			}
			continue
		}
		m = nil
		if next, ok := readOnlyFile(fields); ok {
			list = append(list, next)
			m = &list[len(list)-1]
		}
	}
	return list, lines.Err()
}

// isOwn reports whether a line about a mapping says that some of it is not in the file: pages of the process's own, which
// may be in swap, or pages of a device, which nobody would map again.
func isOwn(name string, values []string) bool {
	switch name {
	case "Anonymous", "Swap", "Private_Hugetlb", "Shared_Hugetlb":
		return values[0] != "0"
	case "VmFlags": // I/O, page frames without or with pages, huge pages, locked
		return slices.ContainsFunc(values, func(flag string) bool {
			return slices.Contains([]string{"io", "pf", "mm", "ht", "lo"}, flag)
		})
	}
	return false
}

// readOnlyFile reads the line that a mapping begins with: START-END rwxp OFFSET DEVICE INODE PATH. A shared mapping may be
// of a device: NVIDIA's driver has read-only ones of /dev/nvidiactl, and ends a process that unmaps their pages and reads
// them again by SIGBUS.
func readOnlyFile(fields []string) (mapping, bool) {
	if len(fields) < 6 || (fields[1] != "r--p" && fields[1] != "r-xp") || fields[4] == "0" {
		return mapping{}, false
	}
	from, to, _ := strings.Cut(fields[0], "-")
	start, err := strconv.ParseUint(from, 16, 64)
	end, err2 := strconv.ParseUint(to, 16, 64)
	if err != nil || err2 != nil {
		return mapping{}, false
	}
	return mapping{start: uintptr(start), end: uintptr(end), file: fields[5]}, true
}
