package config

import (
	"bytes"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Document is the configuration as a file with a comment for each key. Parse reads it as the same configuration.
func (c *Config) Document() ([]byte, error) {
	var doc yaml.Node
	if err := doc.Encode(c); err != nil {
		return nil, fmt.Errorf("write the configuration as YAML: %w", err)
	}
	comment(&doc, "")
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(&doc); err != nil {
		return nil, fmt.Errorf("write the configuration as YAML: %w", err)
	}
	return b.Bytes(), nil
}

// comment puts the documentation before each key. Items of lists have none: their keys are in the example.
func comment(n *yaml.Node, prefix string) {
	if n.Kind != yaml.MappingNode {
		return
	}
	for i := 0; i < len(n.Content); i += 2 {
		name, value := n.Content[i], n.Content[i+1]
		key := keyOf(prefix + name.Value)
		lines := []string{"# " + key.sentence()}
		if key.Example != "" {
			lines = append(lines, "# For example:")
			for line := range strings.SplitSeq(key.Example, "\n") {
				lines = append(lines, "#   "+line)
			}
		}
		name.HeadComment = strings.Join(lines, "\n")
		comment(value, key.Path+".")
	}
}
