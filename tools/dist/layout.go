package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/match"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"go.yaml.in/yaml/v3"
)

// The media types of charts: https://helm.sh/docs/topics/registries/#helm-chart-manifest
const (
	chartConfig types.MediaType = "application/vnd.cncf.helm.config.v1+json"
	chartLayer  types.MediaType = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
)

// refName is the annotation of a manifest in a layout that has its tag.
const refName = "org.opencontainers.image.ref.name"

// addToLayouts adds an image, as writeImage writes it, to the OCI layout DIR/image, and a chart to DIR/chart. Both are
// made if they do not exist. A layout keeps its other versions.
func addToLayouts(dir, version, image, chart string) error {
	if err := addImage(filepath.Join(dir, "image"), version, image); err != nil {
		return fmt.Errorf("add %s: %w", image, err)
	}
	if err := addChart(filepath.Join(dir, "chart"), version, chart); err != nil {
		return fmt.Errorf("add %s: %w", chart, err)
	}
	return nil
}

// openLayout opens a layout, or makes one. It replaces index.json, which may be a hard link of a published one.
func openLayout(dir string) (layout.Path, error) {
	index := filepath.Join(dir, "index.json")
	data, err := os.ReadFile(index)
	if errors.Is(err, os.ErrNotExist) {
		return layout.Write(dir, empty.Index)
	}
	if err != nil {
		return "", err
	}
	if err := errors.Join(os.Remove(index), os.WriteFile(index, data, 0o644)); err != nil {
		return "", err
	}
	return layout.FromPath(dir)
}

func addImage(dir, version, archive string) error {
	unpacked, err := os.MkdirTemp("", "image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(unpacked)
	if err := unpack(archive, unpacked); err != nil {
		return err
	}
	outer, err := layout.ImageIndexFromPath(unpacked)
	if err != nil {
		return err
	}
	manifest, err := outer.IndexManifest()
	if err != nil {
		return err
	}
	if len(manifest.Manifests) != 1 {
		return fmt.Errorf("it has %d images, want 1", len(manifest.Manifests))
	}
	images, err := outer.ImageIndex(manifest.Manifests[0].Digest)
	if err != nil {
		return err
	}
	to, err := openLayout(dir)
	if err != nil {
		return err
	}
	tag := imageTag(version)
	return to.ReplaceIndex(images, match.Name(tag), layout.WithAnnotations(map[string]string{refName: tag}))
}

// unpack writes the files of a tar archive below a directory.
func unpack(archive, dir string) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	for r := tar.NewReader(f); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		data, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		if err := root.MkdirAll(filepath.Dir(header.Name), 0o755); err != nil {
			return err
		}
		if err := root.WriteFile(header.Name, data, 0o644); err != nil {
			return err
		}
	}
}

// addChart adds a chart as helm push does.
func addChart(dir, version, archive string) error {
	data, err := os.ReadFile(archive)
	if err != nil {
		return err
	}
	metadata, date, err := chartMetadata(data)
	if err != nil {
		return err
	}
	config, err := json.Marshal(metadata)
	if err != nil {
		return err
	}
	to, err := openLayout(dir)
	if err != nil {
		return err
	}
	manifest := v1.Manifest{
		SchemaVersion: 2, MediaType: types.OCIManifestSchema1,
		Annotations: map[string]string{
			"org.opencontainers.image.title":       name,
			"org.opencontainers.image.version":     version,
			"org.opencontainers.image.created":     date.Format("2006-01-02T15:04:05Z"),
			"org.opencontainers.image.description": fmt.Sprint(metadata["description"]),
		},
	}
	if manifest.Config, err = addBlob(to, chartConfig, config); err != nil {
		return err
	}
	layer, err := addBlob(to, chartLayer, data)
	if err != nil {
		return err
	}
	manifest.Layers = []v1.Descriptor{layer}
	text, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	descriptor, err := addBlob(to, manifest.MediaType, text)
	if err != nil {
		return err
	}
	tag := strings.ReplaceAll(version, "+", "_") // a tag has no plus sign; helm writes this one
	descriptor.Annotations = map[string]string{refName: tag}
	return errors.Join(to.RemoveDescriptors(match.Name(tag)), to.AppendDescriptor(descriptor))
}

func addBlob(to layout.Path, mediaType types.MediaType, data []byte) (v1.Descriptor, error) {
	digest, size, err := v1.SHA256(bytes.NewReader(data))
	if err != nil {
		return v1.Descriptor{}, err
	}
	err = to.WriteBlob(digest, io.NopCloser(bytes.NewReader(data)))
	return v1.Descriptor{MediaType: mediaType, Size: size, Digest: digest}, err
}

// chartMetadata returns what Chart.yaml of a chart has, and the time of that file, which is that of the release.
func chartMetadata(archive []byte) (metadata map[string]any, date time.Time, err error) {
	unzipped, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		return nil, date, err
	}
	for r := tar.NewReader(unzipped); ; {
		header, err := r.Next()
		if err != nil {
			return nil, date, fmt.Errorf("find %s/Chart.yaml: %w", name, err)
		}
		if header.Name != name+"/Chart.yaml" {
			continue
		}
		text, err := io.ReadAll(r)
		if err != nil {
			return nil, date, err
		}
		err = yaml.Unmarshal(text, &metadata)
		return metadata, header.ModTime.UTC(), err
	}
}
