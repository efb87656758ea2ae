package config

import (
	"errors"
	"fmt"
	"maps"
	"slices"
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
	// Keys are those of the top level that the file has a value for.
	Keys []string
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
	var keys map[string]yaml.Node
	if err := document.Decode(&keys); err != nil {
		return nil, err
	}
	f.Keys = slices.Sorted(maps.Keys(keys))
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
