// Package fidelity compares the product's specs with those of NVIDIA's nvidia-ctk, which is built from its pinned
// module and not modified. On every simulated machine both must give containers the same device nodes, names, driver
// files and links. The intended differences are listed, each with its reason. It tests the simulation too.
package fidelity

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/specdiff"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

var (
	update = flag.Bool("update", false, "write the list of differences into specs/README.md")
	shared *suite.Suite
)

func TestMain(m *testing.M) { os.Exit(suite.Run(m, &shared)) }

// generate are the arguments of gpu-cdi-plugin. The /proc of a simulated node has no processes, so the hook beside the
// program is not found.
var generate = []string{"--hook-path", "/usr/bin/prestart-hook", "cdi", "generate"}

// Both programs run with a simulated node as their root directory, so that they read its /proc, /sys, /dev and driver
// as they would on a host, without flags.
func TestSpecsDifferOnlyAsListed(t *testing.T) {
	testenv.Root(t) // for chroot
	used := &specdiff.Usage{Listed: specdiff.Differences}
	t.Run("machines", func(t *testing.T) {
		for _, machine := range sim.Machines() {
			t.Run(machine, func(t *testing.T) {
				t.Parallel()
				root := simtest.Node(t, machine).Root()
				inside := suite.Install(t, root,
					shared.Peer(t, "nvidia-ctk"),
					shared.Program(t, "gpu-cdi-plugin"),
					shared.Program(t, "prestart-hook"))
				their := specdiff.Facts(root, specdiff.Parse(t, inside("nvidia-ctk", "cdi", "generate", "--format=json").Stdout))
				our := specdiff.Facts(root, specdiff.Parse(t, inside("gpu-cdi-plugin", generate...).Stdout))
				if len(their) == 0 {
					t.Fatal("nvidia-ctk's spec is empty")
				}
				used.Check(t, specdiff.Theirs, specdiff.Without(their, our))
				used.Check(t, specdiff.Ours, specdiff.Without(our, their))
			})
		}
	})
	if !t.Failed() {
		used.CheckAll(t)
	}
}

// A spec that is made with --root differs only in the host's paths from one that is made with the node as the root
// directory.
func TestRootFlagChangesOnlyHostPaths(t *testing.T) {
	for _, machine := range sim.Machines() {
		t.Run(machine, func(t *testing.T) {
			t.Parallel()
			root := simtest.Node(t, machine).Root()
			inside := suite.Install(t, root, shared.Program(t, "gpu-cdi-plugin"), shared.Program(t, "prestart-hook"))
			want := inside("gpu-cdi-plugin", generate...).Stdout
			cmd := append([]string{shared.Program(t, "gpu-cdi-plugin"), "--root", root}, generate...)
			outside := proc.Must(t, 0, proc.Cmd{Args: cmd})
			got := strings.ReplaceAll(outside.Stdout, root+"/", "/")
			inner, outer := specdiff.Facts(root, specdiff.Parse(t, want)), specdiff.Facts(root, specdiff.Parse(t, got))
			if diff := specdiff.Diff(inner, outer); diff != "" {
				t.Errorf("the spec made from outside (-inside +outside):\n%s", diff)
			}
		})
	}
}

var listing = regexp.MustCompile(`(?s)(<!-- differences -->\n).*?(<!-- end of differences -->)`)

// specs/README.md has the list of differences that the comparison uses.
func TestDifferencesAreListed(t *testing.T) {
	root, err := suite.Root()
	testenv.Must(t, err)
	file := filepath.Join(root, "specs/README.md")
	data, err := os.ReadFile(file)
	testenv.Must(t, err)
	if !listing.Match(data) {
		t.Fatalf("%s lacks a line %q or %q", file, "<!-- differences -->", "<!-- end of differences -->")
	}
	want := listing.ReplaceAllString(string(data), "${1}"+strings.ReplaceAll(table(), "$", "$$")+"${2}")
	if *update {
		testenv.Must(t, os.WriteFile(file, []byte(want), 0o644))
		return
	}
	if want != string(data) {
		t.Errorf("the list of differences in %s is out of date; write it with\n\tgo test ./test/fidelity -update", file)
	}
}

// table is the table of differences in specs/README.md.
func table() string {
	var b strings.Builder
	b.WriteString("| only in | what | why |\n|---|---|---|\n")
	for _, d := range specdiff.Differences {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", d.Only, d.What, d.Reason)
	}
	return b.String()
}
