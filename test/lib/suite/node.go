package suite

import (
	"errors"
	"os"
	"path"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
)

// Node is a simulated node with the CDI spec that the built gpu-cdi-plugin wrote for it.
type Node struct {
	*sim.Node
	// CDIDir contains only the spec.
	CDIDir string

	suite *Suite
}

// Node creates a node of a machine and its spec.
func (s *Suite) Node(t testing.TB, machine string, options ...simtest.Option) *Node {
	t.Helper()
	n := &Node{Node: simtest.Node(t, machine, options...), CDIDir: t.TempDir(), suite: s}
	n.Plugin(t, 0, "cdi", "generate", "--file", n.Spec())
	return n
}

// Spec returns the path of the node's spec.
func (n *Node) Spec() string { return filepath.Join(n.CDIDir, "nvidia.json") }

// Plugin runs gpu-cdi-plugin on the node, and ends the test unless the exit status is want.
func (n *Node) Plugin(t testing.TB, want int, args ...string) proc.Result {
	t.Helper()
	global := []string{n.suite.Program(t, "gpu-cdi-plugin"), "--root", n.Root(), "--cdi-dir", n.CDIDir}
	return proc.Must(t, want, proc.Cmd{Args: append(global, args...)})
}

// Engines returns all engines, each with the versions of control groups that it can use here: to load a filter for
// cgroup v2, crun 1.8 needs more locked memory than a machine without CAP_SYS_RESOURCE allows.
func (s *Suite) Engines() []engine.Engine {
	var all []engine.Engine
	for _, e := range s.Runtimes() {
		all = append(all, e, &engine.Podman{Runtime: e.Runtime, Cgroup: e.Cgroup, Images: s.Images})
	}
	return all
}

// Runtimes returns the OCI runtimes that run without podman.
func (s *Suite) Runtimes() []*engine.Bare {
	return []*engine.Bare{
		{Runtime: "runc", Cgroup: engine.V1, Images: s.Images, Inject: s.inject},
		{Runtime: "crun", Cgroup: engine.V1, Images: s.Images, Inject: s.inject},
		{Runtime: "runc", Cgroup: engine.V2, Images: s.Images, Inject: s.inject},
	}
}

func (s *Suite) inject(t testing.TB, bundle, cdiDir string, names []string) {
	t.Helper()
	// In an empty root there is no /etc/cdi; the machine's may have specs.
	args := []string{
		s.Program(t, "gpu-cdi-plugin"), "--root", t.TempDir(), "--cdi-dir", cdiDir, "cdi", "inject", "--bundle", bundle,
	}
	proc.Must(t, 0, proc.Cmd{Args: append(args, names...)})
}

// Install installs programs in a simulated node's directory. It returns a function that runs one of them by name, with
// the directory as its root and with its own environment.
func Install(t testing.TB, root string, programs ...string) func(name string, args ...string) proc.Result {
	t.Helper()
	err := errors.Join(image.AddGlibc(root), os.MkdirAll(filepath.Join(root, "tmp"), 0o777))
	for _, p := range programs {
		err = errors.Join(err, image.AddProgram(root, p, path.Join("/usr/bin", filepath.Base(p))))
	}
	if err != nil {
		t.Fatalf("install programs in a node: %v", err)
	}
	return func(name string, args ...string) proc.Result {
		t.Helper()
		cmd := append([]string{path.Join("/usr/bin", name)}, args...)
		return proc.Must(t, 0, proc.Cmd{Args: cmd, Chroot: root, Env: []string{"PATH=/usr/sbin:/usr/bin"}})
	}
}
