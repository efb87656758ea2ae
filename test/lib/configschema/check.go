package configschema

import (
	"bytes"
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.yaml.in/yaml/v3"
)

// Documented tests that each key of a configuration is documented, in the order of the struct.
func (g *Generator) Documented(t *testing.T, configuration reflect.Type) {
	t.Helper()
	want := structPaths(configuration, "")
	var got []string
	for _, k := range g.Keys.List {
		got = append(got, k[0])
		if k[1] == "" {
			t.Errorf("%s has no documentation", k[0])
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-struct +documented\n%s", diff)
	}
}

// structPaths returns the paths of all keys of a type.
func structPaths(t reflect.Type, path string) []string {
	switch t.Kind() {
	case reflect.Slice:
		return structPaths(t.Elem(), path+"[]")
	case reflect.Struct:
	default:
		return nil
	}
	var list []string
	for field := range t.Fields() {
		name, option, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if jsonName, _, _ := strings.Cut(field.Tag.Get("json"), ","); jsonName != name {
			list = append(list, "another name in JSON: "+jsonName)
		}
		if option == "inline" {
			list = append(list, structPaths(field.Type, path)...)
			continue
		}
		at := strings.TrimPrefix(path+"."+name, ".")
		list = append(append(list, at), structPaths(field.Type, at)...)
	}
	return list
}

// Published compares the schema with the published file, or writes the file.
func (g *Generator) Published(t *testing.T, defaults any, path string, update bool) {
	t.Helper()
	got, err := g.Generate(defaults)
	testenv.Must(t, err)
	if update {
		testenv.Must(t, os.WriteFile(path, got, 0o644))
	}
	want, err := os.ReadFile(path)
	testenv.Must(t, err)
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("-specs +program; make generate updates it\n%s", diff)
	}
}

// Compile compiles the schema. It returns a function that validates a YAML file.
func (g *Generator) Compile(t *testing.T, defaults any) (validate func(t *testing.T, file string) error) {
	t.Helper()
	data, err := g.Generate(defaults)
	testenv.Must(t, err)
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	testenv.Must(t, err)
	c := jsonschema.NewCompiler()
	testenv.Must(t, c.AddResource("config.json", doc))
	s, err := c.Compile("config.json")
	testenv.Must(t, err)
	return func(t *testing.T, file string) error {
		t.Helper()
		return s.Validate(parseInstance(t, file))
	}
}

// parseInstance parses a YAML document for the schema's library.
func parseInstance(t *testing.T, text string) any {
	t.Helper()
	var v any
	testenv.Must(t, yaml.Unmarshal([]byte(text), &v))
	data, err := json.Marshal(v)
	testenv.Must(t, err)
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	testenv.Must(t, err)
	return doc
}
