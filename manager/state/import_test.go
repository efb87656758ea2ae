package state_test

import (
	"errors"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
)

// An import that a full disk refuses adds nothing, and the same one can succeed when there is space again.
func TestAnImportIsMadeAsAWhole(t *testing.T) {
	const size = 600_000 // bytes of the file system
	dir := t.TempDir()
	mountTmpfs(t, dir, "size=600k")
	path := filepath.Join(dir, "state.db")
	s, _ := open(t, path)
	put(t, s, placement(0))
	if err := s.SetResources(t.Context(), []string{"x/before"}); err != nil {
		t.Fatal(err)
	}
	expect := func(what string, pods []model.Placement, resources ...string) {
		t.Helper()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		var loaded state.Loaded
		s, loaded = open(t, path)
		if diff := cmp.Diff(state.Loaded{Placements: pods, Resources: resources}, loaded); diff != "" {
			t.Fatalf("%s (-want +got):\n%s", what, diff)
		}
	}
	err := s.Import(t.Context(), placements(2 * size / 339)[1:], []string{"x/after"})
	if !errors.Is(err, syscall.ENOSPC) || errors.Is(err, state.ErrBroken) {
		t.Fatalf("the error is %v, want ENOSPC", err)
	}
	expect("after the failure", placements(1), "x/before")
	if err := s.Import(t.Context(), placements(20)[1:], []string{"x/after"}); err != nil {
		t.Fatal(err)
	}
	expect("after the import", placements(20), "x/after")
}
