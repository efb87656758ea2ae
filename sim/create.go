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

// DefaultDriver is the driver version that a node has unless its machine has one or another is asked for.
const DefaultDriver = "580.126.09"

// Options are what a node has besides its machine. The zero value is the machine's driver in Debian's
// library directory.
type Options struct {
	// Driver is the driver's version; empty means the machine's, or else DefaultDriver.
	Driver string
	// LibDir is where the libraries are, relative to the node's root: "usr/lib64", "usr/local/nvidia/lib64" or any
	// other under usr, opt or home. Empty means Debian's multiarch directory. In a directory that is not under
	// usr/lib* the programs are in bin beside it, and the libraries are not in the loader's cache, as on a node of
	// GKE; otherwise the programs are in usr/bin.
	LibDir string
	// Extras are what the node has besides its GPUs; Extras lists what there is.
	Extras []string
	// Force allows to replace a node that is there, as an upgrade of the driver in place would.
	Force bool
	// PlainNodes makes regular files instead of device nodes. It is for tests of the library that run without
	// CAP_MKNOD; a container cannot be given such nodes.
	PlainNodes bool
	// CacheDir is where compiled libraries are kept; empty means a directory in the user's cache directory.
	CacheDir string
	// Compiler is the C compiler's command; empty means $CC, and without that, cc.
	Compiler string
}

var driverPattern = regexp.MustCompile(`^[1-9][0-9]{2}\.[0-9]{1,3}(\.[0-9]{1,2})?$`)

// withDefaults fills in what is empty and refuses what cannot be.
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
	if !isBelow(o.LibDir) || !below || (top != "usr" && top != "opt" && top != "home") || len(o.LibDir) > 90 {
		return o, invalid("library directory %q: want a plain path below usr, opt or home, such as usr/lib64, "+
			"usr/lib/x86_64-linux-gnu or usr/local/nvidia/lib64", o.LibDir)
	}
	return o, nil
}

// system reports whether the libraries are in one of the loader's own directories.
func (o Options) system() bool { return strings.HasPrefix(o.LibDir, "usr/lib") }

func (o Options) binDir() string {
	if o.system() {
		return "usr/bin"
	}
	return path.Join(path.Dir(o.LibDir), "bin")
}

// Create makes a node in dir, which must not exist or be empty, or be a node with Options.Force. It is built beside
// dir and renamed, so dir is whole or as it was before.
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
	p, err := nodePlan(ctx, m, opts)
	if err != nil {
		return nil, err
	}
	if err := build(ctx, dir, there, p, opts); err != nil {
		return nil, fmt.Errorf("make a node in %s: %w", dir, err)
	}
	return Open(dir)
}

// checkTarget reports whether there is a node in dir that is to be replaced.
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

// nodePlan plans all files of a node.
func nodePlan(ctx context.Context, m *Machine, opts Options) (plan, error) {
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
	p, err := in.driverFiles()
	if err != nil {
		return nil, err
	}
	for _, more := range []plan{baseFiles(), deviceNodes(m), extraFiles(opts.Extras), procFiles(m, opts.Driver, in.arch), sysFiles(m), ownFiles(m, opts)} {
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

// readBuilt reads what was compiled into a directory.
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

// baseFiles plans the directories that every host has, with /usr merged.
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

// ownFiles plans what the simulation itself needs.
func ownFiles(m *Machine, opts Options) plan {
	p := plan{}
	p[machineFilePath] = entry{mode: 0o644, data: m.source}
	p.file(stateFile, "")
	p.file(nodeFile, rec("node", "machine", m.Name, "driver", opts.Driver, "libdir", opts.LibDir,
		"bindir", opts.binDir(), "plain", opts.PlainNodes).String()+"\n")
	return p
}

// addLoaderCache plans /etc/ld.so.cache with what ldconfig would find: every library and link that is directly in the
// directory, by the name that the system's first directory gives it, which is /lib where /usr is merged.
func addLoaderCache(p plan, libDir, arch string) error {
	flags, ok := ldcache.FlagsFor(arch)
	if !ok {
		return fmt.Errorf("the loader's cache for %s is not known", arch)
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

// build makes the files beside dir and then gives them its name.
func build(ctx context.Context, dir string, there bool, p plan, opts Options) (err error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	temp, err := os.MkdirTemp(filepath.Dir(dir), "."+filepath.Base(dir)+".")
	if err != nil {
		return err
	}
	// After an exchange the old node is there; after a rename nothing.
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
