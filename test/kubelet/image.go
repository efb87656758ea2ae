package kubelet

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

// Image is an image to be: a root file system under a name.
type Image struct {
	Name string
	// Root is a directory, and Command what a container runs that is given no command.
	Root    string
	Command []string
}

// pauseImage is the image of the container that holds a pod's namespaces. It need only sleep.
const pauseImage = "localhost/pause:test"

// load imports an image into the node's containerd.
func (n *Node) load(ctx context.Context, image Image) error {
	archive := filepath.Join(n.dir, "image.tar")
	defer os.Remove(archive)
	if err := image.write(archive); err != nil {
		return fmt.Errorf("make the image %s: %w", image.Name, err)
	}
	return n.ctr(ctx, "images", "import", "--local", archive)
}

// write writes the image in the form of `docker save`.
func (i Image) write(path string) error {
	layer := path + ".layer"
	defer os.Remove(layer)
	digest, err := writeLayer(layer, i.Root)
	if err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config":       map[string]any{"Cmd": i.Command, "Env": []string{"PATH=" + searchPath}},
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{digest}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": []string{i.Name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	return writeArchive(path, layer, map[string][]byte{"config.json": config, "manifest.json": manifest})
}

// writeLayer writes a tar file of a directory and returns its digest.
func writeLayer(path, root string) (string, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", err
	}
	defer f.Close()
	sum := sha256.New()
	w := tar.NewWriter(io.MultiWriter(f, sum))
	if err := w.AddFS(os.DirFS(root)); err != nil {
		return "", err
	}
	if err := w.Close(); err != nil {
		return "", err
	}
	return fmt.Sprintf("sha256:%x", sum.Sum(nil)), f.Sync()
}

func writeArchive(path, layer string, files map[string][]byte) error {
	data, err := os.ReadFile(layer)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	files["layer.tar"] = data
	w := tar.NewWriter(f)
	for name, content := range files {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}); err != nil {
			return err
		}
		if _, err := w.Write(content); err != nil {
			return err
		}
	}
	return w.Close()
}
