package e2e

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/suite"
)

// The messages for the result of open. The device numbers of a simulated node have no driver, and the kernel checks the
// device cgroup first: so ENXIO means that the container may use the device, and EPERM that it may not.
const (
	permitted = "No such device or address"
	forbidden = "Operation not permitted"
)

// TestAccess gives a container one GPU of eight. It makes device nodes for all of them and can open only that of its
// own.
func TestAccess(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "dgx-h100")
	snapshot, err := n.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	const given = 5
	for _, e := range append(shared.Engines(), live(t)...) {
		t.Run(e.String(), func(t *testing.T) {
			t.Parallel()
			var nodes []node
			for _, d := range snapshot.Devices {
				nodes = append(nodes, hostNode(t, n, fmt.Sprintf("nvidia%d", d.Minor), d.Index == given))
			}
			checkAccess(t, e, n, nodes, fmt.Sprint(given))
		})
	}
}

// TestMIGAccess gives a container one MIG device. It cannot open the capability nodes of the GPU's other instances.
func TestMIGAccess(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "mig-h100")
	snapshot, err := n.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	given, nodes := migNodes(t, n, snapshot.Devices)
	for _, e := range append(shared.Engines(), live(t)...) {
		t.Run(e.String(), func(t *testing.T) {
			t.Parallel()
			checkAccess(t, e, n, nodes, given)
		})
	}
}

// migNodes picks a MIG device of a GPU with several, and returns all capability nodes, with those of the device marked.
func migNodes(t *testing.T, n *suite.Node, devices []gpu.Device) (given string, nodes []node) {
	t.Helper()
	for _, d := range devices {
		for _, m := range d.MIG {
			is := given == "" && len(d.MIG) > 1
			if is {
				given = m.UUID
			}
			for _, capability := range []int{m.GPUInstanceCap, m.ComputeInstanceCap} {
				nodes = append(nodes, hostNode(t, n, fmt.Sprintf("nvidia-caps/nvidia-cap%d", capability), is))
			}
		}
	}
	if given == "" {
		t.Fatal("the machine has no GPU with several MIG devices")
	}
	return given, nodes
}

// node is a device node of the host, and whether a container may use it.
type node struct {
	name         string
	major, minor uint32
	given        bool
}

func hostNode(t *testing.T, n *suite.Node, name string, given bool) node {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(n.Root()+"/dev/"+name, &st); err != nil {
		t.Fatalf("stat /dev/%s of the node: %v", name, err)
	}
	return node{name, unix.Major(st.Rdev), unix.Minor(st.Rdev), given}
}

func checkAccess(t *testing.T, e engine.Engine, n *suite.Node, nodes []node, devices ...string) {
	t.Helper()
	var script strings.Builder
	for i, d := range nodes {
		fmt.Fprintf(&script, "mknod /dev/own%d c %d %d || exit\n(: <>/dev/own%d) 2>&1\n", i, d.major, d.minor, i)
	}
	c := engine.Container{Image: image.Static, Mknod: true, Args: []string{"sh", "-c", script.String()}}
	res := run(t, e, n, c, devices...)
	lines := strings.Split(strings.TrimSuffix(res.Stdout, "\n"), "\n")
	if len(lines) != len(nodes) {
		t.Fatalf("want a line for each of %d nodes, got %v", len(nodes), res)
	}
	for i, d := range nodes {
		want := forbidden
		if d.given {
			want = permitted
		}
		if !strings.Contains(lines[i], want) {
			t.Errorf("node with the numbers of /dev/%s: want %q, got %q", d.name, want, lines[i])
		}
	}
}
