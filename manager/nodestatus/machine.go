package nodestatus

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/host"
)

// Machine has the resources of a machine.
type Machine struct {
	// CPUs is the number of logical CPUs that are online.
	CPUs int
	// Memory is in bytes.
	Memory int64
	// HugePages are the numbers of huge pages, by page size in bytes. A size that is supported and has no pages has 0.
	HugePages map[int64]int64
	// EphemeralStorage is the size in bytes of the filesystem of the pods' files.
	EphemeralStorage int64
	// NUMANodes are the IDs of the NUMA nodes, ascending. There is always at least one.
	NUMANodes []int
}

// ReadMachine reads a host's resources from /proc and /sys. `storage` is a path on the filesystem of the pods' files.
func ReadMachine(h host.Host, storage string) (Machine, error) {
	m, err := readMachine(h)
	if err != nil {
		return Machine{}, fmt.Errorf("read the machine's resources: %w", err)
	}
	if m.EphemeralStorage, err = sizeOf(storage); err != nil {
		return Machine{}, fmt.Errorf("read the size of the filesystem: %w", err)
	}
	return m, nil
}

func readMachine(h host.Host) (m Machine, err error) {
	proc, err := procfs.NewFS(h.Proc())
	if err != nil {
		return m, err
	}
	stat, err := proc.Stat()
	if err != nil {
		return m, err
	}
	memory, err := proc.Meminfo()
	if err != nil {
		return m, err
	}
	if memory.MemTotalBytes == nil || len(stat.CPU) == 0 {
		return m, fmt.Errorf("%s has no CPUs or no memory", h.Proc())
	}
	m.CPUs, m.Memory = len(stat.CPU), int64(*memory.MemTotalBytes)
	if m.HugePages, err = hugePages(h.Sys("kernel/mm/hugepages")); err != nil {
		return m, err
	}
	m.NUMANodes, err = numaNodes(h.Sys("devices/system/node"))
	return m, err
}

// hugePages reads the numbers of pages by page size. If the kernel has no huge pages, the directory does not exist.
func hugePages(dir string) (map[int64]int64, error) {
	pages := map[int64]int64{}
	err := eachNumbered(dir, "hugepages-", "kB", func(name string, kib int) error {
		data, err := os.ReadFile(filepath.Join(dir, name, "nr_hugepages"))
		if err != nil {
			return err
		}
		n, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64)
		if err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(dir, name, "nr_hugepages"), err)
		}
		pages[int64(kib)<<10] = n
		return nil
	})
	return pages, err
}

// numaNodes reads the IDs of the NUMA nodes. If the kernel does not support NUMA, the directory does not exist, and
// the result is node 0.
func numaNodes(dir string) ([]int, error) {
	var nodes []int
	err := eachNumbered(dir, "node", "", func(_ string, id int) error {
		nodes = append(nodes, id)
		return nil
	})
	if len(nodes) == 0 {
		nodes = []int{0}
	}
	slices.Sort(nodes)
	return nodes, err
}

// eachNumbered calls the function `do` for each file in a directory whose name has a number between prefix and suffix.
// If the directory is missing, there is none.
func eachNumbered(dir, prefix, suffix string, do func(name string, number int) error) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, e := range entries {
		rest, hasPrefix := strings.CutPrefix(e.Name(), prefix)
		digits, hasSuffix := strings.CutSuffix(rest, suffix)
		number, err := strconv.ParseUint(digits, 10, 31)
		if !hasPrefix || !hasSuffix || err != nil {
			continue
		}
		if err := do(e.Name(), int(number)); err != nil {
			return err
		}
	}
	return nil
}

// sizeOf returns the size in bytes of the filesystem that contains a path.
func sizeOf(path string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: path, Err: err}
	}
	return int64(st.Blocks) * st.Frsize, nil
}
