package config

import (
	"errors"
	"fmt"
	"maps"
	"slices"

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

// Parse parses a configuration file in YAML, or JSON, as yamlfile.Decode does. An empty file is valid. The error has all
// problems, including those that Config.Validate finds in what could be decoded.
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
		return nil, errors.Join(err, f.Config.Validate())
	}
	var keys map[string]yaml.Node
	if document.Kind != 0 { // the file is not empty
		if err := document.Decode(&keys); err != nil {
			return nil, err
		}
	}
	f.Keys = slices.Sorted(maps.Keys(keys))
	return f, nil
}
