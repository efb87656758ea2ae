package config

import (
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

// Parse parses a configuration file in YAML, or JSON, as yamlfile.Decode does. An empty file is valid.
//
// The values are not validated: flags and the environment may override them.
func Parse(data []byte) (*File, error) {
	if len(data) > MaxFile {
		return nil, fmt.Errorf("larger than %d bytes", MaxFile)
	}
	f := &File{Config: Default()}
	document, err := yamlfile.Decode(data, &f.Config)
	if err != nil {
		return nil, err
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
