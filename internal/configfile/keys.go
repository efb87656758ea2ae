// Package configfile has what the configuration files of the programs share: documentation of the keys, options for
// flags and environment variables, strict parsing, and checks of values.
//
// It parses bytes and reads no files. That flags override the environment and the environment the file is the command
// line's business. A configuration is a struct with yaml and json tags; nested structs may be inlined.
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
	// Values are the accepted values of a key, or of each item of its list; other keys accept any.
	Values map[string][]string
	// Examples are values in YAML, for keys whose default shows too little.
	Examples map[string]string
	// Gone are keys of earlier versions. The text says what replaces the key; using the key is an error with that text.
	Gone map[string]string
}

// Key documents a key of the file.
type Key struct {
	// Path is the full name: "sharing.time-slicing.resources[].replicas".
	Path string
	// Usage is the meaning. Back quotes mark the word for the value, as in the usage of flags.
	Usage string
}

// Key returns the documentation of a path, or a zero Key.
func (k *Keys) Key(path string) Key {
	for _, key := range k.List {
		if key[0] == path {
			return Key{Path: path, Usage: key[1]}
		}
	}
	return Key{}
}

// Texts converts the values of a type to texts.
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

// Document returns the configuration c as a YAML file with a comment for each key.
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

// addComments documents each key. The keys of list items are documented by examples.
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
