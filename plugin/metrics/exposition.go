package metrics

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// What follows writes Prometheus' text format 0.0.4, https://prometheus.io/docs/instrumenting/exposition_formats/. Its
// Go client would do so too, at the price of a quarter of the time that every verb of the program takes to start.
const contentType = "text/plain; version=0.0.4; charset=utf-8"

// family is a metric: its series, one for each combination of labels' values. Values have the order of the labels' names.
type family struct {
	name, kind, help string
	labels           []string
	bounds           []float64 // of a histogram's buckets

	mu     sync.Mutex
	series map[string]*series // by their labels as they are written
}

type series struct {
	value   float64  // of a histogram, the sum of what was observed
	buckets []uint64 // what was observed in each, the last without a bound
}

func newFamily(kind, name, help string, labels []string) *family {
	return &family{kind: kind, name: namespace + "_" + name, help: help, labels: labels, series: map[string]*series{}}
}

func counter(name, help string, labels ...string) *family {
	return newFamily("counter", name, help, labels)
}

func gauge(name, help string, labels ...string) *family {
	return newFamily("gauge", name, help, labels)
}

func histogram(name, help string, bounds []float64, labels ...string) *family {
	f := newFamily("histogram", name, help, labels)
	f.bounds = bounds
	return f
}

// begin makes sure that a series is there, with 0.
func (f *family) begin(values ...string) { f.add(0, values...) }

func (f *family) add(n float64, values ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.of(values).value += n
}

func (f *family) set(to float64, values ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.of(values).value = to
}

func (f *family) observe(what float64, values ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.of(values)
	s.value += what
	at, _ := slices.BinarySearch(f.bounds, what)
	s.buckets[at]++
}

func (f *family) of(values []string) *series {
	var space [256]byte // that the text of known series needs no allocation
	text := space[:0]
	for i, name := range f.labels {
		text = append(text, name...)
		text = append(text, `="`...)
		text = append(text, escape.Replace(values[i])...)
		text = append(text, `",`...)
	}
	text = bytes.TrimSuffix(text, []byte(","))
	s := f.series[string(text)]
	if s == nil {
		s = &series{buckets: make([]uint64, len(f.bounds)+1)}
		f.series[string(text)] = s
	}
	return s
}

var escape = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// write adds the family's lines to b, in an order that is always the same.
func (f *family) write(b *bytes.Buffer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.series) == 0 {
		return
	}
	fmt.Fprintf(b, "# HELP %s %s\n# TYPE %s %s\n", f.name, f.help, f.name, f.kind)
	for _, labels := range slices.Sorted(maps.Keys(f.series)) {
		if f.bounds == nil {
			sample(b, f.name, labels, f.series[labels].value)
		} else {
			f.writeHistogram(b, labels, f.series[labels])
		}
	}
}

// writeHistogram writes how many observations were at most each bound, then all of them.
func (f *family) writeHistogram(b *bytes.Buffer, labels string, s *series) {
	prefix := labels
	if labels != "" {
		prefix += ","
	}
	var count uint64
	for i, n := range s.buckets {
		bound := "+Inf"
		if i < len(f.bounds) {
			bound = number(f.bounds[i])
		}
		count += n
		sample(b, f.name+"_bucket", prefix+`le="`+bound+`"`, float64(count))
	}
	sample(b, f.name+"_sum", labels, s.value)
	sample(b, f.name+"_count", labels, float64(count))
}

func sample(b *bytes.Buffer, name, labels string, value float64) {
	b.WriteString(name)
	if labels != "" {
		b.WriteString("{" + labels + "}")
	}
	b.WriteString(" " + number(value) + "\n")
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
