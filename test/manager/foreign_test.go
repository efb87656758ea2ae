package manager

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestSlowForeignPluginIsDriven has NVIDIA's device plugin, unmodified, register with the manager. Pods get its GPUs,
// over a restart of the manager too, and their containers its CDI names.
func TestSlowForeignPluginIsDriven(t *testing.T) {
	const resource, gpus = "nvidia.com/gpu", 8
	plugin := shared.NodePeer(t, "nvidia-device-plugin")
	node := simtest.Node(t, "dgx-h100")
	suite.Install(t, node.Root(), plugin)
	p := newProgram(t)
	// The plugin has the usual directory in the node, whose path is too long for a socket.
	dir := filepath.Join(node.Root(), "var/lib/kubelet/device-plugins")
	testenv.Must(t, os.MkdirAll(dir, 0o755))
	testenv.Must(t, os.Symlink(dir, p.plugins))
	p.start()
	foreign, err := proc.Start(proc.Cmd{
		Args: []string{
			"/usr/bin/" + filepath.Base(plugin), "--device-list-strategy", "cdi-cri", "--driver-root-ctr-path", "/",
			"--gdrcopy-enabled=false", "--gds-enabled=false", "--mofed-enabled=false",
		},
		Dir: "/", Env: []string{"PATH=/usr/sbin:/usr/bin"}, Chroot: node.Root(),
	}, p.log)
	testenv.Must(t, err)
	t.Cleanup(func() { _ = foreign.Kill() })
	counted := func() bool { return p.allocatable(resource) == gpus }
	p.await("the GPUs are counted", counted)

	pod, err := p.admit(t.Context(), "pair", resource, 2)
	testenv.Must(t, err)
	started, err := p.api.Start(t.Context(), "pair", "main")
	testenv.Must(t, err)
	var named []string
	for _, name := range started.CDIDevices {
		_, id, _ := strings.Cut(name, "=")
		named = append(named, id)
	}
	slices.Sort(named)
	if ids := idsOf(pod); len(ids) != 2 || !slices.Equal(ids, named) {
		t.Errorf("the pod has %v, its container %v", ids, started.CDIDevices)
	}
	testenv.Must(t, p.process.Kill())
	p.start()
	p.await("the plugin has registered again", counted)
	rest, err := p.admit(t.Context(), "rest", resource, gpus-2)
	testenv.Must(t, err)
	for _, id := range idsOf(rest) {
		if slices.Contains(named, id) {
			t.Errorf("%s was given twice", id)
		}
	}
}
