package driver

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"
)

// root is the directory below which a driver is installed. Links are resolved as if that directory were "/", so that
// links in a driver container stay in the container.
type root struct {
	dir string
	// dirs caches the real paths of directories, since a search looks up hundreds of files in a few directories.
	dirs map[string]string
}

func newRoot(dir string) root { return root{dir, map[string]string{}} }

// resolve resolves a clean path in the root to a path on the host. The file need not exist.
func (r root) resolve(path string) (string, error) {
	real, _, err := r.stat(path)
	if real == "" {
		return "", err
	}
	return real, nil
}

// stat resolves a path and returns the file's information. The error wraps fs.ErrNotExist if there is no file.
func (r root) stat(path string) (real string, info fs.FileInfo, err error) {
	dir, err := r.resolveDir(filepath.Dir(path))
	if err != nil {
		return "", nil, err
	}
	real = filepath.Join(dir, filepath.Base(path))
	info, err = os.Lstat(real)
	if err == nil && info.Mode().Type() == fs.ModeSymlink {
		if real, err = r.follow(path); err != nil {
			return "", nil, err
		}
		info, err = os.Lstat(real)
	}
	if errors.Is(err, unix.ENOTDIR) {
		err = fmt.Errorf("%w: %w", fs.ErrNotExist, err)
	}
	return real, info, err
}

func (r root) resolveDir(dir string) (string, error) {
	if real, ok := r.dirs[dir]; ok {
		return real, nil
	}
	real, err := r.follow(dir)
	if err != nil {
		return "", err
	}
	r.dirs[dir] = real
	return real, nil
}

func (r root) follow(path string) (string, error) {
	real, err := securejoin.SecureJoin(r.dir, path)
	if err != nil {
		return "", fmt.Errorf("follow links under %s: %w", r.dir, err)
	}
	return real, nil
}

// has reports whether a path on the host is below the root.
func (r root) has(hostPath string) bool {
	return r.dir == "/" || strings.HasPrefix(hostPath, r.dir+"/")
}

// inside returns the path in the root for the path of a file on the host.
func (r root) inside(hostPath string) string {
	if r.dir == "/" {
		return hostPath
	}
	return strings.TrimPrefix(hostPath, r.dir)
}

// names lists a directory, sorted.
func (r root) names(dir string) (real string, names []string, err error) {
	if real, err = r.resolveDir(dir); err != nil {
		return "", nil, err
	}
	names, err = readNames(real)
	return real, names, err
}

// readNames lists a directory, sorted.
func readNames(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, nil
}

// under joins a directory in the root and a relative path.
func under(dir, rel string) string { return filepath.Join("/", dir, rel) }

// isPlain reports whether a path is clean and has none of the characters that separate the parts of the hook's
// arguments.
func isPlain(p string) bool { return path.Clean(p) == p && !strings.ContainsAny(p, ",=:\x00\n") }
