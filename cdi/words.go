package cdi

import (
	"encoding/json"
	"errors"
	"strings"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/lazy"
)

// worded is an error in other words than those of its cause.
type worded struct {
	text  string
	cause error
}

func (w *worded) Error() string { return w.text }

func (w *worded) Unwrap() error { return w.cause }

// inWords is a decoder's error without the names of Go types, which say nothing to who wrote the file.
func inWords(err error) error {
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		what := valueWords(e.Value) + ", want " + typeWords(e.Type.String())
		if e.Field != "" {
			what = e.Field + ": " + what
		}
		return &worded{what, err}
	}
	e, ok := errors.AsType[*yaml.TypeError](err)
	if !ok {
		return err
	}
	var lines []string
	for _, message := range e.Errors {
		lines = append(lines, yamlWords(message))
	}
	return &worded{strings.Join(lines, "\n"), err}
}

var (
	unknownField = lazy.Regexp(`field (.*) not found in type \S+$`)
	wrongType    = lazy.Regexp("cannot unmarshal !!(\\w+)( `.*`)? into (\\S+)$")
)

func yamlWords(message string) string {
	message = unknownField().ReplaceAllString(message, "unknown key $1")
	if m := wrongType().FindStringSubmatchIndex(message); m != nil {
		part := func(i int) string { return message[max(m[2*i], 0):max(m[2*i+1], 0)] }
		return message[:m[0]] + valueWords(part(1)) + part(2) + ", want " + typeWords(part(3))
	}
	return message
}

// valueWords is what stands in the file, by JSON's or YAML's name for it.
func valueWords(name string) string {
	name, value, found := strings.Cut(name, " ") // "number 1.5"
	words, ok := map[string]string{
		"str": "text", "string": "text", "seq": "a list", "array": "a list", "map": "an object", "object": "an object",
		"int": "the number", "float": "the number", "number": "a number", "bool": "true or false",
	}[name]
	switch {
	case !ok:
		words = name
	case found:
		words = "the number " + value
	}
	return words
}

// typeWords is what is wanted, by the name of the Go type.
func typeWords(name string) string {
	name = strings.TrimPrefix(name, "*")
	switch {
	case strings.HasPrefix(name, "[]"):
		return "a list"
	case strings.HasSuffix(name, ".FileMode"), strings.Contains(name, "int"):
		return "a whole number"
	case strings.HasPrefix(name, "float"):
		return "a number"
	case name == "string":
		return "text"
	case name == "bool":
		return "true or false"
	}
	return "an object"
}
