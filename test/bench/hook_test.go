package bench

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
)

// BenchmarkHook measures what a GPU adds to `runc run` of a program that does nothing, beyond its mounts
// and device nodes. The floor is what a hook adds that does nothing, a static program that exits; the peer is what
// nvidia-ctk's spec adds with nvidia-cdi-hook.
//
// "again" starts each container in its root file system again and again, "first" in a fresh one every time, where the
// hook has everything to write. Every contender has a root of its own, since hooks change it.
func BenchmarkHook(b *testing.B) {
	for _, kind := range []image.Kind{image.Glibc, image.Many} {
		b.Run(string(kind)+", again", func(b *testing.B) { benchmarkHook(b, kind, false) })
		b.Run(string(kind)+", first", func(b *testing.B) { benchmarkHook(b, kind, true) })
	}
}

func benchmarkHook(b *testing.B, kind image.Kind, fresh bool) {
	n := shared.Node(b, "dgx-h100")
	theirs := peerSpec(b, n)
	exits := filepath.Join(b.TempDir(), "exits")
	image.Compile(b, exits, "int main(void) { return 0; }", "-static")
	var all []*contender
	add := func(name, cdiDir string, edit func(*specs.Spec)) *contender {
		root := shared.Images.Copy(b, kind)
		c := &contender{name: name, run: runBundle(b, root, cdiDir, edit)}
		if fresh {
			c.prepare = func() error { return shared.Images.Restore(b, kind, root) }
		}
		all = append(all, c)
		return c
	}
	noGPU := add("no GPU", "", nil)
	bare := add("nodes and mounts", n.CDIDir, func(s *specs.Spec) { s.Hooks = nil })
	empty := add("a hook that does nothing", n.CDIDir, func(s *specs.Spec) {
		for i := range s.Hooks.CreateContainer {
			s.Hooks.CreateContainer[i].Path = exits
		}
	})
	ours := add("gpu-cdi-plugin", n.CDIDir, nil)
	peerBare := add("nodes and mounts of nvidia-ctk", theirs, func(s *specs.Spec) { s.Hooks = nil })
	peerHooks := add("nvidia-ctk", theirs, nil)
	count := rounds
	if fresh {
		count = freshRounds
	}
	for b.Loop() {
		compare(b, count, []string{"end"}, all)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(median(noGPU.times[0])), "no-gpu-ms")
	hook, nothing, their := beyond(ours, bare), beyond(empty, bare), beyond(peerHooks, peerBare)
	b.ReportMetric(ms(hook), "hook-ms")
	b.ReportMetric(ms(nothing), floor+"hook-ms")
	b.ReportMetric(ms(their), peer+"hooks-ms")
	b.ReportMetric(float64(hook)/float64(nothing), "x-floor")
	b.ReportMetric(float64(hook)/float64(their), "x-peer")
}

// beyond is what a contender takes longer than another: the median of the differences in each round, which is steadier
// than the difference of the medians.
func beyond(c, other *contender) time.Duration {
	var more []time.Duration
	for i := range c.times[0] {
		more = append(more, c.times[0][i]-other.times[0][i])
	}
	return median(more)
}

// runBundle makes a bundle with all devices of a CDI directory, if one is given, edits it, and returns a `runc run` of
// it.
func runBundle(b *testing.B, root, cdiDir string, edit func(*specs.Spec)) func() []time.Duration {
	b.Helper()
	c := engine.Container{Args: []string{"/bin/true"}, CDIDir: cdiDir}
	if cdiDir != "" {
		c.Devices = []string{"nvidia.com/gpu=all"}
	}
	bundle := shared.Runtimes()[0].Bundle(b, root, c)
	if edit != nil {
		if err := bundle.Edit(func(s *specs.Spec) error { edit(s); return nil }); err != nil {
			b.Fatal(err)
		}
	}
	return func() []time.Duration { return commandRun(b, proc.Cmd{Args: bundle.Command()})() }
}

// peerSpec runs nvidia-ctk with the node as its root, and makes the host paths in its spec those of this machine.
func peerSpec(b *testing.B, n *suite.Node) (dir string) {
	b.Helper()
	inside := suite.Install(b, n.Root(), shared.Peer(b, "nvidia-ctk"))
	var spec cdispecs.Spec
	printed := inside("nvidia-ctk", "cdi", "generate", "--format=json").Stdout
	if err := json.Unmarshal([]byte(printed), &spec); err != nil {
		b.Fatalf("read nvidia-ctk's spec: %v", err)
	}
	hook := shared.Peer(b, "nvidia-cdi-hook")
	relocate(&spec.ContainerEdits, n.Root(), hook)
	for i := range spec.Devices {
		relocate(&spec.Devices[i].ContainerEdits, n.Root(), hook)
	}
	data, err := json.Marshal(&spec)
	if err != nil {
		b.Fatal(err)
	}
	dir = b.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "nvidia.json"), data, 0o644); err != nil {
		b.Fatal(err)
	}
	return dir
}

func relocate(edits *cdispecs.ContainerEdits, root, hook string) {
	for _, d := range edits.DeviceNodes {
		d.HostPath = filepath.Join(root, d.Path)
	}
	for _, m := range edits.Mounts {
		m.HostPath = filepath.Join(root, m.HostPath)
	}
	for _, h := range edits.Hooks {
		h.Path = hook
	}
}
