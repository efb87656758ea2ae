package image

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"

	"github.com/opencontainers/runtime-spec/specs-go"

	"gpu-cdi-plugin/test/lib/proc"
)

// BundleOptions describe a bundle's container.
type BundleOptions struct {
	// Root is the directory of the root file system.
	Root     string
	ReadOnly bool
	Args     []string
	// Mknod lets the container make device nodes; the device cgroup still decides which it can open.
	Mknod bool
	// Annotations are the container's. Env has variables for its program besides those of the sample configuration.
	Annotations map[string]string
	Env         []string
}

// Bundle is a container on disk for one runtime. It can be run repeatedly.
type Bundle struct {
	// Dir holds config.json.
	Dir string
	// Runtime is the path of the OCI runtime. Its state is also in Dir.
	Runtime string
}

// NewBundle makes a bundle in dir, an empty directory, from the runtime's sample configuration.
func NewBundle(ctx context.Context, runtime, dir string, o BundleOptions) (*Bundle, error) {
	res, err := proc.Run(ctx, proc.Cmd{Args: []string{runtime, "spec"}, Dir: dir})
	if err != nil {
		return nil, err
	}
	if res.Code != 0 {
		return nil, fmt.Errorf("make a sample configuration with %s: %v", runtime, res)
	}
	b := &Bundle{Dir: dir, Runtime: runtime}
	return b, b.Edit(o.configure)
}

func (o *BundleOptions) configure(s *specs.Spec) error {
	s.Root = &specs.Root{Path: o.Root, Readonly: o.ReadOnly}
	s.Process.Args, s.Process.Terminal = o.Args, false
	s.Process.Env = append(s.Process.Env, o.Env...)
	s.Annotations = o.Annotations
	// A machine without CAP_SYS_RESOURCE cannot raise limits.
	s.Process.Rlimits = nil
	if o.Mknod {
		caps := s.Process.Capabilities
		for _, set := range []*[]string{&caps.Bounding, &caps.Effective, &caps.Permitted} {
			*set = append(*set, "CAP_MKNOD")
		}
	}
	// The sample has a cgroup namespace only on machines that have nothing but cgroup v2. No test needs one.
	s.Linux.Namespaces = slices.DeleteFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
		return n.Type == specs.CgroupNamespace
	})
	return nil
}

// Edit changes the bundle's configuration.
func (b *Bundle) Edit(edit func(*specs.Spec) error) error {
	path := filepath.Join(b.Dir, "config.json")
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	if err := edit(&spec); err != nil {
		return fmt.Errorf("edit %s: %w", path, err)
	}
	if data, err = json.MarshalIndent(&spec, "", "  "); err != nil {
		return err
	}
	return os.WriteFile(path, data, 0o644)
}

// containers numbers containers, so that their names and cgroups are unique on the machine.
var containers atomic.Int64

// Command returns a command line that runs the bundle, each time with a new container name.
func (b *Bundle) Command() []string {
	id := fmt.Sprintf("gpu-test-%d-%d", os.Getpid(), containers.Add(1))
	return []string{b.Runtime, "--root", filepath.Join(b.Dir, "state"), "run", "--bundle", b.Dir, id}
}
