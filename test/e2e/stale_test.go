package e2e

import (
	"fmt"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
)

// Exit statuses of gpu-cdi-plugin, and a driver newer than the nodes'.
const (
	partly  = 3
	differs = 4
	newer   = "590.44.01"
)

// TestStaleSpec changes a node after its spec was written. `cdi diff` compares the spec with the node; `cdi validate`
// reports files and devices of the spec that are gone.
func TestStaleSpec(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		machine string
		change  []string // arguments of gpu-sim; DIR is the node
		// diff must be in the output of cdi diff.
		diff []string
		// invalid must be in the output of cdi validate.
		invalid []string
		// again is the exit status of cdi generate afterwards.
		again int
	}{
		"nothing changed": {machine: "mig-h100"},
		"the driver was upgraded": {
			machine: "dgx-h100",
			change:  []string{"create", "DIR", "--machine", "dgx-h100", "--driver", newer, "--force"},
			diff:    []string{"580.126.09 -> " + newer},
			invalid: []string{"driver: ", " files of driver 580.126.09 are gone"},
		},
		"a GPU is gone": {
			machine: "dgx-h100",
			change:  []string{"fault", "DIR", "gone", "--gpu", "3"},
			diff:    []string{"UUID(3)", "/dev/nvidia3"},
			invalid: []string{"device UUID(3): the driver has no such device"},
		},
		"a GPU fell off the bus": {
			machine: "dgx-h100",
			change:  []string{"fault", "DIR", "lost", "--gpu", "6"},
			diff:    []string{"UUID(6)"},
			invalid: []string{"device UUID(6): "},
			again:   partly,
		},
		"MIG was reconfigured": {
			machine: "mig-h100",
			change:  []string{"fault", "DIR", "mig", "--gpu", "0", "--profiles", "3g.40gb,3g.40gb"},
			diff:    []string{"MIG-"},
			invalid: []string{"device MIG-", "the driver has no such device"},
		},
		"MIG was turned on": {
			machine: "dgx-h100",
			change:  []string{"fault", "DIR", "mig", "--gpu", "2", "--profiles", "1g.10gb,2g.20gb"},
			diff:    []string{"UUID(2)", "2:0", "2:1", "MIG-"},
			invalid: []string{"device UUID(2): the GPU is in MIG mode"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := shared.Node(t, c.machine)
			n.Plugin(t, 0, "cdi", "diff", n.Spec())
			n.Plugin(t, 0, "cdi", "validate", n.Spec())
			words := uuids(t, n)
			if c.change == nil {
				return
			}
			simulate(t, n, c.change)
			checkContains(t, n.Plugin(t, differs, "cdi", "diff", n.Spec()), c.diff, words)
			checkContains(t, n.Plugin(t, differs, "cdi", "validate", n.Spec()), c.invalid, words)
			n.Plugin(t, c.again, "cdi", "generate", "--file", n.Spec())
			n.Plugin(t, c.again, "cdi", "diff", n.Spec())
			n.Plugin(t, 0, "cdi", "validate", n.Spec())
		})
	}
}

// uuids returns a replacer of "UUID(3)" by the UUID of GPU 3.
func uuids(t *testing.T, n *suite.Node) *strings.Replacer {
	t.Helper()
	snapshot, err := n.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	var pairs []string
	for _, d := range snapshot.Devices {
		pairs = append(pairs, fmt.Sprintf("UUID(%d)", d.Index), d.UUID)
	}
	return strings.NewReplacer(pairs...)
}

// simulate runs gpu-sim on the node.
func simulate(t *testing.T, n *suite.Node, args []string) {
	t.Helper()
	cmd := []string{shared.Program(t, "gpu-sim")}
	for _, a := range args {
		cmd = append(cmd, strings.ReplaceAll(a, "DIR", n.Root()))
	}
	proc.Must(t, 0, proc.Cmd{Args: cmd})
}

func checkContains(t *testing.T, res proc.Result, want []string, words *strings.Replacer) {
	t.Helper()
	for _, w := range want {
		if w = words.Replace(w); !strings.Contains(res.Stdout+res.Stderr, w) {
			t.Errorf("want %q, got %v", w, res)
		}
	}
}
