package cdi

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/regular"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// Problem is something wrong with a spec.
type Problem struct {
	// Where is the part of the spec, such as "device 0" or "all devices"; empty for the file as a whole.
	Where string `json:"where,omitempty"`
	What  string `json:"what"`
}

// String is the problem in a line.
func (p Problem) String() string {
	if p.Where == "" {
		return p.What
	}
	return p.Where + ": " + p.What
}

// ValidateFile checks a spec file: that engines can read it, and all that Validate does. The error is about a file that
// is not there or not for us to read; one that is malformed is a problem.
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
		return append(problems, Problem{What: err.Error()}), nil //nolint:nilerr // a problem is what was looked for
	}
	return append(problems, Validate(spec)...), nil
}

// Validate checks a spec against the CDI library's rules and against this host: that the files to mount exist, that
// nodes are character devices and that hooks can be executed.
func Validate(spec *specs.Spec) []Problem {
	v := &validator{
		seen: map[string]bool{}, driver: driverVersion(spec), driverFiles: map[string]bool{}, gone: map[string]bool{},
	}
	if err := checkSpec(spec); err != nil {
		v.add("", "not a valid CDI spec: %v", err)
	}
	v.edits(allDevices, &spec.ContainerEdits)
	for i := range spec.Devices {
		v.edits(deviceNamed(spec.Devices[i].Name), &spec.Devices[i].ContainerEdits)
	}
	v.replacedDriver()
	return v.problems
}

// replacedDriver makes one problem of the files with the driver's version in their names, if most of them are gone, as
// after an upgrade.
func (v *validator) replacedDriver() {
	if 2*len(v.gone) <= len(v.driverFiles) || len(v.gone) < 2 {
		return
	}
	v.problems = slices.DeleteFunc(v.problems, func(p Problem) bool { return v.gone[p.What] })
	what := fmt.Sprintf("%d files of driver %s are gone", len(v.gone), v.driver)
	v.problems = append([]Problem{{"driver", what}}, v.problems...)
}

// allDevices is where the edits are that every container gets.
const allDevices = "all devices"

func deviceNamed(name string) string { return "device " + name }

type validator struct {
	problems []Problem
	seen     map[string]bool // what was said; a file is often in several devices
	// driver is the version of the driver that the spec was made for, or empty. driverFiles are the files to mount with it in
	// their paths, and gone the problems about those of them that do not exist.
	driver            string
	driverFiles, gone map[string]bool
}

func (v *validator) add(where, format string, args ...any) {
	p := Problem{where, fmt.Sprintf(format, args...)}
	if !v.seen[p.What] {
		v.seen[p.What] = true
		v.problems = append(v.problems, p)
	}
}

func (v *validator) edits(where string, e *specs.ContainerEdits) {
	for _, n := range e.DeviceNodes {
		v.node(where, n)
	}
	for _, m := range e.Mounts {
		// Mounts of other types than bind have sources that are no paths, such as "tmpfs".
		if m.Type != "" && m.Type != "bind" && m.Type != "rbind" {
			continue
		}
		_, err := os.Stat(m.HostPath)
		if err != nil {
			v.add(where, "mount %s: %v", m.ContainerPath, err)
		}
		if v.driver != "" && strings.Contains(m.HostPath, v.driver) {
			v.driverFiles[m.HostPath] = true
			if errors.Is(err, fs.ErrNotExist) {
				v.gone[fmt.Sprintf("mount %s: %v", m.ContainerPath, err)] = true
			}
		}
	}
	for _, h := range e.Hooks {
		v.hook(where, h)
	}
}

func (v *validator) node(where string, n *specs.DeviceNode) {
	path := n.HostPath
	if path == "" {
		path = n.Path
	}
	info, err := os.Lstat(path)
	switch {
	case err != nil:
		v.add(where, "device node: %v", err)
	case info.Mode()&fs.ModeDevice == 0 && n.Type != "p":
		v.add(where, "device node: %s is %s", path, regular.TypeName(info.Mode()))
	case n.Major != 0:
		v.number(where, path, n, info)
	}
}

// number compares device numbers that a spec holds with those of the node: some drivers' change with every boot.
func (v *validator) number(where, path string, n *specs.DeviceNode, info fs.FileInfo) {
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil || info.Mode()&fs.ModeDevice == 0 {
		return
	}
	major, minor := int64(unix.Major(stat.Rdev)), int64(unix.Minor(stat.Rdev))
	if n.Major != major || n.Minor != minor {
		v.add(where, "device node %s is %d:%d, the spec says %d:%d", path, major, minor, n.Major, n.Minor)
	}
}

func (v *validator) hook(where string, h *specs.Hook) {
	info, err := os.Stat(h.Path)
	switch {
	case err != nil:
		v.add(where, "hook: %v", err)
	case !info.Mode().IsRegular():
		v.add(where, "hook: %s is %s", h.Path, regular.TypeName(info.Mode()))
	case info.Mode()&0o111 == 0:
		v.add(where, "hook: %s is not executable", h.Path)
	case len(h.Env) == 0:
		v.add(where, "hook %s has no environment of its own: it would get that of the image", h.Path)
	}
}
