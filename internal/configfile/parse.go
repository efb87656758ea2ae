package configfile

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/internal/yamlfile"
)

// MaxFile is the largest size of a configuration file, in bytes.
const MaxFile = 1 << 20

// Validator is a pointer to a configuration. Validate returns all problems, each on a line that begins with the key.
type Validator interface {
	Validate() error
}

// Parse parses a configuration file in YAML or JSON, like yamlfile.Decode. It sets the file's values in c and returns
// the file's top-level keys. An empty file is valid.
//
// If the file cannot be decoded, the error has all problems, including those that Validate finds in the values that
// could be decoded. Otherwise the values are not validated yet: flags and the environment may override them.
func (k *Keys) Parse(data []byte, c Validator) ([]string, error) {
	if len(data) > MaxFile {
		return nil, fmt.Errorf("larger than %d bytes", MaxFile)
	}
	document, err := yamlfile.Decode(data, c, k.Gone)
	switch {
	case document == nil:
		return nil, err
	case err != nil:
		return nil, wording.Limit(errors.Join(err, validateExcept(c, err)))
	}
	var values map[string]yaml.Node
	if document.Kind != 0 { // the file is not empty
		if err := document.Decode(&values); err != nil {
			return nil, err
		}
	}
	return slices.Sorted(maps.Keys(values)), nil
}

// validateExcept returns the problems that Validate finds, except for keys that could not be decoded: for these, c
// does not have the file's values.
func validateExcept(c Validator, undecoded error) error {
	invalid := c.Validate()
	if invalid == nil {
		return nil
	}
	problems := wording.Problems(invalid)
	// undecodedKey finds the keys of values that could not be decoded, in the messages of yamlfile.Decode.
	undecodedKey := regexp.MustCompile(`(?m)^line \d+: (\S+): want `)
	for _, key := range undecodedKey.FindAllStringSubmatch(undecoded.Error(), -1) {
		problems = slices.DeleteFunc(problems, func(problem string) bool {
			rest, ok := strings.CutPrefix(problem, key[1])
			return ok && strings.IndexAny(rest, " :.[") == 0 // not a longer key with the same beginning
		})
	}
	var left []error
	for _, problem := range problems {
		left = append(left, errors.New(problem))
	}
	return errors.Join(left...)
}
