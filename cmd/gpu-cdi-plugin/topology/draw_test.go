package topology

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

// machine returns the snapshot of a simulated machine, as package nvml reads it.
func machine(t testing.TB, name string) *gpu.Snapshot {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "..", "nvml", "testdata", name+".golden.json"))
	testenv.Must(t, err)
	s := &gpu.Snapshot{}
	testenv.Must(t, json.Unmarshal(data, s))
	return s
}

func machines(t testing.TB) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("..", "..", "..", "nvml", "testdata", "*.golden.json"))
	if err != nil || len(files) < 7 {
		t.Fatalf("%d machines, want at least 7 (%v)", len(files), err)
	}
	var names []string
	for _, f := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(f), ".golden.json"))
	}
	return names
}

// withLost makes a GPU unreadable.
func withLost(s *gpu.Snapshot, index int, reason string) *gpu.Snapshot {
	s.Devices[index].Error = reason
	var links []gpu.Link
	for _, l := range s.Links {
		if l.A != index && l.B != index {
			links = append(links, l)
		}
	}
	s.Links = links
	return s
}

// held returns a container of a pod in a namespace that holds devices.
func held(namespace, pod, container string, ids ...string) podresources.Holder {
	return podresources.Holder{Namespace: namespace, Pod: pod, Container: container, Devices: ids}
}

// busy returns a node with a lost GPU, MIG devices, and pods that share devices.
func busy(t testing.TB) Node {
	t.Helper()
	s := withLost(machine(t, "mig-h100"), 7, "GPU is lost: it has fallen off the bus or is otherwise inaccessible")
	mig := func(i, j int) string { return s.Devices[i].MIG[j].UUID }
	return Node{Snapshot: s, Holders: []podresources.Holder{
		held("training", "llama-7b-worker-0", "trainer", s.Devices[6].UUID),
		held("inference", "chat-5d8f7c9b6-x2x4k", "server", mig(0, 0), mig(1, 2)),
		held("inference", "embed-0", "server", mig(4, 0)+"::0", mig(4, 0)+"::1"),
		held("inference", "embed-0", "sidecar", mig(4, 1)),
		held("notebooks", "jupyter-alice", "notebook", mig(4, 0)+"::2"),
		held("storage", "cache-0", "cache", "nvme-3"),
	}}
}

// documented returns the node of the picture in the documentation.
func documented(t testing.TB) Node {
	t.Helper()
	s := machine(t, "dgx-h100")
	id := func(i int) string { return s.Devices[i].UUID }
	return Node{Snapshot: s, Holders: []podresources.Holder{
		held("training", "llama-worker-0", "trainer", id(0), id(1), id(2), id(3)),
		held("inference", "chat-0", "server", id(4), id(5)),
	}}
}

// fabric128 returns a node of 128 GPUs behind a tree of PCIe switches.
func fabric128() *gpu.Snapshot {
	s := &gpu.Snapshot{DriverVersion: "580.126.09", CUDAVersion: "13.0"}
	for i := range 128 {
		s.Devices = append(s.Devices, gpu.Device{
			Index: i, UUID: fmt.Sprintf("GPU-%d", i), Name: "NVIDIA L4", MemoryBytes: 24 << 30, NUMANode: i / 32,
			PCIBusID: fmt.Sprintf("%04x:%02x:00.0", i/32, 0x10+i%32*4),
		})
		for j := i + 1; j < 128; j++ {
			s.Links = append(s.Links, gpu.Link{A: i, B: j, PCIe: distance(i, j)})
		}
	}
	return s
}

func distance(i, j int) gpu.PCIePath {
	for n, path := range map[int]gpu.PCIePath{
		4: gpu.PathSingleSwitch, 8: gpu.PathMultipleSwitches, 16: gpu.PathHostBridge, 32: gpu.PathNode,
	} {
		if i/n == j/n && (n == 4 || i/(n/2) != j/(n/2)) {
			return path
		}
	}
	return gpu.PathSystem
}

