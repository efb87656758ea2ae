// Package hookargs is the interface between CDI specs and prestart-hook: it has the work of a spec's createContainer
// hook as a value, and encodes that as command-line arguments.
//
// The package cdi encodes the arguments, and the hook parses them. To keep the hook small, the package imports only
// the standard library.
package hookargs

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/host"
)

// verb is the hook's first argument.
const verb = "create-container"

// CreateContainer is the work of one run of the hook, for one container. Paths are absolute paths in the container,
// without "." and "..".
type CreateContainer struct {
	// DriverVersion is the version of the host's driver ("580.126.09"). Empty disables CUDA forward compatibility.
	DriverVersion string
	// CUDAVersion is the newest CUDA version that the host's driver supports ("13.0"). It is information for readers
	// of the spec: the hook does not use it.
	CUDAVersion string
	// Libraries are added to the loader cache in this order.
	Libraries []Library
	// Links are the symbolic links to create.
	Links []Link
	// DRI has the device nodes in /dev/dri of each GPU of the spec. The hook creates links in /dev/dri/by-path for
	// those nodes that the container was given.
	DRI []DRI
	// Params makes the hook mask ModifyDeviceFiles in /proc/driver/nvidia/params.
	Params bool
	// EGLProfile makes the hook write the application profile that limits EGL to the container's GPUs.
	EGLProfile bool
}

// Library is a shared library of the driver: the name by which programs load it, and the path of its file.
type Library struct{ SONAME, Path string }

// Link is a symbolic link at Path that contains Target, which may be relative to Path's directory.
type Link struct{ Path, Target string }

// DRI has a GPU's PCI address and the names of its device nodes in /dev/dri, such as "card1" and "renderD129".
type DRI struct {
	PCIBusID string
	Nodes    []string
}

// Args encodes the work as arguments, without the program's name. Lists keep the spec readable:
//
//	--libraries=DIR:SONAME=FILE,SONAME=FILE,...   one for each run of libraries in one directory
//	--link=PATH::TARGET
//	--dri=PCI-ADDRESS/NODE,NODE
func (c *CreateContainer) Args() []string {
	args := []string{verb}
	if c.DriverVersion != "" {
		args = append(args, "--driver-version="+c.DriverVersion)
	}
	if c.CUDAVersion != "" {
		args = append(args, "--cuda-version="+c.CUDAVersion)
	}
	for i := 0; i < len(c.Libraries); {
		dir := path.Dir(c.Libraries[i].Path)
		var items []string
		for ; i < len(c.Libraries) && path.Dir(c.Libraries[i].Path) == dir; i++ {
			items = append(items, c.Libraries[i].SONAME+"="+path.Base(c.Libraries[i].Path))
		}
		args = append(args, "--libraries="+dir+":"+strings.Join(items, ","))
	}
	for _, l := range c.Links {
		args = append(args, "--link="+l.Path+"::"+l.Target)
	}
	for _, d := range c.DRI {
		args = append(args, "--dri="+d.PCIBusID+"/"+strings.Join(d.Nodes, ","))
	}
	if c.Params {
		args = append(args, "--mask-params")
	}
	if c.EGLProfile {
		args = append(args, "--egl-profile")
	}
	return args
}

// Parse decodes the arguments that Args returns. The error has all problems, each with the argument that has it.
func Parse(args []string) (*CreateContainer, error) {
	if len(args) == 0 || args[0] != verb {
		return nil, fmt.Errorf("the first argument must be %q", verb)
	}
	c := &CreateContainer{}
	var errs []error
	for _, arg := range args[1:] {
		if err := c.parse(arg); err != nil {
			errs = append(errs, fmt.Errorf("argument %.200q: %w", arg, err))
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return c, nil
}

func (c *CreateContainer) parse(arg string) error {
	name, value, hasValue := strings.Cut(arg, "=")
	if isSwitch := name == "--mask-params" || name == "--egl-profile"; isSwitch == hasValue {
		return errors.New("expected --FLAG=VALUE, or --mask-params or --egl-profile without a value")
	}
	switch name {
	case "--driver-version":
		c.DriverVersion = value
		_, err := host.ParseVersion(value)
		return err
	case "--cuda-version":
		c.CUDAVersion = value
		_, err := host.ParseVersion(value)
		return err
	case "--libraries":
		return c.parseLibraries(value)
	case "--link":
		p, target, ok := strings.Cut(value, "::")
		if !ok || target == "" || strings.ContainsRune(target, 0) {
			return errors.New("expected PATH::TARGET")
		}
		c.Links = append(c.Links, Link{Path: p, Target: target})
		return checkPath(p)
	case "--dri":
		return c.parseDRI(value)
	case "--mask-params":
		c.Params = true
		return nil
	case "--egl-profile":
		c.EGLProfile = true
		return nil
	}
	return errors.New("unknown flag")
}

func (c *CreateContainer) parseLibraries(value string) error {
	dir, list, ok := strings.Cut(value, ":")
	if !ok {
		return errors.New("expected DIR:SONAME=FILE,SONAME=FILE")
	}
	if err := checkPath(dir); err != nil {
		return err
	}
	for item := range strings.SplitSeq(list, ",") {
		soname, file, ok := strings.Cut(item, "=")
		if !ok || !isName(soname) || !isName(file) {
			return fmt.Errorf("%q: expected SONAME=FILE, two file names without a slash", item)
		}
		c.Libraries = append(c.Libraries, Library{SONAME: soname, Path: path.Join(dir, file)})
	}
	return nil
}

func (c *CreateContainer) parseDRI(value string) error {
	bus, list, ok := strings.Cut(value, "/")
	nodes := strings.Split(list, ",")
	isInvalid := func(node string) bool { return !isName(node) }
	if !ok || !isName(bus) || slices.ContainsFunc(nodes, isInvalid) {
		return errors.New("expected PCI-ADDRESS/NODE,NODE")
	}
	c.DRI = append(c.DRI, DRI{PCIBusID: bus, Nodes: nodes})
	return nil
}

// isName reports whether s can be the name of a file, without directories.
func isName(s string) bool {
	return s != "" && s != "." && s != ".." && len(s) <= 255 && !strings.ContainsAny(s, "/\x00")
}

func checkPath(p string) error {
	if !path.IsAbs(p) || path.Clean(p) != p || p == "/" || strings.ContainsRune(p, 0) {
		return fmt.Errorf("%q is not a clean absolute path", p)
	}
	return nil
}
