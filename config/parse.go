package config

import (
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/yamlfile"
)

// MaxFile bounds the size of a configuration file, in bytes.
const MaxFile = 1 << 20

// File is what a configuration file says.
type File struct {
	// Config has the file's values, and the defaults for what is not in the file.
	Config Config

	keys map[string]yaml.Node // of the top level
}

// Parse reads a configuration file in YAML, and so also one in JSON, as yamlfile.Decode does: a list may be a text with
// commas. Everything that is wrong is reported, together with what Config.Validate says about the rest. An empty file is a
// configuration too.
//
// A file without such errors is not validated: its values may yet be overridden.
func Parse(data []byte) (*File, error) {
	if len(data) > MaxFile {
		return nil, fmt.Errorf("larger than %d bytes", MaxFile)
	}
	f := &File{Config: Default()}
	document, err := yamlfile.Decode(data, &f.Config)
	switch {
	case document == nil:
		return nil, err
	case err != nil:
		return nil, errors.Join(err, f.Config.Validate())
	case document.Kind == 0: // the file is empty
		return f, nil
	}
	if err := document.Decode(&f.keys); err != nil {
		return nil, err
	}
	return f, nil
}

// Flags yields the values in the file that can also be given as flags, by the flag's name, always in the same order. A
// list is joined by commas.
func (f *File) Flags() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for _, s := range f.Config.scalars() {
			if f.Sets(s.key) && !yield(s.key, s.value) {
				return
			}
		}
	}
}

// Sets reports whether the file has a value for a key of the top level. Null is none.
func (f *File) Sets(key string) bool {
	n, ok := f.keys[key]
	return ok && n.ShortTag() != "!!null"
}

type scalar struct{ key, value string }

// scalars are the keys that are flags too.
func (c *Config) scalars() []scalar {
	return []scalar{
		{"root", c.Root},
		{"driver-root", c.DriverRoot},
		{"dev-root", c.DevRoot},
		{"nvml-library", c.NVMLLibrary},
		{"cdi-dir", c.CDIDir},
		{"cdi-kind", c.CDIKind},
		{"hook-path", c.HookPath},
		{"insecure-paths", strconv.FormatBool(c.InsecurePaths)},
		{"log-level", c.LogLevel},
		{"log-format", c.LogFormat},
		{"device-plugin-dir", c.DevicePluginDir},
		{"plugins-registry-dir", c.PluginsRegistryDir},
		{"registration", string(c.Registration)},
		{"runtime-dir", c.RuntimeDir},
		{"state-dir", c.StateDir},
		{"strategy", Join(c.Strategy)},
		{"device-id-strategy", string(c.DeviceIDStrategy)},
		{"cdi-annotation-prefix", c.CDIAnnotationPrefix},
		{"gpu-timeout", c.GPUTimeout.String()},
		{"fail-on-init-error", strconv.FormatBool(c.FailOnInitError)},
		{"listen", c.Listen},
		{"extras", Join(c.Extras)},
		{"resource", c.Resource},
		{"mig-strategy", string(c.MIGStrategy)},
		{"mps", strconv.FormatBool(c.MPS)},
	}
}

// Join is the list as it is given to a flag.
func Join[T ~string](list []T) string {
	var names []string
	for _, s := range list {
		names = append(names, string(s))
	}
	return strings.Join(names, ",")
}
