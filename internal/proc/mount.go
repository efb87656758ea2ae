package proc

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Mount is a mount in a process's mount namespace.
type Mount struct {
	// ID is unique on the machine while the mount exists.
	ID uint64
	// Device is the major and minor number of the file system's device, such as "0:26".
	Device string
	// Root is what is mounted, as a path in its file system. A file that was deleted ends with
	// [DeletedMount].
	Root string
	// Point is the mount point relative to the process's root. Spaces and some other bytes are octal, such as \040.
	Point string
	// Shared means that new mounts below this mount propagate to other mount namespaces, and Slave that those of others
	// propagate to it.
	Shared, Slave bool
}

// DeletedMount is the end of the root of a mount whose file or directory was deleted.
const DeletedMount = "//deleted"

// Place is where a file is in its file system, as mountinfo has it: the device and the root of a mount of that file.
type Place struct{ Device, Root string }

// escape writes a path like mountinfo.
var escape = strings.NewReplacer(" ", `\040`, "\t", `\011`, "\n", `\012`, `\`, `\134`)

// PlaceOf returns where an open file of this process is. The process is that of Self.
func (p *Process) PlaceOf(f *os.File) (Place, error) {
	fd := strconv.Itoa(int(f.Fd()))
	name, err := p.readlink("fd/" + fd)
	if err != nil {
		return Place{}, err
	}
	text, err := p.FDInfo(fd, "mnt_id")
	if err != nil {
		return Place{}, err
	}
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return Place{}, fmt.Errorf("the mount of %s: %w", name, err)
	}
	var at Place
	found, err := p.HasMount(func(m Mount) bool {
		below, isBelow := strings.CutPrefix(escape.Replace(name), strings.TrimSuffix(m.Point, "/"))
		if m.ID == id && isBelow {
			at = Place{m.Device, path.Join(m.Root, below)}
		}
		return m.ID == id && isBelow
	})
	if err == nil && !found {
		err = fmt.Errorf("the mount of %s is not in mountinfo", name)
	}
	return at, err
}

// maxMount is more bytes than a line of mountinfo has: two paths, of whose bytes some are written as four.
const maxMount = 64 << 10

// Mounts reads the mounts of the process's mount namespace that can be reached from its root.
func (p *Process) Mounts() ([]Mount, error) {
	var mounts []Mount
	_, err := p.HasMount(func(m Mount) bool {
		mounts = append(mounts, m)
		return false
	})
	if err != nil {
		return nil, err
	}
	return mounts, nil
}

// HasMount reports whether a function accepts one of the mounts that Mounts returns. It does not keep them in memory:
// a user can have a mount namespace with 100,000 mounts.
func (p *Process) HasMount(accepts func(Mount) bool) (bool, error) {
	f, err := p.open("mountinfo")
	if err != nil {
		return false, err
	}
	defer f.Close()
	limited := &io.LimitedReader{R: f, N: maxMounts + 1}
	found, err := hasMount(limited, accepts)
	if limited.N == 0 && !found {
		err = fmt.Errorf("%s has more than %d bytes", f.Name(), maxMounts)
	}
	return found, asEnded(err)
}

// hasMount parses /proc/PID/mountinfo (proc_pid_mountinfo(5)) until a mount is accepted.
func hasMount(file io.Reader, accepts func(Mount) bool) (bool, error) {
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, maxMount)
	for lines.Scan() {
		m, err := parseMount(lines.Text())
		if err != nil {
			return false, err
		}
		if accepts(m) {
			return true, nil
		}
	}
	if err := lines.Err(); err != nil {
		return false, fmt.Errorf("read mountinfo of a process: %w", err)
	}
	return false, nil
}

func parseMount(line string) (Mount, error) {
	// ID, parent, device, root, mount point, options, any number of optional fields, "-", and more
	before, _, hasDash := strings.Cut(line, " - ")
	fields := strings.Split(before, " ")
	if !hasDash || len(fields) < 6 {
		return Mount{}, fmt.Errorf("mountinfo of a process has an unexpected line: %q", line)
	}
	id, err := strconv.ParseUint(fields[0], 10, 64)
	if err != nil {
		return Mount{}, fmt.Errorf("mountinfo of a process has no mount ID in line %q: %w", line, err)
	}
	has := func(tag string) bool {
		return slices.ContainsFunc(fields[6:], func(f string) bool { return strings.HasPrefix(f, tag) })
	}
	return Mount{
		ID: id, Device: fields[2], Root: fields[3], Point: fields[4], Shared: has("shared:"), Slave: has("master:"),
	}, nil
}
