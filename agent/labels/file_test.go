package labels

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "features.d", FileName)
	testenv.Must(t, RemoveFile(path), WriteFile(path, nil))
	err := WriteFile(path, map[string]string{"nvidia.com/a": ""})
	if want := "node feature discovery, which makes the directory, has not run on this node"; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("without a directory: want an error with %q, got %v", want, err)
	}
	testenv.Must(t, os.Mkdir(filepath.Dir(path), 0o755)) // fails if there is one
	read := func() (string, fs.FileInfo) {
		t.Helper()
		data, err := os.ReadFile(path)
		testenv.Must(t, err)
		info, err := os.Stat(path)
		testenv.Must(t, err)
		return string(data), info
	}
	l := map[string]string{"nvidia.com/b": "2", "nvidia.com/a": ""}
	testenv.Must(t, WriteFile(path, l))
	text, first := read()
	if text != "nvidia.com/a=\nnvidia.com/b=2\n" || first.Mode() != 0o644 {
		t.Errorf("mode %v, text:\n%s", first.Mode(), text)
	}
	testenv.Must(t, WriteFile(path, l))
	if _, again := read(); !os.SameFile(first, again) {
		t.Error("the file was replaced by the same")
	}
	testenv.Must(t, WriteFile(path, map[string]string{"nvidia.com/b": "3"}))
	if text, _ := read(); text != "nvidia.com/b=3\n" {
		t.Errorf("text after a change:\n%s", text)
	}
	testenv.Must(t, WriteFile(path, nil))
	left, err := os.ReadDir(filepath.Dir(path))
	testenv.Must(t, err)
	if len(left) > 0 {
		t.Errorf("without labels there are %v", left)
	}
}
