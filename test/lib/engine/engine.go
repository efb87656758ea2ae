// Package engine runs containers with real engines for the tests: podman, and runc and crun by themselves.
//
// The state of an engine is in a temporary directory, and podman has a mount namespace of its own, so that tests can
// run in parallel and leave nothing on the machine.
package engine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Container is a container to run with any engine.
type Container struct {
	Image image.Kind
	Args  []string
	// CDIDir is the directory of the CDI specs. Devices are the fully qualified names of the requested devices.
	CDIDir  string
	Devices []string
	// ReadOnly makes the root read-only.
	ReadOnly bool
	// Mknod lets the container make device nodes; the device cgroup still decides which it can open.
	Mknod bool
	// Annotations are the container's. Env has variables for its program.
	Annotations map[string]string
	Env         []string
	// Options are further arguments of podman run.
	Options []string
}

// Engine runs containers. Run waits until the container has ended. If the container could not be started, the result
// has the engine's exit status and message.
type Engine interface {
	String() string
	Run(t testing.TB, c Container) proc.Result
}

var (
	_ Engine = (*Podman)(nil)
	_ Engine = (*Bare)(nil)
)

// timeout is how long a container may take, on a busy machine too.
const timeout = 2 * time.Minute

// Bare is an OCI runtime without an engine and without CDI: devices are injected into the bundle before it starts.
type Bare struct {
	Runtime string // "runc" or "crun"
	// Wrapper is the path of gpu-cdi-runtime, which is called in place of the runtime and runs it; empty means none.
	Wrapper string
	// Hook is the path of prestart-hook, which the runtime runs in the createRuntime stage; empty means none. With a
	// hook, the container's devices are given as annotations.
	Hook   string
	Cgroup Cgroup
	Images *Images
	// Inject injects devices into a bundle's config.json.
	Inject func(t testing.TB, bundle, cdiDir string, names []string)
}

// String returns the name of the runtime and the control groups, like "runc on cgroup v2".
func (b *Bare) String() string {
	name := runtimeName(b.Runtime, b.Wrapper)
	if b.Hook != "" {
		name += " and a createRuntime hook"
	}
	return fmt.Sprintf("%s on %s", name, b.Cgroup)
}

// Run runs a container in a fresh bundle, on a fresh copy of its image.
func (b *Bare) Run(t testing.TB, c Container) proc.Result {
	t.Helper()
	if b.Hook != "" {
		return b.runHook(t, c)
	}
	bundle := b.Bundle(t, b.Images.Copy(t, c.Image), c)
	if b.Wrapper == "" {
		return b.Start(t, bundle)
	}
	bundle.Runtime = b.Wrapper
	return execute(t, inNamespace(t, c.CDIDir, policyFor(t, b.Runtime), b.Cgroup, bundle.Command()...))
}

// runHook runs a container whose devices are annotations, with a hook that injects them.
func (b *Bare) runHook(t testing.TB, c Container) proc.Result {
	t.Helper()
	// crun discards the standard error of hooks, unless an annotation names a file.
	log := filepath.Join(t.TempDir(), "hook-stderr")
	all := map[string]string{"run.oci.hooks.stderr": log}
	maps.Copy(all, c.Annotations)
	if len(c.Devices) > 0 {
		all["cdi.k8s.io/devices"] = strings.Join(c.Devices, ",")
	}
	c.Devices, c.Annotations = nil, all
	bundle := b.Bundle(t, b.Images.Copy(t, c.Image), c)
	err := bundle.Edit(func(s *specs.Spec) error {
		s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{
			Path: b.Hook, Args: []string{"prestart-hook", "create-runtime"}, Env: []string{"PATH=/usr/sbin:/usr/bin"},
		}}}
		return nil
	})
	testenv.Must(t, err)
	res := execute(t, inNamespace(t, c.CDIDir, "", b.Cgroup, bundle.Command()...))
	if message, err := os.ReadFile(log); err == nil && res.Code != 0 {
		res.Stderr += string(message)
	}
	return res
}

func runtimeName(runtime, wrapper string) string {
	if wrapper != "" {
		return filepath.Base(wrapper) + " and " + runtime
	}
	return runtime
}

// policyFor creates a directory for /etc with a policy that makes gpu-cdi-runtime run that runtime.
func policyFor(t testing.TB, runtime string) string {
	t.Helper()
	etc := t.TempDir()
	policy := "runtime: " + testenv.Command(t, runtime) + "\n"
	err := errors.Join(os.Mkdir(filepath.Join(etc, "gpu-cdi-plugin"), 0o755),
		os.WriteFile(filepath.Join(etc, "gpu-cdi-plugin/hook.yaml"), []byte(policy), 0o644))
	testenv.Must(t, err)
	return etc
}

// Bundle makes a bundle of a container with a root file system and its devices.
func (b *Bare) Bundle(t testing.TB, rootfs string, c Container) *image.Bundle {
	t.Helper()
	bundle, err := image.NewBundle(t.Context(), testenv.Command(t, b.Runtime), t.TempDir(),
		image.BundleOptions{
			Root: rootfs, ReadOnly: c.ReadOnly, Args: c.Args, Mknod: c.Mknod, Annotations: c.Annotations, Env: c.Env,
		})
	testenv.Must(t, err)
	if len(c.Devices) > 0 {
		b.Inject(t, bundle.Dir, c.CDIDir, c.Devices)
	}
	return bundle
}

// Start runs a bundle and waits for its end.
func (b *Bare) Start(t testing.TB, bundle *image.Bundle) proc.Result {
	t.Helper()
	return execute(t, inNamespace(t, "", "", b.Cgroup, bundle.Command()...))
}

func execute(t testing.TB, args []string) proc.Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	res, err := proc.Run(ctx, proc.Cmd{Args: args})
	testenv.Must(t, err)
	return res
}
