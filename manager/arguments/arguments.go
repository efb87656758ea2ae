// Package arguments converts a container's run options to command-line arguments of a container engine, or to edits of
// an OCI bundle. It is pure: it calls no engine and reads no file.
package arguments

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/model"
)

var (
	// ErrUnknownEngine means that the package does not know an engine.
	ErrUnknownEngine = errors.New("unknown container engine")
	// ErrInexpressible means that run options are malformed, or that an engine has no argument for them.
	ErrInexpressible = errors.New("cannot be passed to a container engine")
)

// Engines returns the names of the known engines.
func Engines() []string { return []string{"podman", "docker", "nerdctl"} }

// For returns the run options as arguments of an engine's `run` and `create`. Each option is one argument that
// includes its value, like --device=nvidia.com/gpu=0, so that no value can be taken for another option. Older engines
// refuse some of them: CDI devices need podman 4, docker 25 or nerdctl 2.1, and annotations need docker 24 or nerdctl
// 2.
//
// The error wraps ErrUnknownEngine, or it wraps ErrInexpressible and has all problems. For example, engines split a
// device at colons and a mount at commas, so their paths must not contain these.
func For(engine string, o model.RunOptions) ([]string, error) {
	if !slices.Contains(Engines(), engine) {
		return nil, fmt.Errorf("%w %q: want one of %s%s",
			ErrUnknownEngine, engine, strings.Join(Engines(), ", "), wording.Question(engine, Engines()))
	}
	c := checker{}
	c.valid(o)
	var args []string
	for _, name := range o.CDIDevices {
		args = append(args, "--device="+name)
	}
	for _, d := range o.Devices {
		c.without("device node", d.HostPath, ":,\"\r\n")
		c.without("device node", d.ContainerPath, ":,\"\r\n")
		args = append(args, "--device="+d.HostPath+":"+d.ContainerPath+":"+d.Permissions)
	}
	for _, m := range o.Mounts {
		c.without("mount", m.HostPath, ",\"\r\n")
		c.without("mount", m.ContainerPath, ",\"\r\n")
		arg := "--mount=type=bind,source=" + m.HostPath + ",target=" + m.ContainerPath
		if m.ReadOnly {
			arg += ",readonly"
		}
		args = append(args, arg)
	}
	for _, name := range slices.Sorted(maps.Keys(o.Envs)) {
		c.without("environment variable", name, " \t\r\n\v\f") // podman refuses these names
		args = append(args, "--env="+name+"="+o.Envs[name])
	}
	for _, key := range slices.Sorted(maps.Keys(o.Annotations)) {
		annotation := key + "=" + o.Annotations[key]
		if engine == "podman" {
			c.without("annotation", annotation, "\r") // podman drops carriage returns before line breaks
			annotation = csvField(annotation)
		}
		args = append(args, "--annotation="+annotation)
	}
	if err := errors.Join(c.problems...); err != nil {
		return nil, err
	}
	return args, nil
}

// checker collects the problems of run options.
type checker struct {
	problems []error
}

// valid checks the run options with RunOptions.Check.
func (c *checker) valid(o model.RunOptions) {
	if err := o.Check(); err != nil {
		c.problems = append(c.problems, fmt.Errorf("%w: %w", ErrInexpressible, err))
	}
}

// without records a problem if a text contains one of these characters.
func (c *checker) without(what, text, characters string) {
	if i := strings.IndexAny(text, characters); i >= 0 {
		c.problems = append(c.problems, fmt.Errorf("%s %q: %w: it has a %q", what, text, ErrInexpressible, text[i]))
	}
}

// csvField quotes a text for podman, which parses the value of --annotation as a line of CSV.
func csvField(text string) string {
	if strings.ContainsAny(text, ",\"\n") {
		return `"` + strings.ReplaceAll(text, `"`, `""`) + `"`
	}
	return text
}

// Edits returns the run options as edits of an OCI configuration. The type is CDI's: a device node of OCI would need
// numbers, which only the host knows. CDI devices and annotations are not included; annotations can be copied into the
// configuration as they are. The error wraps ErrInexpressible and has all problems.
func Edits(o model.RunOptions) (*specs.ContainerEdits, error) {
	c := checker{}
	c.valid(o)
	if err := errors.Join(c.problems...); err != nil {
		return nil, err
	}
	edits := &specs.ContainerEdits{}
	for _, name := range slices.Sorted(maps.Keys(o.Envs)) {
		edits.Env = append(edits.Env, name+"="+o.Envs[name])
	}
	for _, d := range o.Devices {
		edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{
			Path: d.ContainerPath, HostPath: d.HostPath, Permissions: d.Permissions,
		})
	}
	for _, m := range o.Mounts {
		access := "rw"
		if m.ReadOnly {
			access = "ro"
		}
		edits.Mounts = append(edits.Mounts, &specs.Mount{
			HostPath: m.HostPath, ContainerPath: m.ContainerPath, Options: []string{"rbind", "rprivate", access},
		})
	}
	return edits, nil
}
