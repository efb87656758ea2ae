package sim

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
)

// The description of a machine and the state of a node are written in one language: a record a line, a name and
// key=value pairs, values percent-encoded. The C library reads the same.

// record is one line. Its pairs keep their order, so that the text is deterministic.
type record struct {
	name  string
	pairs []pair
}

type pair struct{ key, value string }

// rec makes a record from a name and alternating keys and values.
func rec(name string, kv ...any) record {
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

// is reports whether the record's key has that value.
func (r record) is(key string, value any) bool {
	got, ok := r.get(key)
	return ok && got == fmt.Sprint(value)
}

// number is the value of a key that must be a whole number.
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

// parseRecords reads what formatRecords wrote. Empty lines are skipped.
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
