package state_test

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
	"gpu-cdi-plugin/test/lib/testenv"
)

func placement(i int) model.Placement {
	return model.Placement{
		Pod: model.Pod{
			UID: fmt.Sprintf("6ba7b810-9dad-11d1-80b4-%012d", i), Namespace: "default", Name: fmt.Sprintf("pod-%d", i),
			InitContainers: []model.Container{{Name: "side", Sidecar: true}},
			Containers:     []model.Container{{Name: "main", Limits: map[string]int{"nvidia.com/gpu": 1}}},
		},
		Allocations: []model.Allocation{{
			Container: "main", Resource: "nvidia.com/gpu", IDs: []string{fmt.Sprintf("GPU-%d", i)},
			NUMA: map[string][]int{fmt.Sprintf("GPU-%d", i): {0, 1}}, Response: []byte{0, 0xff, '"', '\n'},
		}},
		Admitted: time.Date(2026, 11, 25, 22, 0, 0, i, time.FixedZone("CET", 3600)),
		Caller:   model.Caller{UID: 1000, GID: 100, PID: 4711},
	}
}

func placements(count int) (list []model.Placement) {
	for i := range count {
		list = append(list, placement(i))
	}
	return list
}

func loss() *state.Loss {
	return &state.Loss{
		Time: time.Unix(1_700_000_000, 0).UTC(), Reason: "a reason", File: "/x",
		Cleared: map[string][]string{"x/a": {"1"}},
	}
}

func open(t testing.TB, path string) (*state.Store, state.Loaded) {
	t.Helper()
	s, loaded, err := state.Open(path, slog.New(slog.DiscardHandler))
	testenv.Must(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s, loaded
}

func put(t *testing.T, s *state.Store, list ...model.Placement) {
	t.Helper()
	for _, p := range list {
		testenv.Must(t, s.Put(p))
	}
}

func closed(t *testing.T, s *state.Store) {
	t.Helper()
	testenv.Must(t, s.Close())
}

func TestARestartFinds(t *testing.T) {
	ended := placement(1)
	ended.Ended = []string{"main"}
	for name, c := range map[string]struct {
		change func(*state.Store) error
		want   state.Loaded
	}{
		"nothing": {func(*state.Store) error { return nil }, state.Loaded{}},
		"a placement that was replaced, at its place": {
			func(s *state.Store) error { return s.Put(ended) },
			state.Loaded{Placements: []model.Placement{placement(0), ended, placement(2)}},
		},
		"the placements that were not deleted": {
			func(s *state.Store) error {
				if err := s.Delete(placement(1).Pod.UID); err != nil {
					return err
				}
				return s.Delete("unknown")
			},
			state.Loaded{Placements: []model.Placement{placement(0), placement(2)}},
		},
		"a placement that was deleted and put again, at the end": {
			func(s *state.Store) error {
				if err := s.Delete(placement(0).Pod.UID); err != nil {
					return err
				}
				return s.Put(placement(0))
			},
			state.Loaded{Placements: []model.Placement{placement(1), placement(2), placement(0)}},
		},
		"the last names of the resources": {
			func(s *state.Store) error {
				if err := s.SetResources([]string{"x/a"}); err != nil {
					return err
				}
				return s.SetResources([]string{"x/b", "x/c"})
			},
			state.Loaded{Placements: placements(3), Resources: []string{"x/b", "x/c"}},
		},
		"a loss": {
			func(s *state.Store) error { return s.SetLoss(loss()) },
			state.Loaded{Placements: placements(3), Loss: loss()},
		},
		"no loss after an import": {
			func(s *state.Store) error {
				if err := s.SetLoss(loss()); err != nil {
					return err
				}
				return s.Import(placements(5)[3:], []string{"x/a"})
			},
			state.Loaded{Placements: placements(5), Resources: []string{"x/a"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "placements.json")
			s, loaded := open(t, path)
			if diff := cmp.Diff(state.Loaded{}, loaded); diff != "" {
				t.Errorf("a new file (-want +got):\n%s", diff)
			}
			if name != "nothing" {
				put(t, s, placements(3)...)
			}
			testenv.Must(t, c.change(s))
			closed(t, s)
			_, loaded = open(t, path)
			if diff := cmp.Diff(c.want, loaded, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("after the restart (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTheFileBeforeIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "placements.json")
	s, _ := open(t, path)
	put(t, s, placement(0))
	before := readFile(t, path)
	put(t, s, placement(1))
	if diff := cmp.Diff(before, readFile(t, path+".previous")); diff != "" {
		t.Errorf("the file before (-want +got):\n%s", diff)
	}
	if !strings.Contains(before, "\n"+`{"pod":{"uid":"6ba7b810-9dad-11d1-80b4-000000000000"`) {
		t.Errorf("a placement has no line of its own:\n%s", before)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("the file is %v, %v", info.Mode(), err)
	}
}

func TestASecondManagerWaitsForTheFirst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "placements.json")
	first, _ := open(t, path)
	put(t, first, placement(0))
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		_, _, err := state.Open(path, slog.New(slog.DiscardHandler))
		expectError(t, err, state.ErrLocked, "")
		if waited := time.Since(begin); waited < time.Second || waited > 10*time.Second {
			t.Errorf("it waited for %s", waited)
		}
		time.AfterFunc(time.Second, func() { closed(t, first) })
		second, loaded := open(t, path)
		if diff := cmp.Diff(placements(1), loaded.Placements); diff != "" {
			t.Errorf("placements (-want +got):\n%s", diff)
		}
		closed(t, second)
	})
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	testenv.Must(t, err)
	return string(data)
}
