package devcgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/regular"
)

// cgroup is an open cgroup directory.
type cgroup struct {
	dir     *os.Root
	path    string // in its hierarchy, such as /system.slice/x.scope
	unified bool   // cgroup v2
	list    string // devices.list of cgroup v1 before any change
}

func (c *cgroup) String() string {
	if c.unified {
		return "cgroup " + c.path
	}
	return "devices cgroup " + c.path
}

func (c *cgroup) close() { _ = c.dir.Close() }

func (c *cgroup) read(name string) (string, error) {
	f, err := c.dir.Open(name)
	if err != nil {
		return "", err
	}
	defer f.Close()
	data, _, err := regular.Read(f, maxRead)
	return string(data), err
}

// find opens the cgroups that can restrict the devices of a process: of the devices controller of cgroup v1, and of
// cgroup v2. Outer cgroups come first.
func find(proc string, pid int) ([]*cgroup, error) {
	list, err := readFile(filepath.Join(proc, strconv.Itoa(pid), "cgroup"), maxRead)
	if err != nil {
		return nil, err
	}
	paths, err := parseCgroups(list)
	if err != nil {
		return nil, err
	}
	table, err := readFile(filepath.Join(proc, "self/mountinfo"), 64*maxRead)
	if err != nil {
		return nil, err
	}
	mounts, err := parseMounts(table)
	if err != nil {
		return nil, err
	}
	var found []*cgroup
	for _, c := range []cgroup{{path: paths.devices}, {path: paths.unified, unified: true}} {
		if c.path == "" {
			continue
		}
		if err := c.open(mounts); err == nil {
			found = append(append(found, c.scope(mounts, pid)...), &c)
		} else if c.path != "/" { // the root cgroup of a hierarchy that is not mounted restricts nothing
			for _, c := range found {
				c.close()
			}
			return nil, err
		}
	}
	return found, nil
}

// cgroupPaths are the cgroups of a process that concern devices. A path is "" without such a hierarchy.
type cgroupPaths struct {
	devices string // in the hierarchy of the devices controller of cgroup v1
	unified string // in cgroup v2
}

// parseCgroups reads a /proc/PID/cgroup file (cgroups(7)).
func parseCgroups(list string) (cgroupPaths, error) {
	var paths cgroupPaths
	for line := range strings.Lines(list) {
		line = strings.TrimSuffix(line, "\n")
		fields := strings.SplitN(line, ":", 3)
		if len(fields) != 3 {
			return cgroupPaths{}, fmt.Errorf("/proc/PID/cgroup has an unexpected line: %q", line)
		}
		var target *string
		switch {
		case fields[0] == "0" && fields[1] == "":
			target = &paths.unified
		case slices.Contains(strings.Split(fields[1], ","), "devices"):
			target = &paths.devices
		default:
			continue
		}
		if *target != "" {
			return cgroupPaths{}, fmt.Errorf("/proc/PID/cgroup lists a hierarchy twice: %q", line)
		}
		if err := checkPath(fields[2]); err != nil {
			return cgroupPaths{}, err
		}
		*target = fields[2]
	}
	return paths, nil
}

// checkPath refuses the path of a cgroup outside this process' cgroup namespace, which begins with "/..".
func checkPath(name string) error {
	if !path.IsAbs(name) || path.Clean(name) != name {
		return fmt.Errorf("cgroup %q is not in this process' cgroup namespace", name)
	}
	return nil
}

// mount is where a cgroup hierarchy is mounted.
type mount struct {
	device  uint64 // of its file system
	root    string // the cgroup that is mounted
	point   string
	unified bool
}

// parseMounts returns the mounts of a mountinfo file (proc_pid_mountinfo(5)) that are of cgroup v2 or of the devices
// controller of cgroup v1.
func parseMounts(table string) ([]mount, error) {
	var mounts []mount
	for line := range strings.Lines(table) {
		before, after, ok := strings.Cut(line, " - ")
		fields, fileSystem := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 6 || len(fileSystem) < 2 {
			return nil, fmt.Errorf("/proc/self/mountinfo has an unexpected line: %q", line)
		}
		unified := fileSystem[0] == "cgroup2"
		options := strings.Split(fileSystem[len(fileSystem)-1], ",")
		if !unified && (fileSystem[0] != "cgroup" || !slices.Contains(options, "devices")) {
			continue
		}
		var major, minor uint32
		if n, err := fmt.Sscanf(fields[2], "%d:%d", &major, &minor); n != 2 || err != nil {
			return nil, fmt.Errorf("no device number in the mount table: %q", line)
		}
		mounts = append(mounts, mount{
			device: unix.Mkdev(major, minor), root: unescape(fields[3]), point: unescape(fields[4]), unified: unified,
		})
	}
	return mounts, nil
}

