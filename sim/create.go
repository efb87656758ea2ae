package sim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/ldcache"
)

// DefaultDriver is the driver version of a node, unless its machine or Options.Driver names another.
const DefaultDriver = "580.126.09"

// Options describe a node besides its machine. The zero value means the machine's driver in Debian's library directory.
type Options struct {
	// Driver is the driver's version; empty means the machine's, otherwise DefaultDriver.
	Driver string
	// LibDir is the directory of the libraries, relative to the node's root: "usr/lib64", "usr/local/nvidia/lib64" or
	// another directory below usr, opt or home. Empty means Debian's multiarch directory. Programs are in usr/bin if
	// LibDir is under usr/lib*. Otherwise, as on GKE, they are in bin beside LibDir, and the libraries are not in the
	// loader cache.
	LibDir string
	// Extras are devices besides GPUs, by the names that the function Extras returns.
	Extras []string
	// Force replaces an existing node, like an in-place upgrade of the driver.
	Force bool
	// PlainNodes creates regular files instead of device nodes, for tests that run without CAP_MKNOD. Containers cannot
	// use them.
	PlainNodes bool
	// CacheDir is the directory for compiled libraries; empty means a directory in the user's cache directory.
	CacheDir string
	// Compiler is the command of the C compiler; empty means $CC, otherwise cc.
	Compiler string
}

var driverPattern = regexp.MustCompile(`^[1-9][0-9]{2}\.[0-9]{1,3}(\.[0-9]{1,2})?$`)

// withDefaults sets defaults and checks the options.
func (o Options) withDefaults(m *Machine) (Options, error) {
	o.Driver = cmp.Or(o.Driver, m.Driver, DefaultDriver)
	if o.LibDir == "" {
		o.LibDir = "usr/lib/" + libArch(runtime.GOARCH) + "-linux-gnu"
	}
	o.LibDir = strings.Trim(o.LibDir, "/")
	if !driverPattern.MatchString(o.Driver) {
		return o, invalid("driver version %q: want a version such as %s", o.Driver, DefaultDriver)
	}
	if err := checkExtras(o.Extras); err != nil {
		return o, err
	}
	top, _, below := strings.Cut(o.LibDir, "/")
	if !isPlainPath(o.LibDir) || !below || (top != "usr" && top != "opt" && top != "home") || len(o.LibDir) > 90 {
		return o, invalid("library directory %q: want a plain path below usr, opt or home, such as usr/lib64, "+
			"usr/lib/x86_64-linux-gnu or usr/local/nvidia/lib64", o.LibDir)
	}
	return o, nil
}

// system reports whether the libraries are in a directory that the loader searches.
func (o Options) system() bool { return strings.HasPrefix(o.LibDir, "usr/lib") }

func (o Options) binDir() string {
	if o.system() {
		return "usr/bin"
	}
	return path.Join(path.Dir(o.LibDir), "bin")
}

// Create creates a node in dir, which must be missing or empty, or be a node if Options.Force is set. The node is built
// beside dir and renamed, so that dir is either complete or unchanged. Errors are InvalidError, ErrExists, ErrNotEmpty,
// ErrNoCompiler, ErrNoCache, ErrNoDeviceNodes and those of the file system.
func Create(ctx context.Context, dir string, m *Machine, opts Options) (*Node, error) {
	opts, err := opts.withDefaults(m)
	if err != nil {
		return nil, err
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("make a node: %w", err)
	}
	there, err := checkTarget(dir, opts.Force)
	if err != nil {
		return nil, err
	}
	p, err := planNode(ctx, m, opts)
	if err != nil {
		return nil, err
	}
	if err := build(ctx, dir, there, p, opts); err != nil {
		return nil, fmt.Errorf("make a node in %s: %w", dir, err)
	}
	return Open(dir)
}

// checkTarget reports whether dir contains a node to replace.
func checkTarget(dir string, force bool) (there bool, err error) {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("make a node: %w", err)
	case len(entries) == 0:
		return false, nil
	}
	if _, err := os.Lstat(filepath.Join(dir, nodeFile)); err != nil {
		return false, fmt.Errorf("make a node in %s: %w", dir, ErrNotEmpty)
	}
	if !force {
		return false, fmt.Errorf("make a node in %s: %w", dir, ErrExists)
	}
	return true, nil
}

