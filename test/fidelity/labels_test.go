package fidelity

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"gpu-cdi-plugin/agent/labels"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// labelDifference is an intended difference between our labels and those of NVIDIA's gpu-feature-discovery. The guide
// docs/kubernetes.md has them too.
type labelDifference struct {
	only    string // "theirs" or "ours"
	node    string // the only node that has the difference, or empty
	pattern string // a regular expression for the whole label
	reason  string
}

const (
	unofferedGPU = "a GPU in MIG mode without MIG devices, single"
	filledByOEM  = "a machine whose name is no value of a label"
)

var labelDifferences = []labelDifference{
	{
		"theirs", "", `vgpu\.present=false`, "whether GPUs are virtual: this was not tried on a virtual machine with one",
	},
	{
		"theirs", filledByOEM, `gpu\.machine=To-Be-Filled-By-O\.E\.M\.`, "Kubernetes refuses a value that ends with a dot",
	},
	{"ours", filledByOEM, `gpu\.machine=To-Be-Filled-By-O\.E\.M`, "see above"},
	{
		"theirs", unofferedGPU, `gpu\.(product=.*-MIG-INVALID|(count|memory|replicas)=0|sharing-strategy=)`,
		"NVIDIA's device plugin ends with an error on such a node; ours offers the other GPUs",
	},
	{
		"ours", unofferedGPU, `gpu\.(product=NVIDIA-H100-80GB-HBM3|count=8|memory=81559|replicas=1|sharing-strategy=none)`,
		"see above",
	},
}

// labelledNode is a node for both programs, with their configurations.
type labelledNode struct {
	machine      string
	change       func(*testing.T, *sim.Node)
	product      string // the machine's product name
	strategy     string // for MIG; default none
	theirs, ours string // how devices are shared
}

// Both programs run with a simulated node as their root directory, on the same driver.
func TestLabelsDifferOnlyAsListed(t *testing.T) {
	testenv.Root(t) // for chroot
	const theirGPUs = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}"
	const ourGPUs = "sharing: {time-slicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}"
	alike := func(t *testing.T, n *sim.Node) {
		for i := range n.Machine().GPUs {
			testenv.Must(t, n.SetMIG(i, []string{"3g.40gb", "3g.40gb"}))
		}
	}
	nodes := map[string]labelledNode{
		"mixed":            {machine: "mig-h100", strategy: "mixed"},
		"several profiles": {machine: "mig-h100", strategy: "single"},
		"one profile":      {machine: "dgx-h100", strategy: "single", change: alike, product: "DGXH100\n"},
		"a shared profile": {
			machine: "dgx-h100", strategy: "single", change: alike, theirs: theirGPUs, ours: ourGPUs,
		},
		"MIG mode off, single": {machine: "dgx-a100", strategy: "single"},
		"MIG mode off, mixed":  {machine: "dgx-a100", strategy: "mixed"},
		unofferedGPU: {machine: "dgx-h100", strategy: "single", change: func(t *testing.T, n *sim.Node) {
			testenv.Must(t, n.SetMIG(3, nil))
		}},
		"all GPUs in MIG mode, without devices": {
			machine: "dgx-a100", strategy: "single", change: func(t *testing.T, n *sim.Node) {
				for i := range n.Machine().GPUs {
					testenv.Must(t, n.SetMIG(i, nil))
				}
			},
		},
		"shared MIG devices": {
			machine: "mig-h100", strategy: "mixed",
			theirs: "sharing: {timeSlicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]}}",
			ours:   "sharing: {time-slicing: {resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]}}",
		},
		"shared GPUs": {machine: "dgx-a100", theirs: theirGPUs, ours: ourGPUs},
		"shared GPUs under another name": {
			machine: "dgx-a100",
			theirs:  strings.Replace(theirGPUs, "{resources", "{renameByDefault: true, resources", 1),
			ours:    strings.Replace(ourGPUs, "{resources", "{rename-by-default: true, resources", 1),
		},
		"GPUs that MPS shares": {
			machine: "dgx-h100",
			theirs:  "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}",
			ours:    "mps: true\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}",
		},
		filledByOEM: {machine: "workstation", product: "To Be Filled By O.E.M.\n"},
	}
	for _, machine := range sim.Machines() {
		nodes[machine] = labelledNode{machine: machine, product: "Product " + machine + " (R)\n"}
	}
	used := &labelUsage{seen: map[int]bool{}}
	t.Run("nodes", func(t *testing.T) {
		for name, n := range nodes {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				root := n.make(t)
				inside := suite.Install(t, root, shared.NodePeer(t, "gpu-feature-discovery"),
					shared.Program(t, "gpu-cdi-plugin"), shared.Program(t, "prestart-hook"))
				their, our := n.theirLabels(t, root, inside), n.ourLabels(t, root)
				if len(their) < 20 {
					t.Fatalf("gpu-feature-discovery has only the labels %v", their)
				}
				used.check(t, name, "theirs", their, our)
				used.check(t, name, "ours", our, their)
			})
		}
	})
	for i, d := range labelDifferences {
		if !t.Failed() && !used.seen[i] {
			t.Errorf("no node has the listed difference %q", d.pattern)
		}
	}
}

