package e2e

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The messages for the result of open. The device numbers of a simulated node have no driver, and the kernel checks the
// device cgroup first: so ENXIO means that the container may use the device, and EPERM that it may not.
const (
	permitted = "No such device or address"
	forbidden = "Operation not permitted"
)

// endOfList is printed by a container after the list of nvidia-smi.
const endOfList = "end of the list"

// TestAccess gives a container one GPU of eight. It lists that one, makes device nodes for all of them and can open
// only those of its own.
func TestAccess(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "dgx-h100")
	snapshot, err := n.Snapshot()
	testenv.Must(t, err)
	const given = 5
	var nodes []node
	var list []listed
	for _, d := range snapshot.Devices {
		nodes = append(nodes, hostNode(t, n, fmt.Sprintf("nvidia%d", d.Minor), d.Index == given))
		if d.Index == given {
			list = listedAs(0, d)
		}
	}
	checkAccess(t, n, nodes, list, fmt.Sprint(given))
}

// TestMIGAccess gives a container one MIG device. It lists that one and cannot open the capability nodes of the GPU's
// other instances.
func TestMIGAccess(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "mig-h100")
	snapshot, err := n.Snapshot()
	testenv.Must(t, err)
	given, list, nodes := migNodes(t, n, snapshot.Devices)
	checkAccess(t, n, nodes, list, given)
}

// migNodes picks a MIG device of a GPU with several, and returns what nvidia-smi must list, and all capability nodes,
// with those of the device marked.
func migNodes(t *testing.T, n *suite.Node, devices []gpu.Device) (given string, list []listed, nodes []node) {
	t.Helper()
	for _, d := range devices {
		for _, m := range d.MIG {
			is := given == "" && len(d.MIG) > 1
			if is {
				given, list = m.UUID, listedAs(0, d, m)
			}
			for _, capability := range []int{m.GPUInstanceCap, m.ComputeInstanceCap} {
				nodes = append(nodes, hostNode(t, n, fmt.Sprintf("nvidia-caps/nvidia-cap%d", capability), is))
			}
		}
	}
	if given == "" {
		t.Fatal("the machine has no GPU with several MIG devices")
	}
	return given, list, nodes
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

// checkAccess gives containers a device by every engine: by its request, or by an annotation. They list it, and then
// open nodes.
func checkAccess(t *testing.T, n *suite.Node, nodes []node, list []listed, device string) {
	t.Helper()
	open, answers := opening(nodes)
	script := fmt.Sprintf("%s -L && echo %s\n%s", containerSMI, endOfList, open)
	c := engine.Container{Image: image.Glibc, Mknod: true, Args: []string{"sh", "-c", script}, CDIDir: n.CDIDir}
	check := func(e engine.Engine, c engine.Container) {
		t.Run(e.String(), func(t *testing.T) {
			t.Parallel()
			res := e.Run(t, c)
			printed, opened, _ := strings.Cut(res.Stdout, endOfList+"\n")
			checkList(t, proc.Result{Code: res.Code, Stdout: printed, Stderr: res.Stderr}, list)
			checkAnswers(t, opened, answers)
		})
	}
	requesting, annotating := c, c
	requesting.Devices, annotating.Annotations = names(device), annotations(names(device)...)
	for _, e := range shared.Engines() {
		check(e, requesting)
	}
	for _, e := range annotated(t) {
		check(e, annotating)
	}
}

// opening returns a script that makes all nodes and opens them, and opens those that the container was given, and how
// the line ends that each prints. Capability nodes can only be read, also by root.
func opening(nodes []node) (script string, answers []string) {
	var b strings.Builder
	for i, d := range nodes {
		own, answer := fmt.Sprintf("/dev/own%d", i), forbidden
		if d.given {
			answer = permitted
			fmt.Fprintf(&b, "(: </dev/%s) 2>&1\n", d.name)
			answers = append(answers, "/dev/"+d.name+": "+permitted)
		}
		fmt.Fprintf(&b, "mknod %s c %d %d || exit\n(: <>%s) 2>&1\n", own, d.major, d.minor, own)
		answers = append(answers, own+": "+answer)
	}
	return b.String() + "true\n", answers
}

func checkAnswers(t *testing.T, opened string, answers []string) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(opened, "\n"), "\n")
	if len(lines) != len(answers) {
		t.Fatalf("want %d lines, got %q", len(answers), opened)
	}
	for i, want := range answers {
		if !strings.HasSuffix(lines[i], want) {
			t.Errorf("want %q, got %q", want, lines[i])
		}
	}
}