func TestGolden(t *testing.T) {
	noSocket := "there is no socket of the kubelet at /var/lib/kubelet/pod-resources/kubelet.sock"
	nodes := map[string]Node{
		filepath.Join("testdata", "busy.svg"):                            busy(t),
		filepath.Join("..", "..", "..", "docs", "topology-dgx-h100.svg"): documented(t),
		filepath.Join("testdata", "not-a-tree.svg"):                      {Snapshot: notATree(), HoldersUnknown: noSocket},
		filepath.Join("testdata", "bridges.svg"):                         {Snapshot: bridges()},
	}
	for _, name := range machines(t) {
		nodes[filepath.Join("testdata", name+".svg")] = Node{Snapshot: machine(t, name), HoldersUnknown: noSocket}
	}
	for path, n := range nodes {
		t.Run(filepath.Base(path), func(t *testing.T) {
			got := drawNode(t, n)
			checkPicture(t, n)
			if *update {
				testenv.Must(t, os.WriteFile(path, got, 0o644))
			}
			if !bytes.Equal(got, drawNode(t, n)) {
				t.Error("the same node gives two pictures")
			}
			want, err := os.ReadFile(path)
			testenv.Must(t, err)
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("%s (-want +got; -update writes the file):\n%s", path, diff)
			}
		})
	}
}

// notATree returns a node whose PCIe paths do not follow a tree.
func notATree() *gpu.Snapshot {
	s := &gpu.Snapshot{}
	for i := range 3 {
		s.Devices = append(s.Devices, gpu.Device{Index: i, Name: "NVIDIA L4", UUID: fmt.Sprintf("GPU-%d", i)})
	}
	s.Links = []gpu.Link{
		{A: 0, B: 1, PCIe: gpu.PathSingleSwitch},
		{A: 0, B: 2, PCIe: gpu.PathSystem},
		{A: 1, B: 2, PCIe: gpu.PathSingleSwitch},
	}
	return s
}

// bridges returns a node of ten GPUs below one host bridge, with NVLink bridges between near and far GPUs.
func bridges() *gpu.Snapshot {
	s := &gpu.Snapshot{}
	for i := range 10 {
		s.Devices = append(s.Devices, gpu.Device{
			Index: i, Name: "NVIDIA A40", UUID: fmt.Sprintf("GPU-%d", i), PCIBusID: fmt.Sprintf("0000:%02x:00.0", 16+i),
		})
		for j := i + 1; j < 10; j++ {
			l := gpu.Link{A: i, B: j, PCIe: gpu.PathHostBridge}
			if i+5 == j || i%2 == 0 && i+1 == j {
				l.NVLinks = 4
			}
			s.Links = append(s.Links, l)
		}
	}
	return s
}

func TestPicturesShowTheSnapshot(t *testing.T) {
	nodes := map[string]Node{
		"128 GPUs behind PCIe switches": {Snapshot: fabric128()},
		"128 GPUs, some of them lost":   {Snapshot: withLost(withLost(fabric128(), 5, "lost"), 77, "lost")},
		"no GPU":                        {Snapshot: &gpu.Snapshot{}},
		"no link is known":              {Snapshot: isolated(20)},
	}
	for _, name := range machines(t) {
		nodes[name] = Node{Snapshot: machine(t, name)}
		nodes[name+", GPU 0 lost"] = Node{Snapshot: withLost(machine(t, name), 0, "GPU is lost")}
	}
	for name, n := range nodes {
		t.Run(name, func(t *testing.T) { checkPicture(t, n) })
	}
}

// A node that is narrower than the picture is in the middle of it, with its bar of NVSwitches.
func TestFabricBarSpansItsCards(t *testing.T) {
	s := isolated(2)
	s.Links = []gpu.Link{{A: 0, B: 1, NVLinks: 18, Switched: true}}
	cards, bar := [4]int{1 << 30}, [4]int{}
	for _, e := range parse(t, drawNode(t, Node{Snapshot: s})) {
		switch e.class {
		case "card":
			cards[0], cards[2] = min(cards[0], e.box[0]), max(cards[2], e.box[2])
		case "fabric":
			bar = e.box
		}
	}
	if bar[0] != cards[0] || bar[2] != cards[2] {
		t.Errorf("the bar is from %d to %d, the cards from %d to %d", bar[0], bar[2], cards[0], cards[2])
	}
}

