package kubelet

import (
	"context"
	"os"
	"path/filepath"

	"gpu-cdi-plugin/test/lib/image"
)

// Image is a container image: a root file system under a name.
type Image struct {
	Name string
	// Root is the directory of the root file system. Command is what a container without a command runs.
	Root    string
	Command []string
}

// pauseImage is the image of the container that holds a pod's namespaces. It only sleeps.
const pauseImage = "localhost/pause:test"

// load imports an image into the node's containerd.
func (n *Node) load(ctx context.Context, i Image) error {
	archive := filepath.Join(n.dir, "image.tar")
	defer os.Remove(archive)
	if err := image.WriteArchive(archive, i.Name, i.Root, []string{"PATH=" + searchPath}, i.Command); err != nil {
		return err
	}
	return n.ctr(ctx, "images", "import", "--local", archive)
}
