package sim

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/atomicfile"
)

// change rewrites the state file: edit is given the records and returns those that are to be there. It holds a lock,
// so that no change by another process is lost. Readers see the old state or the new one.
func (n *Node) change(edit func([]record) ([]record, error)) (err error) {
	lock, err := os.OpenFile(filepath.Join(n.root, ownDir, "lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return fmt.Errorf("lock the node's state: %w", err)
	}
	defer func() { err = errors.Join(err, lock.Close()) }() // which unlocks it
	if err := flock(lock); err != nil {
		return fmt.Errorf("lock the node's state: %w", err)
	}
	records, err := n.state()
	if err != nil {
		return err
	}
	records, err = edit(records)
	if err != nil {
		return err
	}
	return atomicfile.Write(filepath.Join(n.root, stateFile), formatRecords(records), 0o644)
}

func flock(f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (n *Node) state() ([]record, error) {
	text, err := os.ReadFile(filepath.Join(n.root, stateFile))
	if err != nil {
		return nil, fmt.Errorf("read the node's state: %w", err)
	}
	records, err := parseRecords(text)
	if err != nil {
		return nil, fmt.Errorf("read the node's state %s: %w", stateFile, err)
	}
	return records, nil
}

// without returns the records for which drop is false.
func without(records []record, drop func(record) bool) []record {
	return slices.DeleteFunc(slices.Clone(records), drop)
}

func isLatency(r record) bool { return r.name == "latency" }

func isMachine(r record) bool { return r.name == "machine" }

// isMIG reports whether a record is about the MIG mode or the MIG devices of a GPU.
func isMIG(r record, index int) bool {
	switch r.name {
	case "gpu":
		return r.is("index", index)
	case "clearmig", "mig":
		return r.is("gpu", index)
	}
	return false
}
