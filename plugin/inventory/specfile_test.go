package inventory

import (
	"path/filepath"
	"testing"
)

func TestAFileThatIsGoneAsSoonAsItIsWrittenIsNotWhatIsOnDisk(t *testing.T) {
	f := &specFile{path: filepath.Join(t.TempDir(), "nvidia.com-gpu.json")}
	f.seen = written(f.path)
	if f.untouched() {
		t.Error("a file that somebody removed counts as untouched")
	}
}
