package bed

import (
	"errors"
	"os"
	"path"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/rootfs"
)

// Node is a simulated node, with the spec that the built gpu-cdi-plugin wrote for it.
type Node struct {
	*sim.Node
	// CDIDir holds the spec and nothing else.
	CDIDir string

	bed *Bed
}

// Node makes a node of a machine and its spec.
func (b *Bed) Node(t testing.TB, machine string, options ...simtest.Option) *Node {
	t.Helper()
	n := &Node{Node: simtest.Node(t, machine, options...), CDIDir: t.TempDir(), bed: b}
	n.Plugin(t, 0, "cdi", "generate", "--file", n.Spec())
	return n
}

// Spec is the path of the node's spec.
func (n *Node) Spec() string { return filepath.Join(n.CDIDir, "nvidia.json") }

// Plugin runs gpu-cdi-plugin on the node, and ends the test unless it exits with the status want.
func (n *Node) Plugin(t testing.TB, want int, args ...string) proc.Result {
	t.Helper()
	global := []string{n.bed.Program(t, "gpu-cdi-plugin"), "--root", n.Root(), "--cdi-dir", n.CDIDir}
	return proc.Must(t, want, proc.Cmd{Args: append(global, args...)})
}

// Engines are all engines, each with the versions of control groups that it can run on here: crun 1.8 asks for more
// locked memory than a machine without CAP_SYS_RESOURCE has when it loads a filter for cgroup v2.
func (b *Bed) Engines() []engine.Engine {
	var all []engine.Engine
	for _, e := range b.Runtimes() {
		all = append(all, e, &engine.Podman{Runtime: e.Runtime, Cgroup: e.Cgroup, Images: b.Images})
	}
	return all
}

// Runtimes are the engines that are OCI runtimes alone.
func (b *Bed) Runtimes() []*engine.Bare {
	return []*engine.Bare{
		{Runtime: "runc", Cgroup: engine.V1, Images: b.Images, Inject: b.inject},
		{Runtime: "crun", Cgroup: engine.V1, Images: b.Images, Inject: b.inject},
		{Runtime: "runc", Cgroup: engine.V2, Images: b.Images, Inject: b.inject},
	}
}

func (b *Bed) inject(t testing.TB, bundle, cdiDir string, names []string) {
	t.Helper()
	// With an empty root the specs in the machine's own /etc/cdi do not count.
	args := []string{b.Program(t, "gpu-cdi-plugin"), "--root", t.TempDir(), "--cdi-dir", cdiDir, "cdi", "inject", "--bundle", bundle}
	proc.Must(t, 0, proc.Cmd{Args: append(args, names...)})
}

// Install makes a simulated node's directory a root that programs can run in, installs some there, and returns a
// function that runs one of them by name, with the node as its root and an environment of its own.
func Install(t testing.TB, root string, programs ...string) func(name string, args ...string) proc.Result {
	t.Helper()
	err := errors.Join(rootfs.AddGlibc(root), os.MkdirAll(filepath.Join(root, "tmp"), 0o777))
	for _, p := range programs {
		err = errors.Join(err, rootfs.AddProgram(root, p, path.Join("/usr/bin", filepath.Base(p))))
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
