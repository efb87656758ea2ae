package demo

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"gpu-cdi-plugin/internal/elffile"
	"gpu-cdi-plugin/internal/ldcache"
)

// Root builds a root file system out of files of this host: what programs need to start, and no more.
type Root struct {
	dir   string
	libs  *ldcache.Cache
	flags int32
	size  int64
}

// NewRoot makes the directories of a root in dir, which must not exist.
func NewRoot(dir string) (*Root, error) {
	for _, d := range []string{"", "bin", "dev", "etc", "proc", "run", "sys", "tmp", "usr/bin", "usr/lib"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, fmt.Errorf("make a root file system: %w", err)
		}
	}
	flags, _ := ldcache.FlagsFor(runtime.GOARCH)
	r := &Root{dir: dir, libs: &ldcache.Cache{}, flags: flags}
	// A host without a loader cache has its libraries in the loader's own directories.
	if data, err := os.ReadFile("/etc/ld.so.cache"); err == nil {
		if r.libs, err = ldcache.Parse(data); err != nil {
			return nil, fmt.Errorf("read /etc/ld.so.cache: %w", err)
		}
	}
	return r, nil
}

// Size is how many bytes were copied.
func (r *Root) Size() int64 { return r.size }

// AddNeeds copies the loader and the libraries that a program or a library needs, and those that they need. Libraries
// that this host does not have are left out: the driver's own come with the container's devices.
func (r *Root) AddNeeds(file string) error {
	todo := []string{file}
	seen := map[string]bool{}
	for len(todo) > 0 {
		names, err := needs(todo[0])
		if err != nil {
			return fmt.Errorf("find what %s needs: %w", todo[0], err)
		}
		todo = todo[1:]
		for _, name := range names {
			path, ok := r.find(name)
			if !ok || seen[path] {
				continue
			}
			seen[path] = true
			if err := r.Copy(path, path); err != nil {
				return err
			}
			todo = append(todo, path)
		}
	}
	return nil
}

// Copy copies a file of this host, with what a link leads to, to a path in the root.
func (r *Root) Copy(file, as string) (err error) {
	to := filepath.Join(r.dir, as)
	defer func() {
		if err != nil {
			err = fmt.Errorf("copy %s into the root file system: %w", file, err)
		}
	}()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(file)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if errors.Is(err, fs.ErrExist) {
		return nil // another program needed it too
	}
	if err != nil {
		return err
	}
	n, err := io.Copy(out, in)
	r.size += n
	return errors.Join(err, out.Close())
}

// Link makes a symbolic link in the root.
func (r *Root) Link(target, as string) error {
	if err := os.Symlink(target, filepath.Join(r.dir, as)); err != nil {
		return fmt.Errorf("make a link in the root file system: %w", err)
	}
	return nil
}

// find is the path of a library of this host by the name that programs ask for; a path stays what it is.
func (r *Root) find(name string) (string, bool) {
	if filepath.IsAbs(name) {
		return name, true
	}
	if path, ok := r.libs.Lookup(name, r.flags); ok {
		return path, true
	}
	for _, dir := range []string{"/lib64", "/usr/lib64", "/lib", "/usr/lib"} {
		if path := filepath.Join(dir, name); exists(path) {
			return path, true
		}
	}
	return "", false
}

// needs lists what an ELF file asks the loader for, the loader itself included. A static program needs nothing.
func needs(file string) ([]string, error) {
	in, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return nil, err
	}
	f, err := elffile.Read(in, info.Size(), elffile.MachineOf(runtime.GOARCH))
	if err != nil {
		return nil, err
	}
	names, err := f.Needed()
	if err != nil {
		return nil, err
	}
	loader, err := f.Interp()
	if err != nil {
		return nil, err
	}
	if loader != "" {
		names = append(names, loader)
	}
	return names, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
