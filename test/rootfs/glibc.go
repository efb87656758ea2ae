package rootfs

import (
	"context"
	"debug/elf"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"

	"gpu-cdi-plugin/test/lib/proc"
)

// programs are the dynamic programs of the images with a C library.
var programs = []string{"sh", "cat", "ls", "mknod", "sleep", "true", "ldconfig"}

// The sources of Extra and its library.
const (
	extraLibrary = "int extra(void) { return 42; }\n"
	extraProgram = "#include <stdio.h>\nint extra(void);\nint main(void) { printf(\"extra %d\\n\", extra()); return 0; }\n"
)

func glibc(ctx context.Context, dir string, cache bool) error {
	if err := skeleton(dir); err != nil {
		return err
	}
	if err := AddGlibc(dir); err != nil {
		return err
	}
	if err := addExtra(ctx, dir); err != nil {
		return err
	}
	if !cache {
		return nil
	}
	return Ldconfig(ctx, dir)
}

// FromHost makes an image in dir, an empty directory, with nothing but what any machine with glibc has: no compiler and
// no busybox is needed.
func FromHost(ctx context.Context, dir string) error {
	if err := skeleton(dir); err != nil {
		return fmt.Errorf("build a root file system: %w", err)
	}
	if err := AddGlibc(dir); err != nil {
		return fmt.Errorf("build a root file system: %w", err)
	}
	return Ldconfig(ctx, dir)
}

// AddGlibc adds the C library, its loader and the programs to a directory, which may be a simulated node: what a
// program needs that is run with that directory as its root. Files that are there stay.
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
		// Where ldconfig is a script around it, the program has this name (Ubuntu).
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

// AddProgram adds a program of this machine at a path of the image, and the libraries that it needs.
func AddProgram(dir, file, as string) error {
	if err := copyFile(file, filepath.Join(dir, as)); err != nil {
		return err
	}
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

// neededBy lists what an ELF file asks the loader for, its loader included, by name or by path.
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

// findLibrary is the path of a library of this machine, by its name or its path.
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

// addExtra compiles Extra and its library into the image.
func addExtra(ctx context.Context, dir string) error {
	src, err := os.MkdirTemp("", "extra-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(src)
	if err := writeFiles(src, map[string]string{"lib.c": extraLibrary, "main.c": extraProgram}); err != nil {
		return err
	}
	libs := filepath.Join(dir, extraDir)
	if err := os.MkdirAll(libs, 0o755); err != nil {
		return err
	}
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	lib := filepath.Join(libs, "libextra.so.1")
	if _, err := proc.Output(ctx, cc, "-shared", "-fPIC", "-Wl,-soname,libextra.so.1", "-o", lib, src+"/lib.c"); err != nil {
		return err
	}
	if _, err := proc.Output(ctx, cc, "-o", filepath.Join(dir, Extra), src+"/main.c", lib); err != nil {
		return err
	}
	return writeFiles(dir, map[string]string{"etc/ld.so.conf.d/extra.conf": "/" + extraDir + "\n"})
}

// Ldconfig writes the image's /etc/ld.so.cache with the machine's own ldconfig.
func Ldconfig(ctx context.Context, dir string) error {
	ldconfig, err := proc.Look("ldconfig")
	if err != nil {
		return err
	}
	_, err = proc.Output(ctx, ldconfig, "-r", dir)
	return err
}

// machine is the processor's name as multiarch directories have it.
func machine() string {
	switch runtime.GOARCH {
	case "amd64":
		return "x86_64"
	case "arm64":
		return "aarch64"
	default:
		return runtime.GOARCH
	}
}
