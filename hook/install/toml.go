package install

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"reflect"

	"github.com/pelletier/go-toml/v2"
)

// layer is one of several TOML files of an engine that are merged.
type layer struct {
	path   string
	config map[string]any
}

// layers returns the files that match patterns, in the order of the patterns and then of their paths.
func (e *edit) layers(patterns []string) ([]layer, error) {
	var layers []layer
	for _, pattern := range patterns {
		for _, path := range e.matching(pattern) {
			config, err := ParseTOML(path, e.files[path].Data)
			if err != nil {
				return nil, err
			}
			layers = append(layers, layer{path, config})
		}
	}
	return layers, nil
}

// tomlTable returns the text of a table. Tables in it are inline.
func tomlTable(name string, values map[string]any) (string, error) {
	text := bytes.NewBufferString("[" + name + "]\n")
	err := toml.NewEncoder(text).SetTablesInline(true).Encode(values)
	return text.String(), err
}

// The limits of a TOML file, by the characters that its keys and tables need: the parser compares each key with all
// others of its table. A file at the limits takes a quarter of a second. Comments and texts count too.
const (
	maxKeys = 5_000  // "=" and "["
	maxDots = 20_000 // of keys
)

// ParseTOML parses a file of an engine. The name is for the error.
func ParseTOML(name string, text []byte) (map[string]any, error) {
	for _, limit := range []struct {
		character string
		most      int
	}{{"=", maxKeys}, {"[", maxKeys}, {".", maxDots}} {
		if n := bytes.Count(text, []byte(limit.character)); n > limit.most {
			return nil, fmt.Errorf("read %s: it is too large for a configuration: it has %q %d times, the limit is %d",
				name, limit.character, n, limit.most)
		}
	}
	config := map[string]any{}
	if err := toml.Unmarshal(text, &config); err != nil {
		if e, ok := errors.AsType[*toml.DecodeError](err); ok {
			row, column := e.Position()
			return nil, fmt.Errorf("read %s: line %d, column %d: %w", name, row, column, err)
		}
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return config, nil
}

func sameTOML(name string, a, b []byte) (bool, error) {
	x, errX := ParseTOML(name, a)
	y, errY := ParseTOML(name, b)
	return reflect.DeepEqual(x, y), errors.Join(errX, errY)
}

// get returns the value at a path of keys, or nil if there is none.
func get(table map[string]any, keys ...string) any {
	for ; len(keys) > 1; keys = keys[1:] {
		table, _ = table[keys[0]].(map[string]any)
	}
	return table[keys[0]]
}

// set sets the value at a path of keys. A value on the way that is not a table is replaced by one.
func set(table map[string]any, value any, keys ...string) {
	for ; len(keys) > 1; keys = keys[1:] {
		next, ok := table[keys[0]].(map[string]any)
		if !ok {
			next = map[string]any{}
			table[keys[0]] = next
		}
		table = next
	}
	table[keys[0]] = value
}

// remove removes the value at a path of keys.
func remove(table map[string]any, keys ...string) {
	if parent, ok := get(table, keys[:len(keys)-1]...).(map[string]any); ok {
		delete(parent, keys[len(keys)-1])
	}
}

// prune removes empty tables from a table, and returns it.
func prune(table map[string]any) map[string]any {
	maps.DeleteFunc(table, func(_ string, value any) bool {
		inner, ok := value.(map[string]any)
		return ok && len(prune(inner)) == 0
	})
	return table
}

// merge adds a table to another one, as containerd 2 merges files.
func merge(into, table map[string]any) {
	for key, value := range table {
		old, both := into[key].(map[string]any)
		inner, isTable := value.(map[string]any)
		switch {
		case both && isTable:
			merge(old, inner)
		case isTable:
			into[key] = deepCopy(inner)
		default:
			into[key] = value
		}
	}
}

// deepCopy copies a table; the copy of nil is empty.
func deepCopy(table map[string]any) map[string]any {
	if table == nil {
		return map[string]any{}
	}
	table = maps.Clone(table)
	for key, value := range table {
		if inner, ok := value.(map[string]any); ok {
			table[key] = deepCopy(inner)
		}
	}
	return table
}
