package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
)

// Problem is something wrong with a spec.
type Problem struct {
	// Where is the affected part of the spec, such as "device 0" or "all devices"; empty for the whole file.
	Where string `json:"where,omitempty"`
	What  string `json:"what"`
}

// String formats the problem in one line.
func (p Problem) String() string {
	if p.Where == "" {
		return p.What
	}
	return p.Where + ": " + p.What
}

// ValidateFile checks that engines can read a spec file, and that its content fits this host (see validate). If the
// file does not exist or this process may not read it, that is an error; if it is malformed, that is a problem.
func ValidateFile(path string) ([]Problem, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("validate CDI spec: %w", err)
	}
	var problems []Problem
	if _, err := FormatOf(path); err != nil {
		problems = append(problems, Problem{What: err.Error()})
	}
	if info.Mode().IsRegular() && info.Mode().Perm()&0o004 == 0 {
		what := fmt.Sprintf("mode %#o: engines of other users than the owner cannot read the file", info.Mode().Perm())
		problems = append(problems, Problem{What: what})
	}
	spec, err := ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrPermission):
		return nil, fmt.Errorf("validate CDI spec: %w", err)
	case err != nil:
		return append(problems, Problem{What: err.Error()}), nil //nolint:nilerr // the problem contains the error
	}
	return append(problems, validate(spec)...), nil
}

// validate checks a spec against the CDI library's rules and against this host: the files to mount must exist, the
// nodes must be device nodes, and the hooks must be executable.
func validate(spec *specs.Spec) []Problem {
	v := &validator{seen: map[string]bool{}, driver: driverVersion(spec)}
	if err := checkSpec(spec); err != nil {
		v.add("", "not a valid CDI spec: %v", err)
	}
	v.checkEdits(commonWhere, &spec.ContainerEdits)
	for i := range spec.Devices {
		v.checkEdits(deviceNamed(spec.Devices[i].Name), &spec.Devices[i].ContainerEdits)
	}
	v.checkCUDA(spec)
	if n := len(v.gone); n > 1 { // for example after an upgrade
		p := Problem{"driver", fmt.Sprintf("%d files of driver %s are gone", n, v.driver)}
		v.problems = append([]Problem{p}, v.problems...)
	} else if n == 1 {
		v.add("driver", "%s is gone", v.gone[0])
	}
	return v.problems
}

// commonWhere is the Where of the edits that every container gets.
const commonWhere = "all devices"

func deviceNamed(name string) string { return "device " + name }

type validator struct {
	problems []Problem
	seen     map[string]bool // problems that were reported already, since a file is often in several devices
	// driver is the driver version for which the spec was made, or "". gone are the missing files whose paths contain
	// that version.
	driver string
	gone   []string
}

func (v *validator) add(where, format string, args ...any) {
	p := Problem{where, fmt.Sprintf(format, args...)}
	if !v.seen[p.What] {
		v.seen[p.What] = true
		v.problems = append(v.problems, p)
	}
}

func (v *validator) checkEdits(where string, e *specs.ContainerEdits) {
	for _, n := range e.DeviceNodes {
		v.checkNode(where, n)
	}
	for _, m := range e.Mounts {
		// Only for a bind mount is the source a path; for another type it can be "tmpfs", for example.
		if m.Type != "" && m.Type != "bind" && m.Type != "rbind" {
			continue
		}
		_, err := os.Stat(m.HostPath)
		isDrivers := v.driver != "" && strings.Contains(m.HostPath, v.driver)
		switch {
		case err == nil:
		case !isDrivers || !errors.Is(err, fs.ErrNotExist):
			v.add(where, "mount %s: %v", m.ContainerPath, err)
		case !slices.Contains(v.gone, m.HostPath):
			v.gone = append(v.gone, m.HostPath)
		}
	}
	for _, h := range e.Hooks {
		v.checkHook(where, h)
	}
}

// checkCUDA checks that a spec with libcuda has the device nodes without which CUDA does not start. The kernel module
// of nvidia-uvm may not have been loaded when the spec was made.
func (v *validator) checkCUDA(spec *specs.Spec) {
	all := []*specs.ContainerEdits{&spec.ContainerEdits}
	for i := range spec.Devices {
		all = append(all, &spec.Devices[i].ContainerEdits)
	}
	cuda, linux, nodes := false, false, map[string]bool{}
	for _, e := range all {
		for _, m := range e.Mounts {
			cuda = cuda || strings.HasPrefix(path.Base(m.ContainerPath), "libcuda.so")
		}
		for _, n := range e.DeviceNodes {
			nodes[n.Path] = true
			linux = linux || strings.HasPrefix(n.Path, "/dev/nvidia") // unlike /dev/dxg of WSL
		}
	}
	for _, node := range []string{"/dev/nvidiactl", "/dev/nvidia-uvm"} {
		if cuda && linux && !nodes[node] {
			v.add(commonWhere, "libcuda without the device node %s: CUDA does not start in containers", node)
		}
	}
}

