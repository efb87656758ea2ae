package fidelity

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/manager/conformance"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestConformanceOfAForeignPlugin checks NVIDIA's device plugin, unmodified, with its usual directory.
func TestConformanceOfAForeignPlugin(t *testing.T) {
	plugin := shared.NodePeer(t, "nvidia-device-plugin")
	node := simtest.Node(t, "dgx-h100")
	suite.Install(t, node.Root(), plugin)
	dir := filepath.Join(node.Root(), "var/lib/kubelet/device-plugins")
	testenv.Must(t, os.MkdirAll(dir, 0o755))
	short, err := os.MkdirTemp("", "kubelet") //nolint:usetesting // t.TempDir may be too long for the path of a socket
	testenv.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(short) })
	link := filepath.Join(short, "dir")
	testenv.Must(t, os.Symlink(dir, link))
	report, err := conformance.Run(t.Context(), conformance.Options{
		Command: []string{
			"/usr/sbin/chroot", node.Root(), "/usr/bin/" + filepath.Base(plugin), "--device-list-strategy", "cdi-cri",
			"--driver-root-ctr-path", "/", "--gdrcopy-enabled=false", "--gds-enabled=false", "--mofed-enabled=false",
		},
		KubeletDir: link, Root: node.Root(), Timeout: 10 * time.Second, Output: t.Output(),
	})
	testenv.Must(t, err)
	got := map[string]string{}
	for _, r := range report.Results {
		t.Logf("%s (%s): %s: %s", r.ID, r.Severity, r.Outcome, r.Seen)
		if r.Outcome == conformance.Fail {
			got[r.ID] = string(r.Severity)
		}
	}
	// It answers with no devices where more are asked for than are available.
	want := map[string]string{"preferred-impossible": "should"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("rules that it breaks (-want +got):\n%s", diff)
	}
}
