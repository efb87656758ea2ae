package install

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"time"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
)

// The limits of what is read: the bytes of a file, and the number of files.
const (
	maxFile  = 1 << 20
	maxFiles = 1_000
)

// Host has the contents of the files that engines read, by their paths on the host.
type Host struct {
	root  string
	files map[string]*File
	ids   map[string]fileio.ID
	// isDir and isFile report whether a path leads to a directory or a regular file.
	isDir, isFile func(path string) bool
	// leadsTo returns the path to which the links of a path lead. It is the path itself if there is nothing.
	leadsTo func(path string) string
}

// Read reads the files of the engines below a root directory, and the link beside the hook if it exists. Links cannot
// lead out of root. The path of the hook is one on the host, like all others. A file that is neither regular nor a link
// to a regular file is an error.
func Read(root string, engines []string, hook string) (*Host, error) {
	h := &Host{root: root, files: map[string]*File{}, ids: map[string]fileio.ID{}}
	h.isDir = func(name string) bool { return h.mode(name).IsDir() }
	h.isFile = func(name string) bool { return h.mode(name).IsRegular() }
	h.leadsTo = func(name string) string { return target(root, name) }
	if err := h.read(recordFile); err != nil {
		return nil, err
	}
	r, err := h.record()
	if err != nil {
		return nil, err
	}
	var patterns []string
	if hook != "" {
		link := path.Join(path.Dir(hook), wrapperName)
		patterns = append(patterns, link, link+"-*")
	}
	for name := range r.Digests {
		if isWrapper(name) {
			patterns = append(patterns, name)
		}
	}
	for _, engine := range Engines() {
		if slices.Contains(engines, engine.Name) {
			patterns = append(append(patterns, runtimeFile(engine.Name)), engine.reads...)
		}
	}
	if err := h.readAll(patterns); err != nil {
		return nil, err
	}
	if slices.Contains(engines, "containerd") {
		for seen := 0; seen < len(h.files); { // imported files can have imports
			seen = len(h.files)
			if err := h.readAll(containerdImports(h.files)); err != nil {
				return nil, err
			}
		}
	}
	return h, nil
}

// target returns the path to which the links of a path below a root directory lead, or the path itself.
func target(root, name string) string {
	at, err := securejoin.SecureJoin(root, name)
	if err != nil {
		return name
	}
	return at
}

// mode returns the type of what a path leads to, which is neither a directory nor a regular file if there is nothing.
func (h *Host) mode(name string) fs.FileMode {
	at, err := Resolve(h.root, name)
	if err != nil {
		return fs.ModeIrregular
	}
	info, err := os.Stat(at)
	if err != nil {
		return fs.ModeIrregular
	}
	return info.Mode()
}

