package doctor

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
)

// maxFile bounds a file that is read, in bytes.
const maxFile = 16 << 20

// at returns the path in this process of a path on the host. Links cannot lead out of the host's root.
func (f *facts) at(name string) string {
	root := f.Host.Root()
	if root == "/" {
		return name
	}
	resolved, err := securejoin.SecureJoin(root, name)
	if err != nil {
		return filepath.Join(root, name)
	}
	return resolved
}

// onHost returns the path in this process of a path on the host, for commands. Links in it are not resolved.
func (f *facts) onHost(name string) string { return filepath.Join(f.Host.Root(), name) }

// read returns a file of the host, or nil if there is none. If it cannot be read, that is noted.
func (f *facts) read(name string) []byte {
	data, err := fileio.ReadFile(f.at(name), maxFile)
	if err != nil && !isAbsent(err) {
		f.unread(name, err)
	}
	if err != nil {
		return nil
	}
	return data
}

// names returns the names in a directory of the host, sorted. If it cannot be read, that is noted.
func (f *facts) names(dir string) []string {
	entries, err := os.ReadDir(f.at(dir))
	if err != nil && !isAbsent(err) {
		f.unread(dir, err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// exists reports whether the host has a file.
func (f *facts) exists(name string) bool {
	_, err := os.Stat(f.at(name))
	return err == nil
}

func isAbsent(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) }

// programDirs are the directories of programs, in the order of a usual PATH.
var programDirs = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}

// program returns the path of a program of the host, which is a path or a name, or "" if there is none.
func (f *facts) program(name string) string {
	if path.IsAbs(name) {
		if f.exists(name) {
			return name
		}
		return ""
	}
	for _, dir := range programDirs {
		if name != "" && f.exists(path.Join(dir, name)) {
			return path.Join(dir, name)
		}
	}
	return ""
}

// sortedKeys returns the keys of a map, sorted.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
