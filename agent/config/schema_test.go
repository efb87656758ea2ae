package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"gpu-cdi-plugin/allocator"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/resource"
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

// publishedSchema returns the JSON schema of the configuration file for specs/config.schema.json.
func publishedSchema() ([]byte, error) {
	defaults := Default()
	s := schemaOf(reflect.ValueOf(defaults), "")
	s.Schema = "https://json-schema.org/draft/2020-12/schema"
	s.Title = "Configuration of gpu-cdi-plugin"
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
func schemaOf(v reflect.Value, path string) *schema {
	s := &schema{Description: keyOf(path).sentence(), Type: "string"}
	switch v.Kind() {
	case reflect.Struct:
		s.Type, s.Additional, s.Properties = "object", new(bool), map[string]*schema{}
		s.addFields(v, path)
	case reflect.Slice:
		s.Type = "array"
		s.Items = schemaOf(reflect.Zero(v.Type().Elem()), path+"[]")
		_, maximum := bounds(path)
		s.Items.Enum, s.Items.Maximum = values[path], maximum
		s.UniqueItems = len(values[path]) > 0 || v.Type().Elem().Kind() == reflect.Int
		if v.Len() > 0 { // a list with a default must not be empty
			s.MinItems, s.Default = 1, v.Interface()
		}
		s.allowText(v.Type().Elem(), values[path], maximum)
	case reflect.Bool:
		s.Type = "boolean"
		if v.Bool() {
			s.Default = true
		}
	case reflect.Int64: // a Duration
		s.Default, s.Pattern = v.Interface(), `^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$`
	case reflect.Int:
		minimum, maximum := bounds(path)
		s.Type, s.Minimum, s.Maximum = "integer", new(minimum), maximum
		if v.Int() != 0 {
			s.Default = v.Interface()
		}
	default:
		s.Enum = values[path]
		if v.Type() == reflect.TypeFor[resource.Selector]() {
			s.Type = []string{"string", "integer"} // an index needs no quotes
		}
		if v.Len() > 0 {
			s.Default = v.Interface()
		}
	}
	return s
}

// bounds returns the limits of a number, or of each number of a list. A maximum of 0 is none.
func bounds(path string) (minimum, maximum int) {
	switch {
	case path == "imex.channels":
		return 0, maxChannel
	case strings.HasPrefix(path, "allocation.weights."):
		return 0, allocator.MaxWeight
	case strings.HasSuffix(path, ".replicas"):
		return 2, 0
	case path == "health.xids[].xid":
		return 1, 0
	case path == "prestart.memory-tolerance-mib":
		return 0, maxToleranceMiB
	case path == "health.xids[].count":
		return 0, health.MaxCount
	}
	return 0, 0
}

// allowText also accepts a list of texts or numbers as one text with commas, and a list of one number as that number.
func (s *schema) allowText(item reflect.Type, known []string, maximum int) {
	if item.Kind() != reflect.String && item.Kind() != reflect.Int {
		return
	}
	types := []string{"array", "string"}
	isSelector := item == reflect.TypeFor[resource.Selector]()
	if item.Kind() == reflect.Int || isSelector {
		types = append(types, "integer")
	}
	s.Type = types
	one := strings.Join(known, "|")
	if item.Kind() == reflect.Int {
		one = "[0-9]+"
		s.Minimum, s.Maximum = new(int), maximum
	}
	if isSelector {
		return
	}
	list := fmt.Sprintf(` *(%s) *(, *(%[1]s) *)*`, one)
	if s.MinItems == 0 {
		list = "(" + list + ")?"
	}
	s.Pattern = "^" + list + "$"
}

func (s *schema) addFields(v reflect.Value, path string) {
	for field, value := range v.Fields() {
		name, option, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if option == "inline" {
			s.addFields(value, path)
			continue
		}
		at := name
		if path != "" {
			at = path + "." + name
		}
		s.Properties[name] = schemaOf(value, at)
		// The keys of rules are required but for these.
		optional := []string{"devices", "rename", "count", "within"}
		if strings.Contains(at, "[]") && !slices.Contains(optional, name) {
			s.Required = append(s.Required, name)
		}
	}
}
