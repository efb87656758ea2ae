// Package configschema generates and checks the JSON schema of a configuration file.
package configschema

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/configfile"
)

// schema is the part of JSON Schema (2020-12) that describes the configuration.
type schema struct {
	Schema      string             `json:"$schema,omitempty"`
	Title       string             `json:"title,omitempty"`
	Description string             `json:"description,omitempty"`
	Type        any                `json:"type"`
	Pattern     string             `json:"pattern,omitempty"`
	Enum        []string           `json:"enum,omitempty"`
	Minimum     *int               `json:"minimum,omitempty"`
	Maximum     int                `json:"maximum,omitempty"`
	MinItems    int                `json:"minItems,omitempty"`
	UniqueItems bool               `json:"uniqueItems,omitempty"`
	Default     any                `json:"default,omitempty"`
	Items       *schema            `json:"items,omitempty"`
	Properties  map[string]*schema `json:"properties,omitempty"`
	Required    []string           `json:"required,omitempty"`
	// Additional is false in objects: an unknown key is an error.
	Additional *bool `json:"additionalProperties,omitempty"`
}

// Generator generates the schema of a configuration.
type Generator struct {
	Title string
	Keys  *configfile.Keys
	// Bounds returns the limits of a number, or of each number in a list; a maximum of 0 means none. Nil means no
	// limits.
	Bounds func(path string) (minimum, maximum int)
	// Selector is the type of strings that may be written as whole numbers without quotes; nil means none.
	Selector reflect.Type
}

// Generate returns the JSON schema of a configuration with these defaults.
func (g *Generator) Generate(defaults any) ([]byte, error) {
	s := g.schemaOf(reflect.ValueOf(defaults), "")
	s.Schema = "https://json-schema.org/draft/2020-12/schema"
	s.Title = g.Title
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(s); err != nil {
		return nil, fmt.Errorf("write the schema of the configuration: %w", err)
	}
	return b.Bytes(), nil
}

// schemaOf returns the schema for a path whose default is v.
func (g *Generator) schemaOf(v reflect.Value, path string) *schema {
	s := &schema{Description: g.Keys.Key(path).Sentence(), Type: "string"}
	switch v.Kind() {
	case reflect.Struct:
		s.Type, s.Additional, s.Properties = "object", new(bool), map[string]*schema{}
		g.addFields(s, v, path)
	case reflect.Slice:
		s.Type = "array"
		s.Items = g.schemaOf(reflect.Zero(v.Type().Elem()), path+"[]")
		_, maximum := g.bounds(path)
		s.Items.Enum, s.Items.Maximum = g.Keys.Values[path], maximum
		s.UniqueItems = len(g.Keys.Values[path]) > 0 || v.Type().Elem().Kind() == reflect.Int
		if v.Len() > 0 { // a list with a default must not be empty
			s.MinItems, s.Default = 1, v.Interface()
		}
		g.allowText(s, v.Type().Elem(), g.Keys.Values[path], maximum)
	case reflect.Bool:
		s.Type = "boolean"
		if v.Bool() {
			s.Default = true
		}
	case reflect.Int64: // a Duration
		s.Default, s.Pattern = v.Interface(), `^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$`
	case reflect.Int:
		minimum, maximum := g.bounds(path)
		s.Type, s.Minimum, s.Maximum = "integer", new(minimum), maximum
		if v.Int() != 0 {
			s.Default = v.Interface()
		}
	default:
		s.Enum = g.Keys.Values[path]
		if v.Type() == g.Selector {
			s.Type = []string{"string", "integer"} // an index needs no quotes
		}
		if v.Len() > 0 {
			s.Default = v.Interface()
		}
	}
	return s
}

func (g *Generator) bounds(path string) (minimum, maximum int) {
	if g.Bounds == nil {
		return 0, 0
	}
	return g.Bounds(path)
}

// allowText also accepts a list of strings or numbers as one text with commas, and a list of one number as that number.
func (g *Generator) allowText(s *schema, item reflect.Type, known []string, maximum int) {
	if item.Kind() != reflect.String && item.Kind() != reflect.Int {
		return
	}
	types := []string{"array", "string"}
	isSelector := item == g.Selector
	if item.Kind() == reflect.Int || isSelector {
		types = append(types, "integer")
	}
	s.Type = types
	one := strings.Join(known, "|")
	if item.Kind() == reflect.Int {
		one = "[0-9]+"
		s.Minimum, s.Maximum = new(int), maximum
	}
	if isSelector || item.Kind() == reflect.String && known == nil {
		return // any text
	}
	list := fmt.Sprintf(` *(%s) *(, *(%[1]s) *)*`, one)
	if s.MinItems == 0 {
		list = "(" + list + ")?"
	}
	s.Pattern = "^" + list + "$"
}

func (g *Generator) addFields(s *schema, v reflect.Value, path string) {
	for field, value := range v.Fields() {
		name, option, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if option == "inline" {
			g.addFields(s, value, path)
			continue
		}
		at := name
		if path != "" {
			at = path + "." + name
		}
		s.Properties[name] = g.schemaOf(value, at)
		// All keys of a rule are required except these.
		optional := []string{"devices", "rename", "count", "within"}
		if strings.Contains(at, "[]") && !slices.Contains(optional, name) {
			s.Required = append(s.Required, name)
		}
	}
}
