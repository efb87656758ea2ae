package state_test

import (
	"fmt"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
)

// open opens a store that is closed at the end of the test.
func open(t testing.TB, path string) (*state.Store, state.Loaded) {
	t.Helper()
	s, loaded, err := state.Open(path, state.Options{Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s, loaded
}

func put(t testing.TB, s *state.Store, placements ...model.Placement) {
	t.Helper()
	for _, p := range placements {
		if err := s.Put(t.Context(), p); err != nil {
			t.Fatal(err)
		}
	}
}

// placement returns a pod with one GPU, of about the size of a real one.
func placement(i int) model.Placement {
	id := fmt.Sprintf("GPU-6ba7b810-9dad-11d1-80b4-%012d", i)
	response := make([]byte, 339)
	copy(response, id)
	return model.Placement{
		Pod: model.Pod{
			UID: fmt.Sprintf("6ba7b810-9dad-11d1-80b4-%012d", i), Namespace: "default", Name: fmt.Sprintf("pod-%d", i),
			Containers: []model.Container{{Name: "main", Limits: map[string]int{"nvidia.com/gpu": 1}}},
		},
		Allocations: []model.Allocation{{
			Container: "main", Resource: "nvidia.com/gpu", IDs: []string{id}, NUMA: map[string][]int{id: {i % 2}},
			Response: response,
		}},
		Admitted: time.Unix(1_700_000_000+int64(i), 5).UTC(),
		Caller:   model.Caller{UID: 1000, GID: 100, PID: 4000 + i},
	}
}

func placements(n int) []model.Placement {
	var list []model.Placement
	for i := range n {
		list = append(list, placement(i))
	}
	return list
}

// full has every field.
func full() model.Placement {
	p := placement(7)
	p.Pod.InitContainers = []model.Container{
		{Name: "init", Limits: map[string]int{"x/a": 3, "x/b": 0}}, {Name: "sidecar", Sidecar: true},
	}
	p.Pod.Containers = append(p.Pod.Containers, model.Container{Name: "idle"})
	p.Allocations = append(p.Allocations, model.Allocation{
		Container: "init", Resource: "x/a", IDs: []string{"", "1", "ü"}, NUMA: map[string][]int{"1": {0, 1, 7}, "ü": {0}},
	})
	p.Ended = []string{"init", ""}
	p.Admitted = time.Date(2026, 11, 22, 18, 0, 0, 123456789, time.FixedZone("", 3600))
	p.Caller = model.Caller{UID: -1, GID: 1 << 31, PID: 0}
	return p
}

func TestWhatIsPutIsThereAfterARestart(t *testing.T) {
	changed := placement(0)
	changed.Ended = []string{"main"}
	again := placement(1)
	for name, c := range map[string]struct {
		change func(*testing.T, *state.Store) error
		want   state.Loaded
	}{
		"nothing":    {func(*testing.T, *state.Store) error { return nil }, state.Loaded{}},
		"all fields": {puts(full()), state.Loaded{Placements: []model.Placement{full()}}},
		"an empty placement": {
			puts(model.Placement{}), state.Loaded{Placements: []model.Placement{{}}},
		},
		"some hundred in their order": {puts(placements(120)...), state.Loaded{Placements: placements(120)}},
		"a placement that changed, in its place": {
			puts(placement(0), placement(1), changed), state.Loaded{Placements: []model.Placement{changed, again}},
		},
		"without those deleted": {
			func(t *testing.T, s *state.Store) error {
				put(t, s, placements(120)...)
				for i := range 120 {
					if i%3 == 0 {
						continue
					}
					if err := s.Delete(t.Context(), placement(i).Pod.UID); err != nil {
						return err
					}
				}
				return s.Delete(t.Context(), "unknown")
			},
			state.Loaded{Placements: func() (want []model.Placement) {
				for i := 0; i < 120; i += 3 {
					want = append(want, placement(i))
				}
				return want
			}()},
		},
		"deleted and put again, at the end": {
			func(t *testing.T, s *state.Store) error {
				put(t, s, placements(2)...)
				if err := s.Delete(t.Context(), placement(0).Pod.UID); err != nil {
					return err
				}
				return s.Put(t.Context(), placement(0))
			},
			state.Loaded{Placements: []model.Placement{placement(1), placement(0)}},
		},
		"a response of several pages": {puts(large(20_000)), state.Loaded{Placements: []model.Placement{large(20_000)}}},
		"the resources": {
			func(t *testing.T, s *state.Store) error {
				if err := s.SetResources(t.Context(), []string{"x/a"}); err != nil {
					return err
				}
				return s.SetResources(t.Context(), []string{"x/b", "x/c"})
			},
			state.Loaded{Resources: []string{"x/b", "x/c"}},
		},
		"what may be missing": {
			func(t *testing.T, s *state.Store) error { return s.SetLoss(t.Context(), loss()) },
			state.Loaded{Loss: loss()},
		},
		"nothing missing any more": {
			func(t *testing.T, s *state.Store) error {
				if err := s.SetLoss(t.Context(), loss()); err != nil {
					return err
				}
				return s.SetLoss(t.Context(), nil)
			},
			state.Loaded{},
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "state.db")
			s, loaded := open(t, path)
			if diff := cmp.Diff(state.Loaded{}, loaded); diff != "" {
				t.Errorf("a new file (-want +got):\n%s", diff)
			}
			if err := c.change(t, s); err != nil {
				t.Fatal(err)
			}
			// Twice, since a restart writes the file anew.
			for range 2 {
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				if s, loaded = open(t, path); cmp.Diff(c.want, loaded) != "" {
					t.Fatalf("after the restart (-want +got):\n%s", cmp.Diff(c.want, loaded))
				}
			}
		})
	}
}

func puts(list ...model.Placement) func(*testing.T, *state.Store) error {
	return func(t *testing.T, s *state.Store) error {
		put(t, s, list...)
		return nil
	}
}

func large(size int) model.Placement {
	p := placement(1)
	p.Allocations[0].Response = make([]byte, size)
	return p
}

func loss() *state.Loss {
	return &state.Loss{
		Time: time.Unix(1_700_000_000, 0).UTC(), Reason: "a page", File: "/x", Cleared: map[string][]string{"x/a": {"1"}},
	}
}