// planNode plans all files of a node.
func planNode(ctx context.Context, m *Machine, opts Options) (plan, error) {
	built, err := compile(ctx, opts.CacheDir, opts.Compiler)
	if err != nil {
		return nil, err
	}
	in := &install{machine: m, driver: opts.Driver, libDir: opts.LibDir, binDir: opts.binDir(), arch: runtime.GOARCH}
	if in.built, err = readBuilt(built); err != nil {
		return nil, err
	}
	if in.built[builtLibrary], err = patch(in.built[builtLibrary], describe(m, opts.Driver, opts.LibDir)); err != nil {
		return nil, err
	}
	if err := hideNewer(in.built[builtLibrary], opts.Driver); err != nil {
		return nil, err
	}
	p, err := in.driverFiles()
	if err != nil {
		return nil, err
	}
	for _, more := range []plan{
		baseFiles(), deviceNodes(m), extraFiles(opts.Extras), procFiles(m, opts.Driver, in.arch), sysFiles(m),
		ownFiles(m, opts),
	} {
		maps.Copy(p, more)
	}
	p.program(mpsClientPath, in.built[builtMPSClient])
	for i := range m.GPUs {
		maps.Copy(p, migNodes(&m.GPUs[i]))
	}
	if opts.system() {
		return p, addLoaderCache(p, opts.LibDir, in.arch)
	}
	return p, nil
}

// readBuilt reads the compiled files in a directory, by name.
func readBuilt(dir string) (map[string][]byte, error) {
	built := map[string][]byte{}
	for _, p := range products {
		data, err := os.ReadFile(filepath.Join(dir, p.name))
		if err != nil {
			return nil, fmt.Errorf("read the compiled %s: %w", p.name, err)
		}
		built[p.name] = data
	}
	return built, nil
}

// baseFiles plans the directories that every host with merged /usr has.
func baseFiles() plan {
	p := plan{}
	for _, dir := range []string{"bin", "sbin", "lib", "lib64"} {
		p.dir("usr/" + dir)
		p.link(dir, "usr/"+dir)
	}
	p.link("var/run", "/run")
	p.dir("tmp")
	return p
}

// ownFiles plans the simulation's own files.
func ownFiles(m *Machine, opts Options) plan {
	p := plan{}
	p[machineFilePath] = entry{mode: 0o644, data: m.source}
	p.file(stateFile, "")
	p.file(nodeFile, newRecord("node", "machine", m.Name, "driver", opts.Driver, "libdir", opts.LibDir,
		"bindir", opts.binDir(), "plain", opts.PlainNodes).String()+"\n")
	return p
}

// addLoaderCache plans the /etc/ld.so.cache that ldconfig would write: every library and link in the directory, with
// paths under /lib, which ldconfig searches before /usr/lib.
func addLoaderCache(p plan, libDir, arch string) error {
	flags, ok := ldcache.FlagsFor(arch)
	if !ok {
		return fmt.Errorf("unknown format of the loader cache for %s", arch)
	}
	c := ldcache.Cache{Generator: "ldconfig (simulated)"}
	for file := range p {
		name := path.Base(file)
		if path.Dir(file) == libDir && strings.HasPrefix(name, "lib") {
			at := "/" + strings.TrimPrefix(libDir, "usr/") + "/" + name
			c.Entries = append(c.Entries, ldcache.Entry{Name: name, Path: at, Flags: flags})
		}
	}
	p["etc/ld.so.cache"] = entry{mode: 0o644, data: c.Marshal()}
	return nil
}

// build creates the files beside dir and renames them.
func build(ctx context.Context, dir string, there bool, p plan, opts Options) (err error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	temp, err := os.MkdirTemp(filepath.Dir(dir), "."+filepath.Base(dir)+".")
	if err != nil {
		return err
	}
	// After an exchange this is the old node.
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	w := &writer{root: temp, plainNodes: opts.PlainNodes}
	if err := w.write(p); err != nil {
		return err
	}
	if err := os.Chmod(temp, 0o755); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if there {
		return unix.Renameat2(unix.AT_FDCWD, temp, unix.AT_FDCWD, dir, unix.RENAME_EXCHANGE)
	}
	return unix.Rename(temp, dir)
}
