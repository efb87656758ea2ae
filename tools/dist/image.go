package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// name is the name of the image, without a registry: who loads the archive can push it anywhere.
const name = "gpu-cdi-plugin"

// labels describe the image, by the keys of the OCI image specification.
func labels(version string) map[string]string {
	return map[string]string{
		"org.opencontainers.image.title":       name,
		"org.opencontainers.image.description": "Gives containers their NVIDIA GPUs: device plugin, CDI specs, OCI hook",
		"org.opencontainers.image.version":     version,
		"org.opencontainers.image.licenses":    "Apache-2.0",
	}
}

// writeImage writes an OCI archive. Each of dirs is ARCH=DIR.
//
// The archive has an index with one entry: the index of the architectures. podman and ctr each take the archive only in
// this form; of several images in the outer index, podman refuses them and ctr keeps the last one.
func writeImage(path, version string, dirs []string) error {
	date, err := buildDate()
	if err != nil {
		return err
	}
	images := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, d := range dirs {
		arch, dir, ok := strings.Cut(d, "=")
		if !ok {
			return fmt.Errorf("%q: want ARCH=DIR", d)
		}
		image, err := imageOf(arch, dir, version, date)
		if err != nil {
			return fmt.Errorf("make the image for %s: %w", arch, err)
		}
		images = mutate.AppendManifests(images, mutate.IndexAddendum{
			Add: image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}},
		})
	}
	tag := imageTag(version)
	outer := mutate.AppendManifests(mutate.IndexMediaType(empty.Index, types.OCIImageIndex), mutate.IndexAddendum{
		Add: images, Descriptor: v1.Descriptor{Annotations: map[string]string{
			refName:                    tag,
			"io.containerd.image.name": "localhost/" + name + ":" + tag,
		}},
	})
	dir, err := os.MkdirTemp("", "image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if _, err := layout.Write(dir, outer); err != nil {
		return fmt.Errorf("write the image: %w", err)
	}
	data, err := archive(dir, date)
	if err != nil {
		return fmt.Errorf("write the image: %w", err)
	}
	return os.WriteFile(path, data, 0o644)
}

// imageTag returns the tag of a version, which has no plus sign.
func imageTag(version string) string { return strings.ReplaceAll(version, "+", "-") }

// imageOf returns an image with the files of a directory.
func imageOf(arch, dir, version string, date time.Time) (v1.Image, error) {
	data, err := archive(dir, date)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(
		func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil },
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressionLevel(9))
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if image, err = mutate.AppendLayers(image, layer); err != nil {
		return nil, err
	}
	return mutate.ConfigFile(image, &v1.ConfigFile{
		OS: "linux", Architecture: arch, Created: v1.Time{Time: date},
		RootFS:  v1.RootFS{Type: "layers", DiffIDs: diffIDs(image)},
		History: []v1.History{{Created: v1.Time{Time: date}, CreatedBy: "make dist"}},
		Config: v1.Config{
			Entrypoint: []string{"/launcher"}, Cmd: []string{"run", "serve"}, User: "0:0", Labels: labels(version),
		},
	})
}

func diffIDs(image v1.Image) []v1.Hash {
	config, err := image.ConfigFile()
	if err != nil {
		return nil
	}
	return config.RootFS.DiffIDs
}

// archive returns a tar archive of the files in a directory, in the order of their names, as files of root.
func archive(dir string, date time.Time) ([]byte, error) {
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		header := &tar.Header{Name: rel, ModTime: date, Format: tar.FormatPAX, Mode: 0o644}
		switch {
		case info.IsDir():
			header.Typeflag, header.Mode, header.Name = tar.TypeDir, 0o755, rel+"/"
			return w.WriteHeader(header)
		case !info.Mode().IsRegular():
			return fmt.Errorf("%s is not a regular file", path)
		case info.Mode()&0o100 != 0:
			header.Mode = 0o755
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		header.Typeflag, header.Size = tar.TypeReg, int64(len(content))
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
	err = errors.Join(err, w.Close()) // it writes the end of the archive
	return data.Bytes(), err
}

// buildDate is the time of all files of the release.
func buildDate() (time.Time, error) {
	seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH is the date of the release in seconds: %w", err)
	}
	return time.Unix(seconds, 0).UTC(), nil
}
