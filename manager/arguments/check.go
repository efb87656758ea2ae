package arguments

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"

	"gpu-cdi-plugin/manager/model"
)

// checker collects what is wrong with run options. Nobody has checked them before: they are what plugins sent.
type checker struct {
	problems []error
}

func (c *checker) problem(what, text, why string) {
	c.problems = append(c.problems, fmt.Errorf("%s %q: %w: %s", what, text, ErrInexpressible, why))
}

// all checks what no container can have.
func (c *checker) all(o model.RunOptions) {
	for _, name := range o.CDIDevices {
		if !parser.IsQualifiedName(name) { // an engine would take it for the path of a device node
			c.problem("CDI device", name, "want a qualified name, such as nvidia.com/gpu=0")
		}
	}
	for _, d := range o.Devices {
		c.path("device node", d.HostPath)
		c.path("device node", d.ContainerPath)
		if d.Permissions == "" || strings.Trim(d.Permissions, "rwm") != "" {
			c.problem(
				"device node",
				d.ContainerPath,
				fmt.Sprintf("its permissions %q are not some of r, w and m", d.Permissions),
			)
		}
	}
	for _, m := range o.Mounts {
		c.path("mount", m.HostPath)
		c.path("mount", m.ContainerPath)
	}
	c.pairs("environment variable", o.Envs)
	c.pairs("annotation", o.Annotations)
}

func (c *checker) path(what, p string) {
	if !path.IsAbs(p) {
		c.problem(what, p, "want an absolute path")
	}
	c.without(what, p, "\x00")
}

func (c *checker) pairs(what string, values map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if name == "" || strings.Contains(name, "=") {
			c.problem(what, name, "want a name without =")
		}
		c.without(what, name+"="+values[name], "\x00")
	}
}

// without checks that a text has none of some characters.
func (c *checker) without(what, text, characters string) {
	if i := strings.IndexAny(text, characters); i >= 0 {
		c.problem(what, text, fmt.Sprintf("it has a %q", text[i]))
	}
}
