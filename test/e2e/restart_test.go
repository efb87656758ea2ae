package e2e

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/rootfs"
)

// TestRestart starts containers again and again on one root file system: the first start changes the loader's cache
// and makes links and mount points, and the later ones leave every byte as it is.
func TestRestart(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "workstation", simtest.LibDir("usr/lib64"))
	want := requests(t, n)["all"]
	for _, e := range shared.Runtimes() {
		for _, image := range []rootfs.Kind{rootfs.Glibc, rootfs.NoCache, rootfs.Many} {
			t.Run(fmt.Sprintf("%s/%s", image, e), func(t *testing.T) {
				t.Parallel()
				root := shared.Images.Copy(t, image)
				container := engine.Container{Args: smi(t, n), CDIDir: n.CDIDir, Devices: names(want.names...)}
				bundle := e.Bundle(t, root, container)
				before := digest(t, root)
				checkList(t, e.Start(t, bundle), want.want)
				first := digest(t, root)
				if cmp.Equal(before, first) {
					t.Error("the first start changed nothing in the root, so this test shows nothing")
				}
				for range 2 {
					checkList(t, e.Start(t, bundle), want.want)
				}
				if diff := cmp.Diff(first, digest(t, root)); diff != "" {
					t.Errorf("the root after three starts (-after one +after three):\n%s", diff)
				}
			})
		}
	}
}

func digest(t *testing.T, root string) map[string]string {
	t.Helper()
	tree, err := rootfs.Digest(root)
	if err != nil {
		t.Fatal(err)
	}
	return tree
}
