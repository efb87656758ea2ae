package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/lazy"
)

// MaxFile bounds the size of a configuration file, in bytes.
const MaxFile = 1 << 20

// File is what a configuration file says.
type File struct {
	// Config has the file's values, and the defaults for what is not in the file.
	Config Config

	keys map[string]yaml.Node // of the top level
}

// Parse reads a configuration file in YAML, and so also one in JSON. An unknown key, a key that is there twice and a
// value of the wrong kind are errors, and all of them are reported, together with what Config.Validate says about the
// rest. An empty file is a configuration too.
//
// A file without such errors is not validated: its values may yet be overridden.
func Parse(data []byte) (*File, error) {
	if len(data) > MaxFile {
		return nil, fmt.Errorf("larger than %d bytes", MaxFile)
	}
	f := &File{Config: Default()}
	d := yaml.NewDecoder(bytes.NewReader(data))
	d.KnownFields(true)
	if err := d.Decode(&f.Config); err != nil && !errors.Is(err, io.EOF) {
		return nil, f.wrong(err)
	}
	if err := d.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one YAML document")
	}
	var document yaml.Node
	if err := yaml.Unmarshal(data, &document); err != nil {
		return nil, err
	}
	if document.Kind == 0 { // the file is empty
		return f, nil
	}
	if err := document.Decode(&f.keys); err != nil {
		return nil, err
	}
	if markFractions(&document) {
		if err := document.Decode(new(Config)); err != nil {
			return nil, f.wrong(err)
		}
	}
	return f, nil
}

// markFractions makes numbers that are not whole something that the decoder puts into texts, but not into numbers: it would
// cut off the rest of them. It reports whether there are any.
func markFractions(n *yaml.Node) (found bool) {
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!float" {
		if x, err := strconv.ParseFloat(n.Value, 64); err != nil || x != math.Trunc(x) {
			n.Tag = "!!fraction"
			return true
		}
	}
	for _, below := range n.Content {
		found = markFractions(below) || found
	}
	return found
}

// wrong is the error of a file that could not be decoded whole. What could be is validated.
func (f *File) wrong(err error) error {
	typeErr, ok := errors.AsType[*yaml.TypeError](err)
	if !ok {
		return err
	}
	var errs []error
	for _, message := range typeErr.Errors {
		errs = append(errs, errors.New(tidy(message)))
	}
	return errors.Join(append(errs, f.Config.Validate())...)
}

var (
	unknownKey = lazy.Regexp(`field (.*) not found in type .*`)
	goType     = lazy.Regexp(`into (\[\])?(?:config|resource)\.\w+`)
)

// tidy drops the names of Go types from the decoder's messages; they say nothing to who wrote the file.
func tidy(message string) string {
	message = unknownKey().ReplaceAllString(message, "unknown key $1")
	return goType().ReplaceAllStringFunc(message, func(s string) string {
		if strings.HasPrefix(s, "into []") {
			return "into a list"
		}
		return "into keys and values"
	})
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
		{"log-level", c.LogLevel},
		{"log-format", c.LogFormat},
		{"device-plugin-dir", c.DevicePluginDir},
		{"plugins-registry-dir", c.PluginsRegistryDir},
		{"registration", string(c.Registration)},
		{"runtime-dir", c.RuntimeDir},
		{"state-dir", c.StateDir},
		{"strategy", Join(c.Strategy)},
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
