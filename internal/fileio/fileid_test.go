package fileio

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestOfChangesWithTheFile(t *testing.T) {
	for name, c := range map[string]struct {
		watch string // the file whose ID is taken: "file", or "dir" with "dir/entry"
		act   func(dir string) error
		gone  bool
	}{
		"other content of the same size": {
			watch: "file",
			act:   func(dir string) error { return os.WriteFile(dir+"/file", []byte("CONTENT"), 0o600) },
		},
		"another mode": {
			watch: "file", act: func(dir string) error { return os.Chmod(dir+"/file", 0o644) },
		},
		"a second name": {
			watch: "file", act: func(dir string) error { return os.Link(dir+"/file", dir+"/too") },
		},
		"another file in its place": {
			watch: "file", act: func(dir string) error { return os.Rename(dir+"/dir/entry", dir+"/file") },
		},
		"removed": {
			watch: "file", gone: true, act: func(dir string) error { return os.Remove(dir + "/file") },
		},
		"a new entry": {
			watch: "dir", act: func(dir string) error { return createFile(dir + "/dir/new") },
		},
		"an entry removed": {
			watch: "dir", act: func(dir string) error { return os.Remove(dir + "/dir/entry") },
		},
		"an entry replaced": {
			watch: "dir", act: func(dir string) error { return os.Rename(dir+"/file", dir+"/dir/entry") },
		},
		"the directory removed": {
			watch: "dir", gone: true, act: func(dir string) error { return os.RemoveAll(dir + "/dir") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			err := errors.Join(createFile(dir+"/file"), os.Mkdir(dir+"/dir", 0o700), createFile(dir+"/dir/entry"))
			testenv.Must(t, err)
			path := filepath.Join(dir, c.watch)
			before := IDOf(path)
			time.Sleep(20 * time.Millisecond) // the kernel's clock for file times advances every 10 ms at least
			if before.IsZero() || IDOf(path) != before {
				t.Fatalf("%+v and then %+v without a change", before, IDOf(path))
			}
			testenv.Must(t, c.act(dir))
			after := IDOf(path)
			if after == before || after.IsZero() != c.gone {
				t.Errorf("%+v before, %+v afterwards", before, after)
			}
		})
	}
}

func createFile(path string) error { return os.WriteFile(path, []byte("content"), 0o600) }

func TestOfIsZeroWithoutAFile(t *testing.T) {
	if id := IDOf(filepath.Join(t.TempDir(), "none")); !id.IsZero() {
		t.Errorf("a missing file has the ID %+v", id)
	}
	if id := IDOf(""); !id.IsZero() {
		t.Errorf("an empty path has the ID %+v", id)
	}
}
