package kubelet

import (
	"context"
	"log"
	"os"
	"testing"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/kubenode"
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
	// What may be missing is searched for before anything is built.
	programs, err := kubenode.Find(shared.NodePeers(t))
	if err != nil {
		testenv.Skip(t, err.Error())
	}
	for _, name := range []string{"kubelet", "containerd"} {
		shared.NodePeer(t, name)
	}
	root := shared.Images.Copy(t, image.Glibc)
	testenv.Must(t, image.AddProgram(root, testenv.Command(t, "busybox"), "/usr/bin/busybox"))
	n, err := New(context.WithoutCancel(t.Context()), programs,
		Image{
			Name: kubenode.PauseImage, Root: shared.Images.Copy(t, image.Static),
			Config: image.Config{Cmd: []string{"sleep", "2147483647"}},
		},
		Image{Name: gpuImage, Root: root, Config: image.Config{Cmd: []string{"true"}}})
	testenv.Must(t, err)
	return n
}