// isolated returns GPUs without links and NUMA nodes, as in a virtual machine.
func isolated(n int) *gpu.Snapshot {
	s := &gpu.Snapshot{}
	for i := range n {
		s.Devices = append(s.Devices, gpu.Device{Index: i, NUMANode: gpu.NoNUMANode})
	}
	return s
}

func drawNode(t testing.TB, n Node) []byte {
	t.Helper()
	var b bytes.Buffer
	testenv.Must(t, WriteSVG(&b, n))
	return b.Bytes()
}

// checkPicture draws a node and checks the picture against the snapshot.
func checkPicture(t testing.TB, n Node) {
	t.Helper()
	elements := parse(t, drawNode(t, n))
	checkBounds(t, elements)
	checkOverlaps(t, elements)
	checkGPUs(t, n.Snapshot, elements)
	checkPaths(t, n.Snapshot, elements)
	checkNVLinks(t, n.Snapshot, elements)
}

// FuzzDraw draws random nodes: whatever the driver and the kubelet report, the picture is valid and complete.
func FuzzDraw(f *testing.F) {
	f.Add(uint64(1), uint8(8), "NVIDIA <H100> & \"co\" 'x'", "lost\x00\x1b[31m\u202egnp.exe")
	f.Add(uint64(2), uint8(1), "", "")
	f.Add(uint64(3), uint8(17), strings.Repeat("W", 5000), "]]></style><script>alert(1)</script>")
	f.Add(uint64(4), uint8(40), "\xff\xfe\ufffe", "a\u0301\u0301\u0301\nb")
	f.Fuzz(func(t *testing.T, seed uint64, n uint8, name, reason string) {
		// Larger nodes are in TestGolden.
		checkPicture(t, randomNode(rand.New(rand.NewPCG(seed, 0)), int(n)%12, name, reason))
	})
}

func randomNode(r *rand.Rand, n int, name, reason string) Node {
	s := &gpu.Snapshot{DriverVersion: name, CUDAVersion: reason}
	node := Node{Snapshot: s}
	for i := range n {
		d := gpu.Device{
			Index: i, UUID: fmt.Sprintf("GPU-%d", i), Name: name, PCIBusID: "0000:00:00.0"[:r.IntN(13)],
			NUMANode: r.IntN(5) - 1, MemoryBytes: r.Uint64() >> 20, MIGEnabled: r.IntN(4) == 0,
		}
		if r.IntN(5) == 0 {
			d.Name, d.PCIBusID, d.Error = reason+name, reason, reason+"!"
		}
		for j := range r.IntN(8) {
			d.MIG = append(d.MIG, gpu.MIGDevice{
				Index: j, UUID: fmt.Sprintf("MIG-%d-%d", i, j), Profile: name, MemoryBytes: r.Uint64() >> 22,
			})
		}
		s.Devices = append(s.Devices, d)
	}
	density := r.IntN(20)
	for a := range n {
		for b := a + 1; b < n; b++ {
			l := gpu.Link{A: a, B: b, PCIe: gpu.PCIePath(r.IntN(7))}
			if r.IntN(20) < density {
				continue
			}
			if r.IntN(4) == 0 {
				l.NVLinks, l.Switched = r.IntN(19), r.IntN(2) == 0
			}
			s.Links = append(s.Links, l)
		}
	}
	for range r.IntN(20) {
		h := podresources.Holder{Namespace: name, Pod: reason + strconv.Itoa(r.IntN(40)), Container: name}
		for range r.IntN(5) {
			replica := fmt.Sprintf("MIG-%d-%d::%d", r.IntN(n+1), r.IntN(4), r.IntN(3))
			h.Devices = append(h.Devices, fmt.Sprintf("GPU-%d", r.IntN(n+1)), replica)
		}
		node.Holders = append(node.Holders, h)
	}
	return node
}
