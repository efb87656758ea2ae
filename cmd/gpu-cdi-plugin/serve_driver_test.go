package main

import (
	"bytes"
	"os"
	"os/exec"
	"regexp"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The simulated library has only the functions of the driver that it plays.
func TestServeWithTheFunctionsOfEachDriver(t *testing.T) {
	t.Parallel()
	newest := simtest.Node(t, "dgx-h100")
	for _, driver := range []string{"470.256.02", "525.147.05", "535.261.03", "550.163.01", "555.58.02"} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			s := newServed(t, "dgx-h100", "mig-strategy: mixed\nprestart: {policy: clean}", simtest.Driver(driver))
			for _, args := range [][]string{{"devices", "-o", "json"}, {"cdi", "generate"}, {"topology"}} {
				if diff := cmp.Diff(printed(t, newest, args...), printed(t, s.node, args...)); diff != "" {
					t.Errorf("%v differ from those of driver %s (-it +this):\n%s", args, newest.Driver(), diff)
				}
			}

			s.start()
			e := s.kubelet.WaitListed(gpuResource, 8, 0)
			s.wantReady(e, s.uuids()[:3]...)
			s.leftOver(1)
			s.wantRefused(e, s.uuids()[1], "1024 MiB are in use without a process")
			s.xid(3, 79, nil)
			s.onlyUnhealthy(3)

			testenv.Must(t, s.node.SetMIG(4, []string{"3g.40gb", "1g.10gb"}))
			small := s.kubelet.WaitListed("nvidia.com/mig-1g.10gb", 1, 0)
			s.kubelet.WaitListed(gpuResource, 6, 1)
			id := s.migDevices(4, "1g.10gb")[0]
			s.offered(s.allocate(small, id)...)
			s.wantReady(small, id)
		})
	}
}

var versions = regexp.MustCompile(`"(driverVersion|cudaVersion)": .*|--(driver|cuda)-version=[\d.]+|libraries=.*`)

// printed is what a verb prints about a node, without the node's directory and its driver's versions.
func printed(t *testing.T, node *sim.Node, args ...string) string {
	t.Helper()
	exe, err := os.Executable()
	testenv.Must(t, err)
	cmd := exec.CommandContext(t.Context(), exe) // a process loads only one library
	cmd.Args = append([]string{"gpu-cdi-plugin", "--root", node.Root(), "--hook-path", "/bin/true"}, args...)
	cmd.Env = append(os.Environ(), insecure)
	cmd.Stderr = t.Output()
	out, err := cmd.Output()
	testenv.Must(t, err)
	text := bytes.ReplaceAll(out, []byte(node.Root()), nil)
	text = bytes.ReplaceAll(text, []byte(node.Driver()), []byte("VERSION"))
	return string(versions.ReplaceAll(text, nil))
}