// readAll reads the files that match patterns and were not read before.
func (h *Host) readAll(patterns []string) error {
	for _, pattern := range patterns {
		at, err := h.real(pattern)
		if err != nil {
			return err
		}
		matches, err := filepath.Glob(at)
		if err != nil {
			return fmt.Errorf("list %s: %w", pattern, err)
		}
		for _, match := range matches {
			name := path.Join(path.Dir(pattern), path.Base(match))
			if h.files[name] != nil {
				continue
			}
			if len(h.files) == maxFiles {
				return fmt.Errorf("read %s: the engines have more than %d files", name, maxFiles)
			}
			if err := h.read(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// real returns the path in this process of a path on the host; for a link, that of the link itself.
func (h *Host) real(name string) (string, error) {
	dir, err := Resolve(h.root, path.Dir(name))
	return filepath.Join(dir, path.Base(name)), err
}

// Resolve returns the path in this process of a file below a root directory. Links cannot lead out of root. Only root
// can make links in the directories that are written to.
func Resolve(root, name string) (string, error) {
	if root == "/" {
		return name, nil
	}
	resolved, err := securejoin.SecureJoin(root, name)
	if err != nil {
		return "", fmt.Errorf("resolve %s in %s: %w", name, root, err)
	}
	return resolved, nil
}

func (h *Host) read(name string) error {
	at, err := h.real(name)
	if err != nil {
		return err
	}
	link, err := os.Readlink(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	f := &File{Link: link}
	if !isWrapper(name) {
		h.ids[name] = fileio.IDOf(at)
		if link == "/dev/null" { // systemd and others take such a file as an empty one
			h.files[name] = f
			return nil
		}
		target, err := Resolve(h.root, name)
		if err != nil {
			return err
		}
		if f.Data, err = fileio.ReadFile(target, maxFile); err != nil {
			return fmt.Errorf("read %s: %w", name, err)
		}
	}
	h.files[name] = f
	return nil
}

// lockFile is locked while the engines' files are read and changed. Its directory exists on every host.
const lockFile = "/run/gpu-cdi-plugin-hook-install.lock"

// lockWait is how long Lock waits. Other processes hold the lock for milliseconds.
const lockWait = 10 * time.Second

// Lock prevents other processes from changing the files below a root directory with a Plan. Call it before Read, and
// `release` after Apply. If another process holds the lock for longer than 10 s, the error wraps fileio.ErrHeld.
func Lock(root string) (release func() error, err error) {
	dir, err := Resolve(root, path.Dir(lockFile))
	if err != nil {
		return nil, err
	}
	if err := fileio.MakeDir(dir); err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(lockWait); ; time.Sleep(20 * time.Millisecond) {
		l, err := fileio.AcquireLock(filepath.Join(dir, path.Base(lockFile)))
		if err == nil {
			return l.Release, nil
		}
		if !errors.Is(err, fileio.ErrHeld) || time.Now().After(deadline) {
			return nil, err
		}
	}
}

// ReadOnlyError means that a directory that must be written to is on a read-only file system.
type ReadOnlyError struct{ Dir string }

func (e *ReadOnlyError) Error() string { return e.Dir + " is on a read-only file system" }

// Check returns an error if a directory cannot be written to, without a change.
func (p *Plan) Check() error {
	for _, c := range p.Changes {
		at, err := p.host.real(c.Path)
		if err != nil {
			return err
		}
		dir := filepath.Dir(at)
		for err = checkDir(dir); errors.Is(err, fs.ErrNotExist); err = checkDir(dir) {
			dir = filepath.Dir(dir)
		}
		if err != nil {
			return fmt.Errorf("write %s: %w", c.Path, err)
		}
	}
	return nil
}

func checkDir(dir string) error {
	info, err := os.Stat(dir)
	if err == nil && !info.IsDir() {
		err = unix.ENOTDIR
	}
	if err == nil {
		err = unix.Faccessat(unix.AT_FDCWD, dir, unix.W_OK, unix.AT_EACCESS)
	}
	switch {
	case errors.Is(err, unix.EROFS):
		return &ReadOnlyError{dir}
	case err == nil || errors.Is(err, fs.ErrNotExist):
		return err
	}
	return fmt.Errorf("the directory %s: %w", dir, err)
}

// Apply makes all changes of a plan or none: if one fails, earlier ones are reverted. It creates missing directories.
// If a file has changed since Read, that is an error; if it has changed since Apply wrote it, it is not reverted. The
// caller must hold the Lock.
func (p *Plan) Apply() error {
	if err := p.Check(); err != nil {
		return err
	}
	for i, c := range p.Changes {
		if err := p.host.apply(c); err != nil {
			for _, done := range slices.Backward(p.Changes[:i]) {
				err = errors.Join(err, p.host.apply(Change{done.Path, done.After, done.Before}))
			}
			return errors.Join(err, p.host.rmdirs(p.mkdirs))
		}
	}
	return p.host.rmdirs(p.rmdirs)
}

// rmdirs removes those of the directories that are empty, the longest paths first.
func (h *Host) rmdirs(dirs []string) error {
	var failed error
	for _, dir := range slices.Backward(slices.Sorted(slices.Values(dirs))) {
		if err := h.rmdir(dir); err != nil {
			failed = errors.Join(failed, &fs.PathError{Op: "remove", Path: dir, Err: err})
		}
	}
	return failed
}

func (h *Host) rmdir(dir string) error {
	at, err := h.real(dir)
	if err != nil {
		return err
	}
	err = unix.Rmdir(at)
	if slices.Contains([]error{unix.ENOENT, unix.ENOTDIR, unix.ENOTEMPTY, unix.EEXIST}, err) {
		return nil
	}
	return err
}

func (h *Host) apply(c Change) error {
	at, err := h.real(c.Path)
	if err != nil {
		return err
	}
	if isWrapper(c.Path) {
		return h.applyLink(at, c)
	}
	if fileio.IDOf(at) != h.ids[c.Path] {
		return fmt.Errorf("write %s: it has changed since it was read", at)
	}
	err = h.applyFile(at, c)
	h.ids[c.Path] = fileio.IDOf(at)
	return err
}

func (h *Host) applyFile(at string, c Change) error {
	if c.After == nil {
		return fileio.Remove(at)
	}
	if err := fileio.MakeDirs(filepath.Dir(at)); err != nil {
		return err
	}
	if c.Before == nil {
		return fileio.Replace(at, c.After.Data, 0o644)
	}
	dir, err := trust.OpenDir(filepath.Dir(at))
	if err != nil {
		return fmt.Errorf("write %s: %w", at, err)
	}
	defer dir.Close()
	info, err := os.Lstat(at)
	if err != nil {
		return err
	}
	return fileio.ReplaceLike(dir, filepath.Base(at), c.After.Data, info)
}

// applyLink makes the link of the wrapper, or removes it if its target is unchanged.
func (h *Host) applyLink(at string, c Change) error {
	if c.After == nil {
		if link, err := os.Readlink(at); err != nil || link != c.Before.Link {
			return errors.Join(fmt.Errorf("remove %s: it has changed since it was read", at), err)
		}
		return fileio.Remove(at)
	}
	if err := fileio.MakeDirs(filepath.Dir(at)); err != nil {
		return err
	}
	dir, err := trust.OpenDir(filepath.Dir(at))
	if err != nil {
		return fmt.Errorf("link %s: %w", at, err)
	}
	defer dir.Close()
	if err := unix.Symlinkat(c.After.Link, int(dir.Fd()), filepath.Base(at)); err != nil {
		return &fs.PathError{Op: "link", Path: at, Err: err}
	}
	return nil
}
