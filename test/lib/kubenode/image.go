package kubenode

import (
	"context"
	"os"
	"path/filepath"

	"gpu-cdi-plugin/test/lib/image"
)

// Image is a container image: a root file system under a name.
type Image struct {
	Name string
	// Root is the directory of the root file system.
	Root string
	image.Config
}

// PauseImage is the image of the container that holds a pod's namespaces. It only sleeps.
const PauseImage = "localhost/pause:test"

// Load imports an image into the node's containerd.
func (n *Node) Load(ctx context.Context, i Image) error {
	archive := filepath.Join(n.dir, "image.tar")
	defer os.Remove(archive)
	i.Env = append([]string{"PATH=" + searchPath}, i.Env...)
	if err := image.WriteArchive(archive, i.Name, i.Root, i.Config); err != nil {
		return err
	}
	return n.Ctr(ctx, "images", "import", "--local", archive)
}
