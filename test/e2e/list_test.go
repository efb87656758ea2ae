package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// listed is a line of `nvidia-smi -L`: a GPU, or a MIG device of the GPU above it.
type listed struct {
	Index      int
	Name, UUID string
}

var line = regexp.MustCompile(`^(?:GPU |  MIG )(?:(\d+): (.+)|(\S+) +Device +(\d+):) \(UUID: (\S+)\)$`)

// parseList reads the output of `nvidia-smi -L`.
func parseList(t *testing.T, out string) (list []listed) {
	t.Helper()
	for text := range strings.Lines(out) {
		m := line.FindStringSubmatch(strings.TrimSuffix(text, "\n"))
		if m == nil {
			t.Fatalf("line of nvidia-smi -L that is neither a GPU nor a MIG device: %q", text)
		}
		l := listed{Name: m[2] + m[3], UUID: m[5]}
		if _, err := fmt.Sscan(m[1]+m[4], &l.Index); err != nil {
			t.Fatal(err)
		}
		list = append(list, l)
	}
	return list
}

// request has names of CDI devices, and what nvidia-smi must list in a container with them.
type request struct {
	names []string
	want  []listed
}

// requests are the ways to request GPUs of a node, with what nvidia-smi must list.
func requests(t *testing.T, n *suite.Node) map[string]request {
	t.Helper()
	snapshot, err := n.Snapshot()
	testenv.Must(t, err)
	var whole, sliced []gpu.Device
	var everything []listed
	for _, d := range snapshot.Devices {
		switch {
		case !d.MIGEnabled:
			whole = append(whole, d)
		case len(d.MIG) > 0:
			sliced = append(sliced, d)
		default:
			continue // in MIG mode without MIG devices it cannot be used
		}
		everything = append(everything, listedAs(len(whole)+len(sliced)-1, d, d.MIG...)...)
	}
	all := map[string]request{"all": {[]string{"all"}, everything}}
	if len(whole) > 0 {
		first, last := whole[0], whole[len(whole)-1]
		all["an index"] = request{[]string{fmt.Sprint(first.Index)}, listedAs(0, first)}
		all["a UUID"] = request{[]string{last.UUID}, listedAs(0, last)}
		if len(whole) > 1 {
			all["two devices"] = request{
				[]string{last.UUID, fmt.Sprint(first.Index)}, append(listedAs(0, first), listedAs(1, last)...),
			}
		}
	}
	if len(sliced) > 0 {
		migRequests(all, sliced)
	}
	return all
}

func migRequests(all map[string]request, sliced []gpu.Device) {
	first, last := sliced[0], sliced[len(sliced)-1]
	a, b := first.MIG[len(first.MIG)-1], last.MIG[0]
	all["a MIG device by index"] = request{[]string{fmt.Sprintf("%d:%d", first.Index, a.Index)}, listedAs(0, first, a)}
	all["a MIG device by UUID"] = request{[]string{b.UUID}, listedAs(0, last, b)}
	if first.Index != last.Index {
		all["MIG devices of two GPUs"] = request{
			[]string{b.UUID, a.UUID},
			append(listedAs(0, first, a), listedAs(1, last, b)...),
		}
	}
}

// listedAs is a GPU as the i-th in a container, with the given MIG devices of it.
func listedAs(i int, d gpu.Device, mig ...gpu.MIGDevice) []listed {
	list := []listed{{i, d.Name, d.UUID}}
	for j, m := range mig {
		list = append(list, listed{j, m.Profile, m.UUID})
	}
	return list
}

// names returns the fully-qualified names of devices.
func names(devices ...string) (list []string) {
	for _, d := range devices {
		list = append(list, "nvidia.com/gpu="+d)
	}
	return list
}

// containerSMI is the path of nvidia-smi in a container, wherever the driver has it on the node.
const containerSMI = "/usr/bin/nvidia-smi"

// smi returns the command that lists GPUs in a container. LD_LIBRARY_PATH must not be set, so that the loader needs its
// cache.
func smi() []string {
	return []string{"sh", "-c", `[ -z "${LD_LIBRARY_PATH+set}" ] || exit 99; exec "$0" -L`, containerSMI}
}

// smiIn returns smi, or the same command without its shell where the image has none.
func smiIn(kind image.Kind) []string {
	if kind == image.Distroless {
		return []string{containerSMI, "-L"}
	}
	return smi()
}

// checkList checks the list of nvidia-smi in a container.
func checkList(t *testing.T, res proc.Result, want []listed) {
	t.Helper()
	if res.Code != 0 {
		t.Fatalf("the container did not list its GPUs: %v", res)
	}
	if diff := cmp.Diff(want, parseList(t, res.Stdout)); diff != "" {
		t.Errorf("nvidia-smi -L in the container (-want +got):\n%s", diff)
	}
}

// run runs a container of an image with devices of the node.
func run(t *testing.T, e engine.Engine, n *suite.Node, c engine.Container, devices ...string) proc.Result {
	t.Helper()
	c.CDIDir, c.Devices = n.CDIDir, names(devices...)
	return e.Run(t, c)
}
