package state

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"gpu-cdi-plugin/manager/model"
)

// A file is whole, or its damage is said.
func FuzzParse(f *testing.F) {
	path := filepath.Join(f.TempDir(), "state.db")
	s, _ := openTest(f, path)
	for i := range 3 {
		if err := s.Put(f.Context(), testPlacement(i)); err != nil {
			f.Fatal(err)
		}
	}
	data, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Add(data[:3*pageSize])
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := parse(data)
		if err == nil && (uint64(len(c.index)) != c.total.count || len(c.index) < len(c.placements)) {
			t.Errorf("%d placements, %d records of %d", len(c.placements), len(c.index), c.total.count)
		}
	})
}

// What is decoded is encoded again with the same meaning.
func FuzzDecode(f *testing.F) {
	p := testPlacement(1)
	p.Pod.InitContainers = []model.Container{{Name: "init", Limits: map[string]int{"x/a": -1}, Sidecar: true}}
	p.Allocations[0].NUMA = map[string][]int{"GPU-1": {0, 1}}
	p.Ended = []string{"init"}
	p.Caller = model.Caller{UID: 1, GID: 2, PID: 3}
	data, err := encode(&p)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := decode(data)
		if err != nil {
			return
		}
		written, err := encode(&p)
		if err != nil {
			return // of a time that cannot be written
		}
		again, err := decode(written)
		if again.Admitted.Equal(p.Admitted) { // a time with too many nanoseconds has two representations
			again.Admitted = p.Admitted
		}
		if err != nil || !reflect.DeepEqual(p, again) {
			t.Errorf("%+v becomes %+v, %v", p, again, err)
		}
	})
}
