package node

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gpu-cdi-plugin/cdi"
)

func TestAFileThatIsGoneAsSoonAsItIsWrittenIsNotWhatIsOnDisk(t *testing.T) {
	f := &specFile{path: filepath.Join(t.TempDir(), "nvidia.com-gpu.json")}
	f.seen = written(f.path)
	if f.untouched() {
		t.Error("a file that somebody removed counts as untouched")
	}
}

// Long after the last change requests only ask the file that was kept.
func TestSpecHasNoticesWhatHappensToASpecThatWasLeftAlone(t *testing.T) {
	for name, do := range map[string]func(path string) error{
		"its directory moved away": func(p string) error {
			defer time.Sleep(lookTime)
			return os.Rename(filepath.Dir(p), filepath.Dir(p)+".old")
		},
		"removed":    os.Remove,
		"moved away": func(p string) error { return os.Rename(p, p+".old") },
		"edited":     func(p string) error { return os.WriteFile(p, []byte("{}"), 0o644) },
		"replaced": func(p string) error {
			return errors.Join(os.WriteFile(p+".new", []byte("{}"), 0o644), os.Rename(p+".new", p))
		},
		"made private": func(p string) error { return os.Chmod(p, 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBed(t, "workstation")
			b.start()
			has := func() {
				t.Helper()
				must(t, b.inv.SpecHas(cdi.DefaultKind+"=0"))
			}
			time.Sleep(200 * time.Millisecond)
			for range 2 { // the first keeps the file, the second asks it
				has()
			}
			if b.inv.file.kept.ID() != b.inv.file.seen {
				t.Fatal("the file is not kept")
			}
			must(t, do(b.path))
			time.Sleep(200 * time.Millisecond) // nobody asks before the change is old, too
			has()
			info, err := os.Stat(b.path)
			must(t, err)
			if len(b.disk()) == 0 || info.Mode().Perm() != 0o644 {
				t.Errorf("the spec was not put right: %v, %v", b.disk(), info.Mode())
			}
		})
	}
}
