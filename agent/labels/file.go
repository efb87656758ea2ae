package labels

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/fileio"
)

// FileName is the name of the file in NFD's directory.
const FileName = "gpu-cdi-plugin"

// maxFile is NFD's limit for a file, in bytes.
const maxFile = 64 << 10

// WriteFile replaces the file at path if it has other labels. Without labels it removes the file. It does not make
// the directory: NFD does where it runs, and elsewhere an empty directory would stay behind.
func WriteFile(path string, l map[string]string) error {
	if len(l) == 0 {
		return RemoveFile(path)
	}
	want := format(l)
	if got, err := fileio.ReadFile(path, maxFile); err == nil && string(got) == want {
		return nil
	}
	err := fileio.Replace(path, []byte(want), 0o644)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("node feature discovery, which makes the directory, has not run on this node: %w", err)
	}
	if err != nil {
		return fmt.Errorf("write the node's labels: %w", err)
	}
	return nil
}

// RemoveFile removes the file at path, if there is one.
func RemoveFile(path string) error {
	if err := fileio.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the node's labels: %w", err)
	}
	return nil
}

// format returns labels as lines NAME=VALUE. Comments would be features to an old NFD.
func format(l map[string]string) string {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(l)) {
		fmt.Fprintf(&b, "%s=%s\n", name, l[name])
	}
	return b.String()
}