func (v *validator) checkNode(where string, n *specs.DeviceNode) {
	file := cmp.Or(n.HostPath, n.Path)
	info, err := os.Lstat(file)
	if err != nil {
		v.add(where, "device node: %v", err)
		return
	}
	if info.Mode()&fs.ModeDevice == 0 {
		if n.Type != "p" {
			v.add(where, "device node: %s is %s", file, fileio.TypeName(info.Mode()))
		}
		return
	}
	// The numbers of some drivers change at every boot.
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || n.Major == 0 {
		return
	}
	major, minor := int64(unix.Major(stat.Rdev)), int64(unix.Minor(stat.Rdev))
	if n.Major != major || n.Minor != minor {
		v.add(where, "device node %s is %d:%d, and %d:%d in the spec", file, major, minor, n.Major, n.Minor)
	}
}

func (v *validator) checkHook(where string, h *specs.Hook) {
	info, err := os.Stat(h.Path)
	switch {
	case err != nil:
		v.add(where, "hook: %v", err)
	case !info.Mode().IsRegular():
		v.add(where, "hook: %s is %s", h.Path, fileio.TypeName(info.Mode()))
	case info.Mode()&0o111 == 0:
		v.add(where, "hook: %s is not executable", h.Path)
	case len(h.Env) == 0:
		v.add(where, "hook %s has no environment of its own, so it would run with the container's", h.Path)
	}
}

// NamesGPUs reports whether the spec has devices named by the UUID of a GPU or MIG device, so that ValidateDevices can
// check them.
func NamesGPUs(spec *specs.Spec) bool {
	return slices.ContainsFunc(spec.Devices, func(d specs.Device) bool { return isUUID(d.Name) })
}

func isUUID(name string) bool {
	return strings.HasPrefix(name, "GPU-") || strings.HasPrefix(name, "MIG-")
}

// ValidateDevices checks that the snapshot has the GPUs and MIG devices that a spec names by UUID, and that containers
// can use them. It is a pure function; ValidateFile checks the rest.
func ValidateDevices(spec *specs.Spec, s *gpu.Snapshot) []Problem {
	why := unusable(s)
	var problems []Problem
	for i := range spec.Devices {
		name := spec.Devices[i].Name
		reason, known := why[name]
		if !known {
			reason = "the driver has no such device"
		}
		if isUUID(name) && reason != "" {
			problems = append(problems, Problem{deviceNamed(name), reason})
		}
	}
	return problems
}

// ValidateNumbers checks that the device nodes of a spec have the numbers of their devices on this host.
func ValidateNumbers(spec *specs.Spec, numbers driver.Numbers) []Problem {
	v := &validator{seen: map[string]bool{}}
	check := func(where string, e *specs.ContainerEdits) {
		for _, n := range e.DeviceNodes {
			file := cmp.Or(n.HostPath, n.Path)
			var st unix.Stat_t
			if err := unix.Lstat(file, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR {
				continue // a problem that validate finds
			}
			if err := numbers.CheckPath(file, st.Rdev); err != nil {
				v.add(where, "device node %s: %v", file, err)
			}
		}
	}
	check(commonWhere, &spec.ContainerEdits)
	for i := range spec.Devices {
		check(deviceNamed(spec.Devices[i].Name), &spec.Devices[i].ContainerEdits)
	}
	return v.problems
}

// unusable maps the UUID of each device in the snapshot to the reason why containers cannot use the device, or to "".
func unusable(s *gpu.Snapshot) map[string]string {
	why := map[string]string{}
	for i := range s.Devices {
		d := &s.Devices[i]
		switch {
		case !d.Usable():
			why[d.UUID] = "the GPU cannot be read: " + d.Error
		case d.MIGEnabled:
			why[d.UUID] = "the GPU is in MIG mode: only its MIG devices can be used"
		default:
			why[d.UUID] = ""
		}
		for _, m := range d.MIG {
			why[m.UUID] = ""
		}
	}
	return why
}

// UnsafeParts returns a problem if users other than root can change a spec file, and one for each of its hooks that
// they can change. The functions trustedFile and trustedHook check a path; their errors wrap trust.ErrUnsafe. A hook
// that does not exist is not reported here.
func UnsafeParts(file string, spec *specs.Spec, trustedFile, trustedHook func(path string) error) []Problem {
	var problems []Problem
	if err := trustedFile(file); errors.Is(err, trust.ErrUnsafe) {
		problems = append(problems, Problem{Where: "spec", What: fmt.Sprintf("its hooks run as root, and %v", err)})
	}
	for _, path := range HookPaths(spec) {
		if err := trustedHook(path); errors.Is(err, trust.ErrUnsafe) {
			what := fmt.Sprintf("engines run it as root, and %v", err)
			problems = append(problems, Problem{Where: "hook " + path, What: what})
		}
	}
	return problems
}

// UntrustedError means that users other than root can change a spec file, or a hook in it that would be run.
type UntrustedError struct {
	File    string
	Problem Problem
}

// Error names the file and what other users can change.
func (e *UntrustedError) Error() string {
	return fmt.Sprintf("devices of %s are not put into the bundle: %v", e.File, e.Problem)
}

// CheckTrust returns an *UntrustedError unless the spec files of the devices and the hooks in them are trusted. The
// runtime of a bundle runs the hooks with the rights of its caller, so they may also belong to the caller.
func (d *SpecDirs) CheckTrust(names []string, trusted func(path string) error) error {
	for _, f := range d.FilesOf(names) {
		if unsafe := UnsafeParts(f.Path, f.Spec, trusted, trusted); len(unsafe) > 0 {
			return &UntrustedError{f.Path, unsafe[0]}
		}
	}
	return nil
}
