package sim

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
)

// updateState replaces the records of the state file by the result of edit. A lock prevents changes by other processes
// from being lost. Readers see either the old or the new state.
func (n *Node) updateState(edit func([]record) ([]record, error)) (err error) {
	lock, err := os.OpenFile(filepath.Join(n.root, ownDir, "lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return fmt.Errorf("lock the node's state: %w", err)
	}
	defer func() { err = errors.Join(err, lock.Close()) }() // closing releases the lock
	if err := flock(lock); err != nil {
		return fmt.Errorf("lock the node's state: %w", err)
	}
	records, err := n.readState()
	if err != nil {
		return err
	}
	records, err = edit(records)
	if err != nil {
		return err
	}
	return fileio.Replace(filepath.Join(n.root, stateFile), formatRecords(records), 0o644)
}

func flock(f *os.File) error {
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

func (n *Node) readState() ([]record, error) {
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

// isMIG reports whether a record is about the MIG mode or the MIG devices of a GPU.
func isMIG(r record, index int) bool {
	switch r.name {
	case "gpu":
		return r.has("index", index)
	case "clearmig", "mig":
		return r.has("gpu", index)
	}
	return false
}

// The description of a machine and the state of a node have the same format, which the C library also reads: each line
// is a record of a name and key=value pairs with percent-encoded values.

// record is one line. The order of its pairs is kept, so that the text is deterministic.
type record struct {
	name  string
	pairs []pair
}

type pair struct{ key, value string }

// newRecord makes a record from a name and alternating keys and values.
func newRecord(name string, kv ...any) record {
	r := record{name: name}
	for i := 0; i+1 < len(kv); i += 2 {
		r.pairs = append(r.pairs, pair{kv[i].(string), fmt.Sprint(kv[i+1])})
	}
	return r
}

func (r record) String() string {
	var b strings.Builder
	b.WriteString(r.name)
	for _, p := range r.pairs {
		b.WriteByte(' ')
		b.WriteString(p.key)
		b.WriteByte('=')
		b.WriteString(escape(p.value))
	}
	return b.String()
}

func (r record) get(key string) (string, bool) {
	for _, p := range r.pairs {
		if p.key == key {
			return p.value, true
		}
	}
	return "", false
}

// has reports whether a key of the record has that value.
func (r record) has(key string, value any) bool {
	got, ok := r.get(key)
	return ok && got == fmt.Sprint(value)
}

// number returns a key's value as an integer.
func (r record) number(key string) (int, error) {
	value, ok := r.get(key)
	if !ok {
		return 0, fmt.Errorf("record %q: no %s", r, key)
	}
	n, err := strconv.Atoi(value)
	if err != nil {
		return 0, fmt.Errorf("record %q: %s: %w", r, key, err)
	}
	return n, nil
}

func escape(s string) string {
	var b strings.Builder
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c == '%' || c >= 0x7f {
			fmt.Fprintf(&b, "%%%02X", c)
		} else {
			b.WriteByte(c)
		}
	}
	return b.String()
}

func formatRecords(records []record) []byte {
	var b strings.Builder
	for _, r := range records {
		b.WriteString(r.String())
		b.WriteByte('\n')
	}
	return []byte(b.String())
}

// parseRecords parses the output of formatRecords. It skips empty lines.
func parseRecords(text []byte) ([]record, error) {
	records := []record{}
	line := 0
	for s := range strings.Lines(string(text)) {
		line++
		fields := strings.Fields(s)
		if len(fields) == 0 {
			continue
		}
		r := record{name: fields[0]}
		for _, f := range fields[1:] {
			key, value, ok := strings.Cut(f, "=")
			if !ok || key == "" {
				return nil, fmt.Errorf("line %d: %q is not key=value", line, f)
			}
			plain, err := url.PathUnescape(value)
			if err != nil {
				return nil, fmt.Errorf("line %d: %s: %w", line, key, err)
			}
			r.pairs = append(r.pairs, pair{key, plain})
		}
		records = append(records, r)
	}
	return records, nil
}
