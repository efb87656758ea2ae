package state

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

func testPlacement(i int) model.Placement { return model.Placement{Pod: model.Pod{UID: fmt.Sprint(i)}} }

func openTest(t *testing.T) *Store {
	t.Helper()
	s, _, err := Open(filepath.Join(t.TempDir(), "placements.json"), slog.New(slog.DiscardHandler))
	testenv.Must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func TestChangesDuringAWriteAreWrittenTogether(t *testing.T) {
	const callers = 50
	s := openTest(t)
	begun, proceed := make(chan struct{}, callers), make(chan struct{})
	var last []byte
	s.replace = func(data []byte) error {
		begun <- struct{}{}
		<-proceed
		last = data
		return nil
	}
	var running sync.WaitGroup
	put := func(i int) {
		running.Go(func() {
			if err := s.Put(testPlacement(i)); err != nil {
				t.Error(err)
			}
		})
	}
	put(0)
	<-begun
	for i := 1; i < callers; i++ {
		put(i)
	}
	for s.waiting() < callers-1 {
		runtime.Gosched()
	}
	close(proceed)
	running.Wait()
	if len(begun) != 1 {
		t.Errorf("%d changes during a write were %d writes", callers-1, len(begun))
	}
	if _, loaded, err := parse(last); err != nil || len(loaded.Placements) != callers {
		t.Errorf("the last file has %d placements: %v", len(loaded.Placements), err)
	}
}

// waiting returns how many changes wait for the write that runs.
func (s *Store) waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.next == nil {
		return 0
	}
	return len(s.next.changes)
}

func TestAChangeThatIsNotWritten(t *testing.T) {
	for name, c := range map[string]struct {
		err error
		// want is the error of the change after it.
		want error
	}{
		"because of a full disk is not made, and the next one can be": {io.ErrShortWrite, nil},
		"but may be after a power cut, stops all changes":             {fileio.ErrNotDurable, ErrBroken},
	} {
		t.Run(name, func(t *testing.T) {
			s := openTest(t)
			testenv.Must(t, s.Put(testPlacement(0)))
			s.replace = func([]byte) error { return fmt.Errorf("write: %w", c.err) }
			if err := s.Put(testPlacement(1)); !errors.Is(err, c.err) || errors.Is(err, ErrBroken) != (c.want != nil) {
				t.Errorf("the change was answered with %v", err)
			}
			var last []byte
			s.replace = func(data []byte) error { last = data; return nil }
			if err := s.Put(testPlacement(2)); !errors.Is(err, c.want) {
				t.Errorf("the next change was answered with %v, want %v", err, c.want)
			}
			if c.want != nil && last != nil {
				t.Error("the next change was written")
			}
			if bytes.Contains(last, []byte(`"uid":"1"`)) {
				t.Errorf("the refused change was written with the next one: %s", last)
			}
		})
	}
}

func TestAClosedStoreChangesNothing(t *testing.T) {
	s := openTest(t)
	for range 2 {
		testenv.Must(t, s.Close())
	}
	if err := s.Put(testPlacement(0)); !errors.Is(err, ErrClosed) {
		t.Errorf("the change was answered with %v", err)
	}
}

// A file is a state, which is written again as it was read, or an error.
func FuzzParse(f *testing.F) {
	c := content{resources: []string{"x/a"}, loss: &Loss{Reason: "r"}}
	for i := range 2 {
		r, err := newRecord(testPlacement(i))
		testenv.Must(f, err)
		c.put(r)
	}
	data, err := c.format()
	testenv.Must(f, err)
	f.Add(data)
	f.Add(data[:len(data)/2])
	f.Add(sign([]byte(`{"version": 2}`)))
	f.Add(sign([]byte(`{"placements": [{"pod": {"uid": "a"}}]}`)))
	f.Fuzz(func(t *testing.T, data []byte) {
		c, loaded, err := parse(data)
		if err != nil {
			if c.placements != nil || loaded.Placements != nil {
				t.Errorf("both a state and the error %v", err)
			}
			return
		}
		again, err := c.format()
		testenv.Must(t, err)
		_, second, err := parse(again)
		if err != nil || len(second.Placements) != len(loaded.Placements) {
			t.Errorf("of %d placements %d are read again: %v", len(loaded.Placements), len(second.Placements), err)
		}
	})
}
