package sim

import (
	"bytes"
	"context"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

//go:embed lib/*.c lib/*.h
var librarySources embed.FS

// The compiled files, in the cache directory.
const (
	builtLibrary = "libnvidia-ml.so"
	builtSandbox = "libnvidia-sandboxutils.so"
	builtSMI     = "nvidia-smi"

	builtMPSControl = "nvidia-cuda-mps-control"
	builtMPSServer  = "nvidia-cuda-mps-server"
	builtMPSClient  = "cuda-mps-client"
)

// product is a compiled file. If source is empty, it is compiled from all sources that no other product has.
type product struct {
	name, source string
	flags        []string
}

var (
	commonFlags = []string{"-std=c11", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"}
	products    = []product{
		{builtLibrary, "", []string{"-shared", "-Wl,-soname,libnvidia-ml.so.1", "-Wl,-z,now", "-lpthread", "-ldl"}},
		{builtSandbox, "sandboxutils.c", []string{"-shared", "-Wl,-soname,libnvidia-sandboxutils.so.1", "-Wl,-z,now"}},
		{builtSMI, "smi.c", []string{"-ldl"}},
		{builtMPSControl, "mps_control.c", nil},
		{builtMPSServer, "mps_server.c", []string{"-ldl"}},
		{builtMPSClient, "mps_client.c", []string{"-ldl"}},
	}
)

// compile compiles the libraries and programs, once for each user, and returns the directory with the results.
//
// The directory's name is a hash of everything that the results depend on. It is filled under another name and then
// renamed, so that it is either complete or absent.
func compile(ctx context.Context, cacheDir, compiler string) (string, error) {
	cc, err := findCompiler(compiler)
	if err != nil {
		return "", err
	}
	key, err := buildKey(ctx, cc)
	if err != nil {
		return "", err
	}
	if cacheDir == "" {
		user, err := os.UserCacheDir()
		if err != nil { // a container or a service may have no home directory
			if user, err = privateTempDir(os.TempDir()); err != nil {
				return "", fmt.Errorf("%w: %w", ErrNoCache, err)
			}
		}
		cacheDir = filepath.Join(user, "gpu-cdi-plugin", "sim")
	}
	dir := filepath.Join(cacheDir, key)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := buildOnce(ctx, cc, cacheDir, dir); err != nil {
		return "", fmt.Errorf("compile the simulated library: %w", err)
	}
	return dir, nil
}

// buildOnce compiles while it holds a lock, so that only one process does the work.
func buildOnce(ctx context.Context, cc []string, cacheDir, dir string) (err error) {
	if err := os.MkdirAll(cacheDir, 0o755); err != nil {
		return fmt.Errorf("%w: %w", ErrNoCache, err)
	}
	lock, err := os.OpenFile(filepath.Join(cacheDir, "lock"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoCache, err)
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	if err := flock(lock); err != nil {
		return err
	}
	if _, err := os.Stat(dir); err == nil {
		return nil // another process has compiled meanwhile
	}
	return buildInto(ctx, cc, cacheDir, dir)
}

// privateTempDir returns a directory under temp that is the same for every run of this user. Its files are loaded and
// run, and other users can guess its name and create it first, so it is an error if another user can write to it.
func privateTempDir(temp string) (string, error) {
	dir := filepath.Join(temp, fmt.Sprintf("gpu-cdi-plugin-%d", os.Getuid()))
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return "", err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok || !info.IsDir() || int(owner.Uid) != os.Getuid() || info.Mode().Perm()&0o022 != 0 {
		return "", fmt.Errorf("%s is not a directory that only this user can write to", dir)
	}
	return dir, nil
}

// findCompiler returns the command of the C compiler: a program and its arguments.
func findCompiler(compiler string) ([]string, error) {
	if compiler == "" {
		compiler = os.Getenv("CC")
	}
	cc := strings.Fields(compiler)
	if len(cc) == 0 {
		cc = []string{"cc"}
	}
	path, err := exec.LookPath(cc[0])
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoCompiler, err)
	}
	cc[0] = path
	return cc, nil
}

// buildKey returns a hash of the sources, the flags and the compiler's version.
func buildKey(ctx context.Context, cc []string) (string, error) {
	version, err := exec.CommandContext(ctx, cc[0], append(cc[1:], "--version")...).Output()
	if err != nil {
		return "", fmt.Errorf("get the version of %s: %w", cc[0], err)
	}
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %q %q\n", cc, version, commonFlags, products)
	files, err := fs.Glob(librarySources, "lib/*")
	if err != nil {
		return "", err
	}
	for _, file := range files {
		data, err := librarySources.ReadFile(file)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %d\n%s", file, len(data), data)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:16]), nil
}

func buildInto(ctx context.Context, cc []string, cacheDir, dir string) (err error) {
	work, err := os.MkdirTemp(cacheDir, ".build-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
	sources, out := filepath.Join(work, "src"), filepath.Join(work, "out")
	if err := writeSources(sources, out); err != nil {
		return err
	}
	for _, p := range products {
		files, err := p.sources(sources)
		if err != nil {
			return err
		}
		if err := runCompiler(ctx, cc, filepath.Join(out, p.name), files, p.flags); err != nil {
			return err
		}
	}
	return os.Rename(out, dir)
}

// sources returns the paths of the product's sources in a directory.
func (p *product) sources(dir string) ([]string, error) {
	if p.source != "" {
		return []string{filepath.Join(dir, p.source)}, nil
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.c"))
	return slices.DeleteFunc(files, func(file string) bool {
		return slices.ContainsFunc(products, func(other product) bool { return other.source == filepath.Base(file) })
	}), err
}

func writeSources(sources, out string) error {
	for _, dir := range []string{sources, out} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return err
		}
	}
	lib, err := fs.Sub(librarySources, "lib")
	if err != nil {
		return err
	}
	return os.CopyFS(sources, lib)
}

func runCompiler(ctx context.Context, cc []string, out string, sources, flags []string) error {
	args := slices.Concat(cc[1:], commonFlags, []string{"-o", out}, sources, flags)
	cmd := exec.CommandContext(ctx, cc[0], args...)
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("%s: %w\n%s", filepath.Base(cc[0]), err, bytes.TrimSpace(output.Bytes()))
	}
	return nil
}
