package bench

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
)

// BenchmarkStart is P7 of the targets: what a GPU adds to `runc run` of a program that does nothing, beyond its mounts
// and device nodes. The peer is what nvidia-ctk's spec adds with nvidia-cdi-hook; the floor of any hook is one that does
// nothing.
//
// "again" starts each container in its root file system again and again, "first" in a fresh one every time, so that
// there all that a hook writes is written. Every variant has a root of its own, since hooks leave traces in it.
func BenchmarkStart(b *testing.B) {
	for _, kind := range []image.Kind{image.Glibc, image.Many} {
		for _, fresh := range []bool{false, true} {
			name := fmt.Sprintf("%s/%s", kind, map[bool]string{false: "again", true: "first"}[fresh])
			b.Run(name, func(b *testing.B) { benchmarkStart(b, name, starter{kind, fresh}) })
		}
	}
}

func benchmarkStart(b *testing.B, name string, s starter) {
	n := shared.Node(b, "dgx-h100")
	peer := peerSpec(b, n)
	none := s.variant(b, "no GPU", "", nil)
	floor := s.variant(b, "nodes and mounts", n.CDIDir, withoutHooks)
	nothing := s.variant(b, "a hook that does nothing", n.CDIDir, withTrue)
	our := s.variant(b, "gpu-cdi-plugin", n.CDIDir, nil)
	peerFloor := s.variant(b, "nodes and mounts of nvidia-ctk's", peer, withoutHooks)
	their := s.variant(b, "nvidia-ctk", peer, nil)
	all := []*variant{none, floor, nothing, our, peerFloor, their}
	for b.Loop() {
		measure(b, s.rounds(), all)
	}
	logTable(b, "runc run of true, "+name, all)
	hook, peerHooks := our.beyond(floor), their.beyond(peerFloor)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(none.median()), "no-gpu-ms")
	b.ReportMetric(ms(floor.median()), "floor-ms")
	b.ReportMetric(ms(nothing.beyond(floor)), "empty-hook-ms")
	b.ReportMetric(ms(hook), "hook-ms")
	b.ReportMetric(ms(peerHooks), "peer-hooks-ms")
	b.ReportMetric(float64(hook)/float64(peerHooks), "x-peer")
}

// starter makes the variants of one image.
type starter struct {
	image image.Kind
	fresh bool
}

func (s starter) rounds() int {
	if s.fresh {
		return freshRounds
	}
	return rounds
}

// variant is `runc run` of a bundle with all devices of a CDI directory, if there is one, edited at last.
func (s starter) variant(b *testing.B, name, cdiDir string, edit func(*specs.Spec) error) *variant {
	b.Helper()
	root := shared.Images.Copy(b, s.image)
	c := engine.Container{Args: []string{"/bin/true"}, CDIDir: cdiDir}
	if cdiDir != "" {
		c.Devices = []string{"nvidia.com/gpu=all"}
	}
	bundle := shared.Runtimes()[0].Bundle(b, root, c)
	if edit != nil {
		if err := bundle.Edit(edit); err != nil {
			b.Fatal(err)
		}
	}
	v := &variant{name: name, cmd: proc.Cmd{Args: bundle.Command()}}
	if s.fresh {
		v.prepare = func() error { return shared.Images.Restore(b, s.image, root) }
	}
	return v
}

func withoutHooks(s *specs.Spec) error {
	s.Hooks = nil
	return nil
}

// withTrue puts /bin/true in the place of our hook.
func withTrue(s *specs.Spec) error {
	for i := range s.Hooks.CreateContainer {
		s.Hooks.CreateContainer[i].Path = "/bin/true"
	}
	return nil
}

// peerSpec has nvidia-ctk generate a spec with the node as its root, and makes its host paths those of this machine.
func peerSpec(b *testing.B, n *suite.Node) (dir string) {
	b.Helper()
	inside := suite.Install(b, n.Root(), shared.Peer(b, "nvidia-ctk"))
	var spec cdispecs.Spec
	if err := json.Unmarshal([]byte(inside("nvidia-ctk", "cdi", "generate", "--format=json").Stdout), &spec); err != nil {
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