// featuresDir is the directory that node feature discovery makes.
const featuresDir = "etc/kubernetes/node-feature-discovery/features.d"

// make makes the node, and returns its root directory.
func (n *labelledNode) make(t *testing.T) string {
	t.Helper()
	node := simtest.Node(t, n.machine)
	if n.change != nil {
		n.change(t, node)
	}
	root := node.Root()
	dmi := filepath.Join(root, "sys/class/dmi/id")
	testenv.Must(t, os.MkdirAll(filepath.Join(root, "etc"), 0o755), os.MkdirAll(dmi, 0o755),
		os.MkdirAll(filepath.Join(root, "var/lib/kubelet/device-plugins"), 0o755),
		os.MkdirAll(filepath.Join(root, featuresDir), 0o755))
	if n.product != "" {
		testenv.Must(t, os.WriteFile(filepath.Join(dmi, "product_name"), []byte(n.product), 0o644))
	}
	return root
}

func (n *labelledNode) migStrategy() string {
	if n.strategy == "" {
		return "none"
	}
	return n.strategy
}

func (n *labelledNode) theirLabels(
	t *testing.T, root string, inside func(string, ...string) proc.Result,
) map[string]bool {
	t.Helper()
	config := "version: v1\n" + n.theirs + "\n"
	testenv.Must(t, os.WriteFile(filepath.Join(root, "etc/gfd.yaml"), []byte(config), 0o644))
	inside("gpu-feature-discovery", "--oneshot", "--no-timestamp", "--use-node-feature-api=false",
		"--output-file=/etc/gfd", "--driver-root-ctr-path=/", "--mig-strategy="+n.migStrategy(),
		"--config-file=/etc/gfd.yaml")
	return readLabels(t, filepath.Join(root, "etc/gfd"))
}

func (n *labelledNode) ourLabels(t *testing.T, root string) map[string]bool {
	t.Helper()
	config := "node-labels: true\nmig-strategy: " + n.migStrategy() + "\n" + n.ours + "\n"
	testenv.Must(t, os.WriteFile(filepath.Join(root, "etc/ours.yaml"), []byte(config), 0o644))
	output, err := os.Create(filepath.Join(t.TempDir(), "log"))
	testenv.Must(t, err)
	defer output.Close()
	serve, err := proc.Start(proc.Cmd{
		Args: []string{"/usr/bin/gpu-cdi-plugin", "--hook-path=/usr/bin/prestart-hook", "--config=/etc/ours.yaml", "serve"},
		Dir:  "/", Chroot: root, Env: []string{"PATH=/usr/sbin:/usr/bin"},
	}, output)
	testenv.Must(t, err)
	file := filepath.Join(root, featuresDir, labels.FileName)
	testenv.Eventually(t, "labels of serve", func() bool {
		select {
		case <-serve.Done():
			log, _ := os.ReadFile(output.Name())
			t.Fatalf("serve ended:\n%s", log)
		default:
		}
		_, err := os.Stat(file)
		return err == nil
	})
	testenv.Must(t, serve.Signal(syscall.SIGTERM))
	<-serve.Done()
	return readLabels(t, file) // they stay
}

// readLabels returns the lines of a features file, without the prefix that all have.
func readLabels(t *testing.T, file string) map[string]bool {
	t.Helper()
	data, err := os.ReadFile(file)
	testenv.Must(t, err)
	found := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		label, prefixed := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "nvidia.com/")
		if !prefixed {
			t.Errorf("label %q", line)
		}
		found[label] = true
	}
	return found
}

// labelUsage records which differences were seen.
type labelUsage struct {
	mu   sync.Mutex
	seen map[int]bool
}

// check reports the labels of one side that the other lacks and no listed difference covers.
func (u *labelUsage) check(t *testing.T, node, side string, have, other map[string]bool) {
	t.Helper()
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, label := range slices.Sorted(maps.Keys(have)) {
		covered := other[label]
		for i, d := range labelDifferences {
			if !other[label] && d.only == side && (d.node == "" || d.node == node) &&
				regexp.MustCompile("^(?:"+d.pattern+")$").MatchString(label) {
				covered, u.seen[i] = true, true
			}
		}
		if !covered {
			t.Errorf("only %s: %s", side, label)
		}
	}
}
