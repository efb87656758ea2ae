package devcgroup

import (
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/proc"
)

// Cgroups are the open cgroups that can restrict a process's devices.
type Cgroups struct {
	host Host
	pid  int
	list []*cgroup // outer cgroups first
}

// Find opens the cgroups of a process. After Find, the caller checks that the process still runs: if it has ended,
// other processes may have cgroups of the same names by now.
//
// The hierarchies must be where all distributions mount them: cgroup v2 at Host.Cgroups or, beside cgroup v1, at
// "unified" below it, and the devices controller of cgroup v1 at "devices" below it.
func Find(host Host, p *proc.Process) (*Cgroups, error) {
	c := &Cgroups{host: host, pid: p.PID}
	if err := c.find(p); err != nil {
		c.Close()
		return nil, fmt.Errorf("find the device cgroup of process %d: %w", p.PID, err)
	}
	return c, nil
}

func (c *Cgroups) find(p *proc.Process) error {
	list, err := p.Cgroups()
	if err != nil {
		return err
	}
	paths, err := restricting(list)
	if err != nil {
		return err
	}
	unified := c.host.Cgroups
	if !isMounted(unified, unix.CGROUP2_SUPER_MAGIC) {
		unified = filepath.Join(unified, "unified")
	}
	if err := c.open(filepath.Join(c.host.Cgroups, "devices"), cgroup{path: paths.devices}); err != nil {
		return err
	}
	return c.open(unified, cgroup{path: paths.unified, unified: true})
}

// open opens a cgroup of the hierarchy that is mounted at `mount`, and the container's scope above the cgroup. If the
// hierarchy is not mounted and the cgroup is its root, which restricts nothing, open does nothing.
func (c *Cgroups) open(mount string, cg cgroup) error {
	magic := int64(unix.CGROUP_SUPER_MAGIC)
	if cg.unified {
		magic = unix.CGROUP2_SUPER_MAGIC
	}
	switch {
	case cg.path == "" || cg.path == "/" && !isMounted(mount, magic):
		return nil
	case !isMounted(mount, magic):
		return fmt.Errorf("open %s: its hierarchy is not mounted at %s", &cg, mount)
	}
	if scope := path.Dir(cg.path); strings.HasSuffix(scope, ".scope") {
		if err := c.openScope(mount, cgroup{path: scope, unified: cg.unified}); err != nil {
			return err
		}
	}
	dir, err := os.OpenRoot(filepath.Join(mount, cg.path))
	if err != nil {
		return fmt.Errorf("open %s: %w", &cg, err)
	}
	cg.dir = dir
	c.list = append(c.list, &cg)
	return nil
}

// openScope opens the container's scope if the container's cgroup is below a scope, as crun makes it: systemd filters
// the devices of the scope. If the scope has other processes, it is not the container's.
func (c *Cgroups) openScope(mount string, scope cgroup) error {
	dir, err := os.OpenRoot(filepath.Join(mount, scope.path))
	if err != nil {
		return fmt.Errorf("open %s: %w", &scope, err)
	}
	scope.dir = dir
	if shared := scope.checkNoOther(c.pid); shared == nil {
		c.list = append(c.list, &scope)
	} else {
		scope.close()
	}
	return nil
}

func isMounted(point string, magic int64) bool {
	var fileSystem unix.Statfs_t
	return unix.Statfs(point, &fileSystem) == nil && fileSystem.Type == magic
}

// Close closes the cgroups.
func (c *Cgroups) Close() {
	for _, cg := range c.list {
		cg.close()
	}
}

// cgroup is an open cgroup directory.
type cgroup struct {
	dir     *os.Root
	path    string // path in the hierarchy, such as /system.slice/x.scope
	unified bool   // cgroup v2
}

func (c *cgroup) String() string {
	if c.unified {
		return "cgroup " + c.path
	}
	return "devices cgroup " + c.path
}

func (c *cgroup) close() { _ = c.dir.Close() }

const maxRead = 1 << 20 // bytes of a file of a cgroup, or of a setting of the kernel

func (c *cgroup) read(name string) (string, error) {
	f, err := c.dir.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	data, _, err := fileio.ReadRegular(f, maxRead)
	return string(data), err
}

// cgroupPaths are a process's cgroups that can restrict devices. A path is "" if the host does not have the hierarchy.
type cgroupPaths struct {
	devices string // in the hierarchy of the devices controller of cgroup v1
	unified string // in cgroup v2
}

// restricting returns the paths of the cgroups that can restrict devices.
func restricting(list proc.Cgroups) (cgroupPaths, error) {
	var paths cgroupPaths
	for _, cg := range list {
		var target *string
		switch {
		case cg.Unified:
			target = &paths.unified
		case slices.Contains(cg.Controllers, "devices"):
			target = &paths.devices
		default:
			continue
		}
		if *target != "" {
			return cgroupPaths{}, fmt.Errorf("it has two cgroups in one hierarchy: %q and %q", *target, cg.Path)
		}
		if err := checkPath(cg.Path); err != nil {
			return cgroupPaths{}, err
		}
		*target = cg.Path
	}
	return paths, nil
}

// checkPath returns an error for a cgroup outside this process's cgroup namespace, whose path begins with "/..".
func checkPath(name string) error {
	if !path.IsAbs(name) || path.Clean(name) != name {
		return fmt.Errorf("cgroup %q is not in this process' cgroup namespace", name)
	}
	return nil
}

// maxCgroups is the largest number of cgroups that a container's cgroup may have below it before the container starts.
const maxCgroups = 64

// checkNoOther returns an error unless the cgroup and the cgroups below it contain exactly one process, that with the
// ID pid.
func (c *cgroup) checkNoOther(pid int) error {
	cgroups, found := 0, false
	err := fs.WalkDir(c.dir.FS(), ".", func(name string, _ fs.DirEntry, err error) error {
		if err != nil || path.Base(name) != "cgroup.procs" {
			return err
		}
		if cgroups++; cgroups > maxCgroups {
			return fmt.Errorf("it has more than %d cgroups below itself", maxCgroups)
		}
		list, err := c.read(name)
		if err != nil {
			return err
		}
		for process := range strings.FieldsSeq(list) {
			if process != strconv.Itoa(pid) {
				return fmt.Errorf("process %s is also in this cgroup, so it is not that of a new container", process)
			}
			found = true
		}
		return nil
	})
	if err != nil {
		return err
	}
	if !found {
		return fmt.Errorf("process %d is not in this cgroup", pid)
	}
	return nil
}

// isRestricted reports whether this cgroup restricts devices, rather than one above it.
func (c *cgroup) isRestricted() (bool, error) {
	if c.unified {
		return c.hasFilters()
	}
	list, err := c.read("devices.list")
	return !allowsAll(list), err
}

func (c *cgroup) allow(proc string, rules []Rule) error {
	if c.unified {
		return c.allowByFilter(proc, rules)
	}
	return c.allowByList(rules)
}
