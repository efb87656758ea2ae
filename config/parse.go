package config

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/yamlfile"
)

// MaxFile bounds the size of a configuration file, in bytes.
const MaxFile = 1 << 20

// File is a configuration file.
type File struct {
	// Config has the file's values, and defaults for the other keys.
	Config Config

	keys map[string]yaml.Node // of the top level
}

// Parse parses a configuration file in YAML, or JSON, as yamlfile.Decode does. The error has all problems, including
// those that Config.Validate finds in the keys that can be read. An empty file is valid.
//
// A file that can be read is not validated: flags and the environment may override its values.
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
		return nil, errors.Join(err, f.Config.validateExcept(err))
	case document.Kind == 0: // the file is empty
		return f, nil
	}
	if err := document.Decode(&f.keys); err != nil {
		return nil, err
	}
	return f, nil
}

// validateExcept returns the problems that Validate finds, except in keys that the decoder has reported: those have
// zero values, which the file does not contain.
func (c *Config) validateExcept(reported error) error {
	problems, _ := errors.AsType[yamlfile.DecodeErrors](reported)
	invalid := c.Validate()
	if invalid == nil {
		return nil
	}
	var rest []error
	for text := range strings.SplitSeq(invalid.Error(), "\n") {
		if !slices.ContainsFunc(problems, func(p yamlfile.Problem) bool { return isAbout(text, p.Path) }) {
			rest = append(rest, errors.New(text))
		}
	}
	return errors.Join(rest...)
}

// isAbout reports whether a message of Validate begins with the key or one below it.
func isAbout(message, key string) bool {
	rest, ok := strings.CutPrefix(message, key)
	return ok && key != "" && rest != "" && strings.ContainsRune(" :.[", rune(rest[0]))
}

// Flags yields the values in the file that are flags too, by name and in a fixed order. Lists are joined by commas.
func (f *File) Flags() iter.Seq2[string, string] {
	return func(yield func(string, string) bool) {
		for _, s := range f.Config.scalars() {
			if f.Sets(s.key) && !yield(s.key, s.value) {
				return
			}
		}
	}
}

// Sets reports whether the file has a value other than null for a key of the top level.
func (f *File) Sets(key string) bool {
	n, ok := f.keys[key]
	return ok && n.ShortTag() != "!!null"
}

type scalar struct{ key, value string }

// scalars returns the keys that are flags too.
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

// Join formats a list as the value of a flag.
func Join[T ~string](list []T) string {
	var names []string
	for _, s := range list {
		names = append(names, string(s))
	}
	return strings.Join(names, ",")
}
