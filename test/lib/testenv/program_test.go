package testenv

import (
	"path/filepath"
	"sync"
	"testing"

	"gpu-cdi-plugin/test/lib/proc"
)

func TestAProgramThatWasJustWrittenRuns(t *testing.T) {
	dir := t.TempDir()
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			path := filepath.Join(dir, string(rune('a'+i)))
			for range 50 {
				WriteProgram(t, path, []byte("#!/bin/true\n"))
				if _, err := proc.Run(t.Context(), proc.Cmd{Args: []string{path}}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}
