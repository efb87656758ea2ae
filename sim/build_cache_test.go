package sim

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"
)

// Without a home directory the cache is where everybody may make directories, and what is in it is run.
func TestPrivateTempDirTakesOnlyItsOwn(t *testing.T) {
	for name, c := range map[string]struct {
		before func(dir string) error
		ok     bool
	}{
		"nothing there":              {func(string) error { return nil }, true},
		"one that it made before":    {func(dir string) error { return os.Mkdir(dir, 0o700) }, true},
		"one that others can change": {func(dir string) error { _ = os.Mkdir(dir, 0o700); return os.Chmod(dir, 0o777) }, false},
		"a link to elsewhere":        {func(dir string) error { return os.Symlink(t.TempDir(), dir) }, false},
		"a file":                     {func(dir string) error { return os.WriteFile(dir, nil, 0o600) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			temp := t.TempDir()
			want := filepath.Join(temp, "gpu-cdi-plugin-"+strconv.Itoa(os.Getuid()))
			if err := c.before(want); err != nil {
				t.Fatal(err)
			}
			dir, err := privateTempDir(temp)
			if (err == nil) != c.ok || c.ok && dir != want {
				t.Errorf("got %q, %v", dir, err)
			}
		})
	}
}
