package kubelet

import (
	"context"
	"log"
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// gpuImage is the image of the pods of these tests: a small one with the C library that the driver's programs need, and
// busybox for the rest.
const gpuImage = "localhost/glibc:test"

// shared is the suite of all tests, and node the node of all but those that start their own.
var (
	shared *suite.Suite
	node   *Node
)

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	code := suite.Run(m, &shared)
	if node == nil {
		return code
	}
	if err := node.Close(); err != nil {
		log.Print(err)
		return 1
	}
	return code
}

// start starts a node that has images to run and networks, and outlives the test.
func start(t testing.TB) *Node {
	t.Helper()
	testenv.Root(t)
	for _, name := range []string{"ip", "iptables"} {
		testenv.Command(t, name)
	}
	// What may be missing is searched for before anything is built.
	programs := Programs{Runc: testenv.Command(t, "runc"), CNI: []string{networkPlugins(t)}}
	programs.Kubelet = shared.NodePeer(t, "kubelet")
	programs.Containerd = shared.NodePeer(t, "containerd")
	programs.Ctr = shared.NodePeer(t, "ctr")
	root := shared.Images.Copy(t, image.Glibc)
	testenv.Must(t, image.AddProgram(root, testenv.Command(t, "busybox"), "/usr/bin/busybox"))
	n, err := New(context.WithoutCancel(t.Context()), programs,
		Image{pauseImage, shared.Images.Copy(t, image.Static), []string{"sleep", "2147483647"}},
		Image{gpuImage, root, []string{"true"}})
	testenv.Must(t, err)
	return n
}

// networkPlugins is the directory where the machine has its CNI plugins.
func networkPlugins(t testing.TB) string {
	t.Helper()
	for _, dir := range []string{"/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"} {
		if _, err := os.Stat(filepath.Join(dir, "bandwidth")); err == nil {
			return dir
		}
	}
	testenv.Skip(t, "needs CNI plugins (Debian's package containernetworking-plugins); install them with scripts/setup")
	return ""
}
