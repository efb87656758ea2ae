package configfile

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

// Validator is a pointer to a configuration. Validate reports all problems, each in a line that begins with the key.
type Validator interface {
	Validate() error
}

// Parse parses a configuration file in YAML, or JSON, as yamlfile.Decode does. It sets the values of the file in c, and
// returns their keys of the top level. An empty file is valid. The error has all problems, including those that
// Validate finds in what could be decoded.
//
// A file that can be read is not validated: flags and the environment may override its values.
func (k *Keys) Parse(data []byte, c Validator) ([]string, error) {
	if len(data) > MaxFile {
		return nil, fmt.Errorf("larger than %d bytes", MaxFile)
	}
	document, err := yamlfile.Decode(data, c, k.Gone)
	switch {
	case document == nil:
		return nil, err
	case err != nil:
		return nil, errors.Join(err, validateExcept(c, err))
	}
	var values map[string]yaml.Node
	if document.Kind != 0 { // the file is not empty
		if err := document.Decode(&values); err != nil {
			return nil, err
		}
	}
	return slices.Sorted(maps.Keys(values)), nil
}

// validateExcept returns the problems that Validate finds, except in keys that could not be decoded: their values here
// are not those of the file.
func validateExcept(c Validator, undecoded error) error {
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