// unescape restores the bytes that mountinfo writes in octal.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace

// open opens the cgroup where it is mounted.
func (c *cgroup) open(mounts []mount) error {
	errs := []error{fmt.Errorf("open %s: its hierarchy is not mounted", c)}
	for _, m := range mounts {
		below, ok := relative(m.root, c.path)
		if !ok || m.unified != c.unified {
			continue
		}
		dir, err := m.open(below)
		if err == nil {
			c.dir = dir
			return nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// scope returns the container's scope if the container is in a cgroup below it, where crun puts it. systemd filters the
// devices of the scope. A scope with other processes is not the container's.
func (c *cgroup) scope(mounts []mount, pid int) []*cgroup {
	parent := &cgroup{path: path.Dir(c.path), unified: c.unified}
	if !strings.HasSuffix(parent.path, ".scope") || parent.open(mounts) != nil {
		return nil
	}
	if parent.checkAlone(pid) != nil {
		parent.close()
		return nil
	}
	return []*cgroup{parent}
}

// relative returns the path of a cgroup below another one, "." if they are the same.
func relative(root, name string) (string, bool) {
	if root == name {
		return ".", true
	}
	return strings.CutPrefix(name, strings.TrimSuffix(root, "/")+"/")
}

// open opens a cgroup below the one that is mounted. It fails if another file system is mounted over it.
func (m mount) open(below string) (*os.Root, error) {
	top, err := os.OpenRoot(m.point)
	if err != nil {
		return nil, err
	}
	defer top.Close()
	dir, err := top.OpenRoot(below)
	if err != nil {
		return nil, err
	}
	if err := m.contains(dir); err != nil {
		_ = dir.Close()
		return nil, err
	}
	return dir, nil
}

func (m mount) contains(dir *os.Root) error {
	f, err := dir.Open(".")
	if err != nil {
		return err
	}
	defer f.Close()
	var st unix.Stat_t
	var fileSystem unix.Statfs_t
	if err := errors.Join(unix.Fstat(int(f.Fd()), &st), unix.Fstatfs(int(f.Fd()), &fileSystem)); err != nil {
		return fmt.Errorf("stat %s: %w", dir.Name(), err)
	}
	magic := int64(unix.CGROUP_SUPER_MAGIC)
	if m.unified {
		magic = unix.CGROUP2_SUPER_MAGIC
	}
	if st.Dev != m.device || fileSystem.Type != magic {
		return fmt.Errorf("%s is not in the cgroup file system that is mounted at %s", dir.Name(), m.point)
	}
	return nil
}

// maxCgroups is how many cgroups a container has at most before it starts.
const maxCgroups = 64

// checkAlone returns an error unless the process is the only one in the cgroup and in those below it.
func (c *cgroup) checkAlone(pid int) error {
	cgroups, found := 0, false
	err := fs.WalkDir(c.dir.FS(), ".", func(name string, _ fs.DirEntry, err error) error {
		if err != nil || path.Base(name) != "cgroup.procs" {
			return err
		}
		if cgroups++; cgroups > maxCgroups {
			return fmt.Errorf("it has more than %d cgroups below it", maxCgroups)
		}
		list, err := c.read(name)
		if err != nil {
			return err
		}
		for process := range strings.FieldsSeq(list) {
			if process != strconv.Itoa(pid) {
				return fmt.Errorf("process %s is in it too, so it is not the cgroup of a new container", process)
			}
			found = true
		}
		return nil
	})
	if err == nil && !found {
		err = fmt.Errorf("process %d is not in it", pid)
	}
	return err
}

// isRestricted reports whether the cgroup itself, and not one above it, keeps processes from devices.
func (c *cgroup) isRestricted() (bool, error) {
	if c.unified {
		return c.hasFilters()
	}
	var err error
	c.list, err = c.read("devices.list")
	return !allowsAll(c.list), err
}

func (c *cgroup) allow(change *Change, rules []Rule) error {
	if c.unified {
		return c.allowByFilter(change, rules)
	}
	return c.allowByList(change, rules)
}
