package state

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"
)

func openTest(t testing.TB, path string) (*Store, Loaded) {
	t.Helper()
	s, loaded, err := Open(path, Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, loaded
}

// transactions returns how many transactions a file has seen.
func transactions(t *testing.T, path string) uint64 {
	t.Helper()
	m := newImage(read(t, path))
	newest, ok := m.meta()
	if !ok {
		t.Fatal(m.damage)
	}
	return newest.txid
}

func TestConcurrentChangesAreWrittenTogether(t *testing.T) {
	const callers = 2000
	path := filepath.Join(t.TempDir(), "state.db")
	s, _ := openTest(t, path)
	before := transactions(t, path)
	start := make(chan struct{})
	var group errgroup.Group
	for i := range callers {
		group.Go(func() error {
			<-start
			p := testPlacement(i)
			if err := s.Put(t.Context(), p); err != nil || i%2 == 0 {
				return err
			}
			if i%4 == 1 {
				return s.Delete(t.Context(), p.Pod.UID)
			}
			p.Ended = []string{"main"}
			return s.Put(t.Context(), p)
		})
	}
	close(start)
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	if n := transactions(t, path) - before; n > callers/4 {
		t.Errorf("%d changes of %d callers were %d transactions", 3*callers/2, callers, n)
	} else {
		t.Logf("%d changes of %d callers were %d transactions", 3*callers/2, callers, n)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	_, loaded := openTest(t, path)
	ended := map[string]int{} // the numbers of ended containers by UID
	for _, p := range loaded.Placements {
		ended[p.Pod.UID] = len(p.Ended)
	}
	for i := range callers {
		n, there := ended[testPlacement(i).Pod.UID]
		if there != (i%4 != 1) || there && n != i%2 {
			t.Errorf("pod %d is there: %v, with %d ended containers", i, there, n)
		}
	}
}

// A change whose context ends, or whose store is closed, was either made, or returned an error and was not.
func TestTheAnswerIsTheTruth(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s, _ := openTest(t, path)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var group sync.WaitGroup
	var mu sync.Mutex
	made, refused := map[string]bool{}, map[string]error{}
	for caller := range 40 {
		group.Go(func() {
			callerContext := t.Context()
			if caller%2 == 0 {
				callerContext = ctx
			}
			for i := 0; ; i++ {
				p := testPlacement(1000*caller + i)
				err := s.Put(callerContext, p)
				mu.Lock()
				if err != nil {
					refused[p.Pod.UID] = err
					mu.Unlock()
					return
				}
				made[p.Pod.UID] = true
				switch len(made) {
				case 200:
					cancel()
				case 400:
					group.Go(func() { _ = s.Close() })
				}
				mu.Unlock()
			}
		})
	}
	group.Wait()
	_, loaded := openTest(t, path)
	for _, p := range loaded.Placements {
		if !made[p.Pod.UID] {
			t.Errorf("%s is there, and the answer was: %v", p.Pod.UID, refused[p.Pod.UID])
		}
		delete(made, p.Pod.UID)
	}
	if len(made) > 0 {
		t.Errorf("these were acknowledged and are lost: %v", made)
	}
	ends := map[error]int{}
	for _, err := range refused {
		ends[errors.Unwrap(err)]++
	}
	if ends[context.Canceled] != 20 || ends[ErrClosed] != 20 {
		t.Errorf("the callers ended with %v", ends)
	}
}

// A cancelled context is no reason to try.
func TestAnEndedContextChangesNothing(t *testing.T) {
	s, _ := openTest(t, filepath.Join(t.TempDir(), "state.db"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for i := range 50 {
		if err := s.Put(ctx, testPlacement(i)); !errors.Is(err, context.Canceled) {
			t.Fatalf("put %d: %v", i, err)
		}
	}
}
