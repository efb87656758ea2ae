package model

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"unicode"

	"tags.cncf.io/container-device-interface/pkg/parser"

	"gpu-cdi-plugin/internal/wording"
)

const (
	// maxPath is the kernel's PATH_MAX without the final NUL.
	maxPath = 4095
	// maxText limits the length of a name together with its value, in bytes. The kernel accepts arguments and
	// variables of less than 128 KiB, and in an argument the name of the option comes before them.
	maxText = 128<<10 - 64
	// maxProblems and maxShown limit the length of the error's text, which quotes what a plugin sent.
	maxProblems, maxShown = 8, 100
)

// Check returns an error with the first problems because of which run options are invalid for any container. They come
// from plugins, so anything is possible: paths that are not absolute or contain .., permissions other than r, w and m,
// malformed names, and texts that are too long for the kernel.
func (o *RunOptions) Check() error {
	var c checker
	for _, name := range o.CDIDevices {
		if len(name) > maxPath || !parser.IsQualifiedName(name) { // an engine would take such a name for a path
			c.problem("CDI name", name, "want a qualified name, such as nvidia.com/gpu=0")
		}
	}
	for _, d := range o.Devices {
		c.path("host path of a device node", d.HostPath)
		c.path("container path of a device node", d.ContainerPath)
		if !someOf(d.Permissions, "rwm") {
			c.problem("permissions of a device node", d.Permissions, "want some of r, w and m")
		}
	}
	for _, m := range o.Mounts {
		c.path("host path of a mount", m.HostPath)
		c.path("container path of a mount", m.ContainerPath)
	}
	c.pairs("environment variable", o.Envs)
	c.pairs("annotation", o.Annotations)
	return errors.Join(c.problems...)
}

// someOf reports whether a text consists of one or more of these letters, each at most once.
func someOf(text, letters string) bool {
	for i := range len(text) {
		if strings.IndexByte(letters, text[i]) < 0 || strings.IndexByte(text, text[i]) != i {
			return false
		}
	}
	return text != ""
}

type checker struct {
	problems []error
}

func (c *checker) problem(field, text, why string) {
	if len(c.problems) < maxProblems {
		c.problems = append(c.problems, fmt.Errorf("%s %q: %s", field, wording.Shorten(text, maxShown), why))
	}
}

func (c *checker) path(field, p string) {
	switch {
	case !path.IsAbs(p):
		c.problem(field, p, "want an absolute path")
	case slices.Contains(strings.Split(p, "/"), ".."):
		c.problem(field, p, "want a path without ..")
	case len(p) > maxPath:
		c.problem(field, p, fmt.Sprintf("it has %d bytes, more than the %d that a path may have", len(p), maxPath))
	case strings.Contains(p, "\x00"):
		c.problem(field, p, `it has a '\x00'`)
	}
}

func (c *checker) pairs(field string, values map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(values)) {
		size := len(name) + len("=") + len(values[name])
		switch {
		case name == "" || strings.Contains(name, "="):
			c.problem("name of an "+field, name, "want a name without =")
		case strings.ContainsFunc(name, unicode.IsControl):
			c.problem("name of an "+field, name, "want a name without control characters")
		case size > maxText:
			c.problem(field, name, fmt.Sprintf("it has %d bytes with its value, more than the maximum of %d", size, maxText))
		case strings.Contains(values[name], "\x00"):
			c.problem("value of the "+field, name, `it has a '\x00'`)
		}
	}
}
