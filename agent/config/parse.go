package config

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
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

// Parse parses a configuration file in YAML, or JSON, as yamlfile.Decode does. An empty file is valid. The error has
// all problems, including those that Config.Validate finds in what could be decoded.
//
// A file that can be read is not validated: flags and the environment may override its values.
func Parse(data []byte) (*File, error) {
	if len(data) > MaxFile {
		return nil, fmt.Errorf("larger than %d bytes", MaxFile)
	}
	f := &File{Config: Default()}
	document, err := yamlfile.Decode(data, &f.Config, gone)
	switch {
	case document == nil:
		return nil, err
	case err != nil:
		return nil, errors.Join(err, f.Config.validateExcept(err))
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

// validateExcept returns the problems that Validate finds, except in keys that could not be decoded: their values here
// are not those of the file.
func (c *Config) validateExcept(undecoded error) error {
	invalid := c.Validate()
	if invalid == nil {
		return nil
	}
	problems := strings.Split(invalid.Error(), "\n")
	// The keys in the messages of yamlfile.Decode about values.
	undecodedKey := regexp.MustCompile(`(?m)^line \d+: (\S+): want `)
	for _, key := range undecodedKey.FindAllStringSubmatch(undecoded.Error(), -1) {
		problems = slices.DeleteFunc(problems, func(problem string) bool {
			rest, ok := strings.CutPrefix(problem, key[1])
			return ok && strings.IndexAny(rest, " :.[") == 0 // not a longer key that begins like this one
		})
	}
	if len(problems) == 0 {
		return nil
	}
	return errors.New(strings.Join(problems, "\n"))
}
