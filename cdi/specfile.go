package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"go.yaml.in/yaml/v3"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/internal/yamlfile"
)

// Format is the encoding of a spec.
type Format string

// The formats.
const (
	JSON Format = "json"
	YAML Format = "yaml"
)

// ErrExtension means that engines do not read a spec file of this name.
var ErrExtension = errors.New("engines read only .json and .yaml")

// FormatOf returns the format of a spec file by its extension. The error wraps ErrExtension.
func FormatOf(path string) (Format, error) {
	switch ext := filepath.Ext(path); ext {
	case ".json":
		return JSON, nil
	case ".yaml":
		return YAML, nil
	default:
		return "", fmt.Errorf("spec file %s: extension %q: %w", path, ext, ErrExtension)
	}
}

// FileName returns the name of the spec file of a kind: "nvidia.com-gpu.json" for "nvidia.com/gpu".
func FileName(kind string) string { return strings.ReplaceAll(kind, "/", "-") + ".json" }

// Marshal encodes a spec. The same spec gives the same bytes.
func Marshal(spec *specs.Spec, f Format) ([]byte, error) {
	var buf bytes.Buffer
	if err := encode(&buf, spec, f); err != nil {
		return nil, fmt.Errorf("encode CDI spec as %q: %w", f, err)
	}
	return buf.Bytes(), nil
}

func encode(w io.Writer, spec *specs.Spec, f Format) error {
	switch f {
	case JSON:
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		return enc.Encode(spec)
	case YAML:
		enc := yaml.NewEncoder(w)
		enc.SetIndent(2)
		if err := enc.Encode(spec); err != nil {
			return err
		}
		return enc.Close()
	default:
		return errors.New("unknown format")
	}
}

// WriteFile replaces the spec file at path, in the format of its extension. All users can read the file. The directory
// must exist. A spec that the CDI library does not accept is an error.
func WriteFile(path string, spec *specs.Spec) error {
	f, err := FormatOf(path)
	if err != nil {
		return err
	}
	if err := checkSpec(spec); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	data, err := Marshal(spec, f)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return fileio.Replace(path, data, 0o644)
}

// maxSpec bounds a spec file, in bytes. A spec for 16 GPUs has 40 KB.
const maxSpec = 16 << 20

// ReadFile reads a spec file. A spec that the CDI library does not accept is an error, and so is a file that is not
// regular or larger than 16 MiB.
func ReadFile(path string) (*specs.Spec, error) {
	// The CDI library would wait for ever on a FIFO, and takes long for many keys. So the file is checked first; the
	// library reads it a second time, since it validates only files.
	data, err := fileio.ReadFile(path, maxSpec)
	if err != nil {
		return nil, fmt.Errorf("read CDI spec: %w", err)
	}
	if _, err := yamlfile.Parse(data); err != nil {
		return nil, fmt.Errorf("read CDI spec %s: %w", path, err)
	}
	spec, err := cdilib.ReadSpec(path, 0)
	if err != nil {
		return nil, fmt.Errorf("read CDI spec %s: %w", path, causeOf(err))
	}
	return spec.Spec, nil
}

// causeOf returns an error of the CDI library without "failed to", since the caller's text already says what failed,
// and without names of Go types.
func causeOf(err error) error {
	for strings.HasPrefix(err.Error(), "failed to") {
		cause := errors.Unwrap(err)
		if cause == nil {
			break
		}
		err = cause
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("the file is empty: %w", err)
	}
	if e, ok := errors.AsType[*yaml.TypeError](err); ok {
		return yamlfile.Plain(e)
	}
	return wording.Limit(err)
}

// checkSpec applies the CDI library's rules to a spec that is not in a file yet. It leaves out the rules for
// annotations, since this package writes none.
func checkSpec(spec *specs.Spec) error {
	if err := specs.ValidateVersion(spec); err != nil {
		return err
	}
	if err := validateKind(spec.Kind); err != nil {
		return err
	}
	if err := (&cdilib.ContainerEdits{ContainerEdits: &spec.ContainerEdits}).Validate(); err != nil {
		return err
	}
	if len(spec.Devices) == 0 {
		return errors.New("no devices")
	}
	names := map[string]bool{}
	for i := range spec.Devices {
		d := &spec.Devices[i]
		if err := checkDevice(d); err != nil {
			return fmt.Errorf("device %q: %w", d.Name, err)
		}
		if names[d.Name] {
			return fmt.Errorf("two devices have the name %q", d.Name)
		}
		names[d.Name] = true
	}
	return nil
}

func checkDevice(d *specs.Device) error {
	if err := parser.ValidateDeviceName(d.Name); err != nil {
		return err
	}
	e := &d.ContainerEdits
	if len(e.Env)+len(e.DeviceNodes)+len(e.NetDevices)+len(e.Mounts)+len(e.Hooks)+len(e.AdditionalGIDs) == 0 &&
		e.IntelRdt == nil {
		return errors.New("no edits")
	}
	return (&cdilib.ContainerEdits{ContainerEdits: e}).Validate()
}
