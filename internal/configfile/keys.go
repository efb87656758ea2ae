// Package configfile has what the configuration files of the programs share: documentation of the keys, options for
// flags and environment variables, strict parsing, and checks of values.
//
// It parses bytes and reads no files. The package cli makes flags override the environment, and the environment
// override the file. A configuration is a struct with yaml and json tags; nested structs may be inlined.
package configfile

import (
	"bytes"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Keys documents the keys of a configuration file.
type Keys struct {
	// List has the path and the usage of each key, in the order of the struct.
	List [][2]string
	// Values are the accepted values of a key, or of each item of a list. A key without Values accepts any.
	Values map[string][]string
	// Examples are YAML values for keys whose default does not show enough.
	Examples map[string]string
	// Gone are removed keys. If a file has one, the error is this text, which names the replacement.
	Gone map[string]string
}

// Key is a key of the file with its documentation.
type Key struct {
	// Path is the full name, like "sharing.time-slicing.resources[].replicas".
	Path string
	// Usage is the meaning. Back quotes mark the name of the value, as in the usage of flags.
	Usage string
}

// Key returns the key with a path, or a zero Key.
func (k *Keys) Key(path string) Key {
	for _, key := range k.List {
		if key[0] == path {
			return Key{Path: path, Usage: key[1]}
		}
	}
	return Key{}
}

// Texts converts the values of a type to strings.
func Texts[T ~string](list ...T) []string {
	var values []string
	for _, value := range list {
		values = append(values, string(value))
	}
	return values
}

// Sentence returns the usage as a sentence, for the file and the schema.
func (k Key) Sentence() string {
	text := strings.ReplaceAll(k.Usage, "`", "")
	if text == "" {
		return ""
	}
	return strings.ToUpper(text[:1]) + strings.TrimSuffix(text[1:], ".") + "."
}

// Document returns the configuration c as a YAML file with a comment on each key.
func (k *Keys) Document(c any) ([]byte, error) {
	var doc yaml.Node
	if err := doc.Encode(c); err != nil {
		return nil, fmt.Errorf("write the configuration as YAML: %w", err)
	}
	k.addComments(&doc, "")
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(&doc); err != nil {
		return nil, fmt.Errorf("write the configuration as YAML: %w", err)
	}
	return b.Bytes(), nil
}

// addComments adds a comment to each key. Keys in the items of a list get none: examples show them.
func (k *Keys) addComments(n *yaml.Node, prefix string) {
	if n.Kind != yaml.MappingNode {
		return
	}
	for i := 0; i < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		key := k.Key(prefix + name.Value)
		lines := []string{"# " + key.Sentence()}
		if example := k.Examples[key.Path]; example != "" {
			lines = append(lines, "# For example:")
			for line := range strings.SplitSeq(example, "\n") {
				lines = append(lines, "#   "+line)
			}
		}
		name.HeadComment = strings.Join(lines, "\n")
		k.addComments(value, key.Path+".")
	}
}
