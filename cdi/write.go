package cdi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/exit"
)

// Format is the encoding of a spec.
type Format string

// The formats.
const (
	JSON Format = "json"
	YAML Format = "yaml"
)

// FormatOf is the format that a file's extension asks for: .json or .yaml. Engines ignore files with any other.
func FormatOf(path string) (Format, error) {
	switch ext := filepath.Ext(path); ext {
	case ".json":
		return JSON, nil
	case ".yaml":
		return YAML, nil
	default:
		return "", fmt.Errorf("spec file %s: extension %q, but engines read only .json and .yaml", path, ext)
	}
}

// FileName is the name of the spec file of a kind: "nvidia.com-gpu.json" for "nvidia.com/gpu".
func FileName(kind string) string { return strings.ReplaceAll(kind, "/", "-") + ".json" }

// Marshal encodes a spec. The same spec gives the same bytes.
func Marshal(spec *specs.Spec, f Format) ([]byte, error) {
	var buf bytes.Buffer
	var err error
	switch f {
	case JSON:
		enc := json.NewEncoder(&buf)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		err = enc.Encode(spec)
	case YAML:
		enc := yaml.NewEncoder(&buf)
		enc.SetIndent(2)
		err = cmp.Or(enc.Encode(spec), enc.Close())
	default:
		err = errors.New("unknown format")
	}
	if err != nil {
		return nil, fmt.Errorf("encode CDI spec as %q: %w", f, err)
	}
	return buf.Bytes(), nil
}

// WriteFile replaces the spec file at path, in the format of its extension, readable by all. The directory must exist,
// and the spec must be one that the CDI library accepts.
func WriteFile(path string, spec *specs.Spec) error {
	f, err := FormatOf(path)
	if err != nil {
		return exit.With(exit.Usage, "", err)
	}
	if err := checkSpec(spec); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	data, err := Marshal(spec, f)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return atomicfile.Write(path, data, 0o644)
}
