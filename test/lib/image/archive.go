package image

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

// Config has the defaults of an image's containers.
type Config struct {
	Entrypoint, Cmd, Env []string
}

// WriteArchive writes a root file system as an image with that name to a new file, in the format of `docker save`.
func WriteArchive(path, name, root string, defaults Config) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("make the image %s: %w", name, err)
		}
	}()
	layer, err := os.CreateTemp(filepath.Dir(path), "layer-")
	if err != nil {
		return err
	}
	defer os.Remove(layer.Name())
	defer layer.Close()
	sum := sha256.New()
	w := tar.NewWriter(io.MultiWriter(layer, sum))
	if err := w.AddFS(os.DirFS(root)); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config":       defaults,
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sum.Sum(nil))}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{
		{"Config": "config.json", "RepoTags": []string{name}, "Layers": []string{"layer.tar"}},
	})
	if err != nil {
		return err
	}
	data, err := os.ReadFile(layer.Name())
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	w = tar.NewWriter(f)
	for file, content := range map[string][]byte{"config.json": config, "manifest.json": manifest, "layer.tar": data} {
		if err := w.WriteHeader(&tar.Header{Name: file, Mode: 0o644, Size: int64(len(content))}); err != nil {
			return err
		}
		if _, err := w.Write(content); err != nil {
			return err
		}
	}
	return w.Close()
}
