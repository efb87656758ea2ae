package image

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/proc"
)

// programs are the dynamic programs in a root file system with a C library.
var programs = []string{"sh", "cat", "ls", "mknod", "sleep", "true", "ldconfig"}

// glibc creates a root file system with the C library, Extra, and more further libraries.
func glibc(ctx context.Context, dir string, more int, cache bool) error {
	if err := errors.Join(makeSkeleton(dir), AddGlibc(dir)); err != nil {
		return err
	}
	if err := addExtra(ctx, dir); err != nil {
		return err
	}
	for i := range more {
		// ldconfig creates a link with the SONAME of each, and adds it to the cache.
		l := sim.Library{SONAME: fmt.Sprintf("libmany-%d.so.1", i)}
		file := fmt.Sprintf("usr/lib/%s-linux-gnu/libmany-%d.so.1.%d.0", machine(), i, i%7)
		if err := l.WriteELF(filepath.Join(dir, file)); err != nil {
			return err
		}
	}
	if !cache {
		return nil
	}
	return ldconfig(ctx, dir)
}

// distroless creates a root file system with the C library and no program that uses it.
func distroless(dir string) error {
	program, err := proc.Look("true")
	if err != nil {
		return err
	}
	return errors.Join(makeSkeleton(dir), addNeeded(dir, program))
}

// toLib64 makes Debian's C library in dir like that of distributions without multiarch directories: the libraries are
// in /usr/lib64, and the loader searches that.
func toLib64(dir string) error {
	debian := "/lib/" + machine() + "-linux-gnu/"
	from, to := filepath.Join(dir, "usr", debian), filepath.Join(dir, "usr/lib64")
	libraries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, l := range libraries {
		if err := os.Rename(filepath.Join(from, l.Name()), filepath.Join(to, l.Name())); err != nil {
			return err
		}
	}
	loaders, err := filepath.Glob(filepath.Join(to, "ld-linux-*.so.*"))
	if err != nil || len(loaders) != 1 {
		return fmt.Errorf("the loader in %s: found %q: %w", to, loaders, err)
	}
	data, err := os.ReadFile(loaders[0])
	if err != nil {
		return err
	}
	// The loader has the lengths of its directories' names, so these must not change.
	lib64 := []byte("/lib64" + strings.Repeat("/", len(debian)-len("/lib64")))
	if !bytes.Contains(data, []byte(debian)) {
		return fmt.Errorf("the loader does not name %s", debian)
	}
	return os.WriteFile(loaders[0], bytes.ReplaceAll(data, []byte(debian), lib64), 0o755)
}

// AddGlibc adds the C library, its loader and some programs to a directory, which may be a simulated node, so that
// programs can run with it as their root. It keeps existing configuration files of the loader.
func AddGlibc(dir string) error {
	for _, top := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := os.MkdirAll(filepath.Join(dir, "usr", top), 0o755); err != nil {
			return err
		}
		if _, err := os.Lstat(filepath.Join(dir, top)); err == nil {
			continue
		}
		if err := os.Symlink("usr/"+top, filepath.Join(dir, top)); err != nil {
			return err
		}
	}
	conf := map[string]string{
		"etc/ld.so.conf":               "include /etc/ld.so.conf.d/*.conf\n",
		"etc/ld.so.conf.d/distro.conf": fmt.Sprintf("/lib/%[1]s-linux-gnu\n/usr/lib/%[1]s-linux-gnu\n", machine()),
	}
	for name := range conf {
		if exists(filepath.Join(dir, name)) {
			delete(conf, name)
		}
	}
	if err := writeFiles(dir, conf); err != nil {
		return err
	}
	for _, name := range programs {
		// On Ubuntu ldconfig is a script that runs ldconfig.real.
		file, err := proc.Look(name + ".real")
		if err != nil {
			file, err = proc.Look(name)
		}
		if err != nil {
			return err
		}
		if err := AddProgram(dir, file, path.Join("/usr/bin", name)); err != nil {
			return err
		}
	}
	return nil
}

// AddProgram adds a program of this machine and the libraries that it needs to a root file system.
func AddProgram(dir, file, as string) error {
	if err := copyFile(file, filepath.Join(dir, as)); err != nil {
		return err
	}
	return addNeeded(dir, file)
}

// addNeeded adds the libraries that a program needs, directly or through others, at their paths on this machine.
func addNeeded(dir, file string) error {
	needed, err := neededBy(file)
	if err != nil {
		return err
	}
	for len(needed) > 0 {
		name := needed[0]
		needed = needed[1:]
		lib, err := findLibrary(name)
		if err != nil {
			return fmt.Errorf("libraries of %s: %w", file, err)
		}
		if exists(filepath.Join(dir, lib)) {
			continue
		}
		if err := copyFile(lib, filepath.Join(dir, lib)); err != nil {
			return err
		}
		more, err := neededBy(lib)
		if err != nil {
			return err
		}
		needed = append(needed, more...)
	}
	return nil
}

// neededBy lists the libraries that an ELF file needs, by name, and its loader, by path.
func neededBy(file string) (needed []string, err error) {
	f, err := elf.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	defer f.Close()
	if needed, err = f.ImportedLibraries(); err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	for _, p := range f.Progs {
		if p.Type != elf.PT_INTERP {
			continue
		}
		name := make([]byte, p.Filesz-1)
		if _, err := p.ReadAt(name, 0); err != nil {
			return nil, fmt.Errorf("read the loader's name in %s: %w", file, err)
		}
		needed = append(needed, string(name))
	}
	return needed, nil
}

// findLibrary finds a library on this machine by its name. It returns a path unchanged.
func findLibrary(name string) (string, error) {
	if path.IsAbs(name) {
		return name, nil
	}
	multiarch := machine() + "-linux-gnu"
	dirs := []string{"/lib/" + multiarch, "/usr/lib/" + multiarch, "/lib64", "/usr/lib64", "/lib", "/usr/lib"}
	for _, dir := range dirs {
		if p := path.Join(dir, name); exists(p) {
			return p, nil
		}
	}
	return "", fmt.Errorf("library %s is in none of %q", name, dirs)
}

// ldconfig writes /etc/ld.so.cache in a root file system with this machine's ldconfig.
func ldconfig(ctx context.Context, dir string) error {
	ldconfig, err := proc.Look("ldconfig")
	if err != nil {
		return err
	}
	_, err = proc.Output(ctx, ldconfig, "-r", dir)
	return err
}
