// Package hookargs is the language between the CDI spec and prestart-hook: what the spec's createContainer hook is to
// do, as a value, and that value as command-line arguments and back.
//
// The cdi package writes it, the hook reads it. It imports only the standard library, since the hook is small.
package hookargs

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Verb is the hook's first argument.
const Verb = "create-container"

// CreateContainer is everything that one run of the hook does for one container. All paths are absolute paths in the
// container, without "." and "..".
type CreateContainer struct {
	// DriverVersion is the host driver's version and CUDAVersion the newest CUDA version it supports
	// ("580.126.09", "13.0"). Forward compatibility is judged by them; empty turns it off.
	DriverVersion, CUDAVersion string
	// Libraries go into the loader cache, in this order.
	Libraries []Library
	// Links are symlinks to make.
	Links []Link
	// DRI lists, for each GPU of the spec, the /dev/dri nodes. Links under /dev/dri/by-path are made for those nodes
	// that the container was given.
	DRI []DRI
	// Params masks ModifyDeviceFiles in /proc/driver/nvidia/params.
	Params bool
	// EGLProfile writes the application profile that limits EGL to the GPUs the container was given.
	EGLProfile bool
}

// Library is a shared library of the driver: the name that programs ask for and the file that is mounted.
type Library struct{ SONAME, Path string }

// Link is a symlink at Path that contains Target, which may be relative to Path's directory.
type Link struct{ Path, Target string }

// DRI is a GPU's PCI address and the names of its nodes under /dev/dri, such as "card1" and "renderD129".
type DRI struct {
	PCIBusID string
	Nodes    []string
}

// Args are the arguments after the program's name.
//
// Each repeated flag holds a list, to keep the spec readable:
//
//	--libraries=DIR:SONAME=FILE,SONAME=FILE,...   one for each run of libraries in one directory
//	--link=PATH::TARGET
//	--dri=PCI-ADDRESS/NODE,NODE
func (c *CreateContainer) Args() []string {
	args := []string{Verb}
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

// Parse reads what Args wrote. All problems are in the error, each naming its argument.
func Parse(args []string) (*CreateContainer, error) {
	if len(args) == 0 || args[0] != Verb {
		return nil, fmt.Errorf("want %q as the first argument", Verb)
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
	if wantsValue := name != "--mask-params" && name != "--egl-profile"; wantsValue != hasValue {
		return errors.New("a flag and its value are one argument, --flag=value; switches take no value")
	}
	switch name {
	case "--driver-version":
		c.DriverVersion = value
		_, err := ParseVersion(value)
		return err
	case "--cuda-version":
		c.CUDAVersion = value
		_, err := ParseVersion(value)
		return err
	case "--libraries":
		return c.parseLibraries(value)
	case "--link":
		p, target, ok := strings.Cut(value, "::")
		if !ok || target == "" || strings.ContainsRune(target, 0) {
			return errors.New("want PATH::TARGET")
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
		return errors.New("want DIR:SONAME=FILE,SONAME=FILE")
	}
	if err := checkPath(dir); err != nil {
		return err
	}
	for item := range strings.SplitSeq(list, ",") {
		soname, file, ok := strings.Cut(item, "=")
		if !ok || !isName(soname) || !isName(file) {
			return fmt.Errorf("%q: want SONAME=FILE, both plain names", item)
		}
		c.Libraries = append(c.Libraries, Library{SONAME: soname, Path: path.Join(dir, file)})
	}
	return nil
}

func (c *CreateContainer) parseDRI(value string) error {
	bus, list, ok := strings.Cut(value, "/")
	nodes := strings.Split(list, ",")
	if !ok || !isName(bus) || !isAll(nodes, isName) {
		return errors.New("want PCI-ADDRESS/NODE,NODE")
	}
	c.DRI = append(c.DRI, DRI{PCIBusID: bus, Nodes: nodes})
	return nil
}

func isAll(list []string, ok func(string) bool) bool {
	return !slices.ContainsFunc(list, func(s string) bool { return !ok(s) })
}

// isName reports whether s can be a single path element.
func isName(s string) bool {
	return s != "" && s != "." && s != ".." && len(s) <= 255 && !strings.ContainsAny(s, "/\x00")
}

func checkPath(p string) error {
	if !path.IsAbs(p) || path.Clean(p) != p || p == "/" || strings.ContainsRune(p, 0) {
		return fmt.Errorf("%q is not a clean absolute path", p)
	}
	return nil
}

// ParseVersion splits a version into its numbers, which have at most 9 digits: "580.126.09" is 580, 126, 9.
func ParseVersion(s string) ([]int, error) {
	var numbers []int
	for part := range strings.SplitSeq(s, ".") {
		if part == "" || len(part) > 9 || strings.Trim(part, "0123456789") != "" {
			return nil, fmt.Errorf("%q is not a version, such as 580.126.09", s)
		}
		n, err := strconv.Atoi(part)
		if err != nil {
			return nil, err
		}
		numbers = append(numbers, n)
	}
	return numbers, nil
}
