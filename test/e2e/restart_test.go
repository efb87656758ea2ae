package e2e

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
)

// TestRestart starts containers repeatedly on one root file system. The first start changes the loader cache and makes
// links and mount points; the later ones change nothing.
func TestRestart(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "workstation", simtest.LibDir("usr/lib64"))
	want := requests(t, n)["all"]
	for _, e := range shared.Runtimes() {
		for _, kind := range []image.Kind{image.Glibc, image.NoCache, image.Many} {
			t.Run(fmt.Sprintf("%s/%s", kind, e), func(t *testing.T) {
				t.Parallel()
				root := shared.Images.Copy(t, kind)
				container := engine.Container{Args: smi(t, n), CDIDir: n.CDIDir, Devices: names(want.names...)}
				bundle := e.Bundle(t, root, container)
				before := image.Digest(t, root)
				checkList(t, e.Start(t, bundle), want.want)
				first := image.Digest(t, root)
				if cmp.Equal(before, first) {
					t.Error("the first start changed nothing in the root, so this test shows nothing")
				}
				for range 2 {
					checkList(t, e.Start(t, bundle), want.want)
				}
				if diff := cmp.Diff(first, image.Digest(t, root)); diff != "" {
					t.Errorf("the root after three starts (-after one +after three):\n%s", diff)
				}
			})
		}
	}
}
