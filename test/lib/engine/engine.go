// Package engine runs containers with real engines for the tests: podman, and runc and crun by themselves.
//
// Whatever an engine keeps is in a temporary directory, and podman has a mount namespace of its own, so that tests
// run beside each other and leave nothing on the machine.
package engine

import (
	"testing"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
)

// Container is a container to run, whatever the engine.
type Container struct {
	Image image.Kind
	Args  []string
	// CDIDir is the directory of the CDI specs, and Devices the fully-qualified names of the devices asked for.
	CDIDir  string
	Devices []string
	// ReadOnly makes the root read-only.
	ReadOnly bool
	// Mknod lets the container make device nodes; the device cgroup still decides about using them.
	Mknod bool
}

// Engine runs containers. Run waits for the container's end; a container that could not be started has the engine's
// exit status, which is not that of a program in it only by convention, and its message.
type Engine interface {
	String() string
	Run(t testing.TB, c Container) proc.Result
}

var (
	_ Engine = (*Podman)(nil)
	_ Engine = (*Bare)(nil)
)
