// Package yamlfile decodes YAML files strictly and returns all problems at once, each with its line.
//
// Unknown keys and values of the wrong type are problems. Equal keys, too many keys and too many values are refused
// before the decoder would spend time and memory on them. A list of strings or numbers can also be
// written as "a,b". A key without a value (null) counts as absent. Merge keys (<<) are not supported. A field of type
// any accepts any value.
package yamlfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/wording"
)

// The limits of a document. Aliases are expanded: the decoder decodes a value again for each alias of it. A text counts
// once for each 64 bytes that it begins.
const (
	maxValues = 300_000
	maxDepth  = 100
	// maxComparisons limits the sum, over all mappings, of the square of the number of keys, since the decoder compares
	// each key of a mapping with all others. It allows one mapping of 3,000 keys.
	maxComparisons = 9_000_000
	// maxDirectives is how many lines may begin with "%", since the parser compares each tag directive with all others.
	maxDirectives = 100
)

// Parse parses one YAML document, whose Kind is 0 if the data is empty. What it accepts can be decoded within a second
// or so. The error names equal keys, or says that the document has too many keys, values or levels.
func Parse(data []byte) (*yaml.Node, error) {
	if bytes.Count(data, []byte("\n%")) > maxDirectives {
		return nil, fmt.Errorf("it has more than %d lines that begin with %%", maxDirectives)
	}
	d := yaml.NewDecoder(bytes.NewReader(data))
	document := &yaml.Node{}
	if err := d.Decode(document); errors.Is(err, io.EOF) {
		return document, nil
	} else if err != nil {
		return nil, wording.Limit(err)
	}
	if err := d.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one YAML document")
	}
	s := structure{values: maxValues, comparisons: maxComparisons}
	if err := s.check(document, 0); err != nil {
		return nil, err
	}
	return document, wording.Limit(errors.Join(s.duplicates...))
}

// structure checks a document before it is decoded.
type structure struct {
	values, comparisons int // how many more the document may have
	duplicates          []error
}

// size returns what a value counts for, without the values in it.
func size(n *yaml.Node) int { return 1 + len(n.Value)/64 }

func (s *structure) check(n *yaml.Node, depth int) error {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if s.values -= size(n); s.values < 0 {
		return fmt.Errorf("it has more than %d values, with aliases expanded and long texts counted as several", maxValues)
	}
	if depth > maxDepth {
		return fmt.Errorf("line %d: it is nested more than %d levels deep", n.Line, maxDepth)
	}
	if n.Kind == yaml.MappingNode {
		if err := s.countComparisons(n); err != nil {
			return err
		}
		s.checkKeys(n)
	}
	for _, child := range n.Content {
		if err := s.check(child, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (s *structure) countComparisons(n *yaml.Node) error {
	keys := 0
	for i := 0; i < len(n.Content); i += 2 {
		keys += size(n.Content[i])
	}
	if s.comparisons -= len(n.Content) / 2 * keys; s.comparisons < 0 {
		return fmt.Errorf("line %d: too many keys in one mapping, or too many aliases of a mapping with many keys", n.Line)
	}
	return nil
}

// checkKeys finds the keys that the decoder takes for equal.
func (s *structure) checkKeys(n *yaml.Node) {
	type key struct {
		kind  yaml.Kind
		value string
	}
	first := make(map[key]int, len(n.Content)/2)
	for i := 0; i < len(n.Content); i += 2 {
		k := n.Content[i]
		line := first[key{k.Kind, k.Value}]
		if line == 0 {
			first[key{k.Kind, k.Value}] = k.Line
		} else if len(s.duplicates) < maxProblems {
			s.duplicates = append(s.duplicates, fmt.Errorf("line %d: duplicate key %s, first in line %d",
				k.Line, wording.Shorten(k.Value, maxQuoted), line))
		}
	}
}

// Decode decodes a YAML document into the struct to which `into` points. It also returns the document, whose Kind is 0
// if the data is empty. The error has the first problems. If the returned document is not nil, `into` has the values
// without a problem. The map `gone` has texts for removed keys, which are their problems.
func Decode(data []byte, into any, gone map[string]string) (*yaml.Node, error) {
	document, err := Parse(data)
	if err != nil {
		return nil, err
	}
	if document.Kind == 0 {
		return document, nil
	}
	c := checker{gone: gone}
	c.value("", document.Content[0], reflect.TypeOf(into).Elem())
	err = document.Decode(into)
	typeErr, isType := errors.AsType[*yaml.TypeError](err)
	switch {
	case len(c.problems) > 0:
		return document, wording.Limit(errors.Join(c.problems...))
	case isType:
		return document, Plain(typeErr)
	}
	return document, wording.Limit(err)
}

// Plain returns an error of the YAML decoder without the names of Go types.
func Plain(err *yaml.TypeError) error {
	goType := regexp.MustCompile(` (into|in type) \S+$`)
	unknownField := regexp.MustCompile(`field (.+) not found$`)
	var errs []error
	for _, message := range err.Errors[:min(maxProblems, len(err.Errors))] {
		message = goType.ReplaceAllString(message, "")
		errs = append(errs, errors.New(unknownField.ReplaceAllString(message, "unknown key $1")))
	}
	return wording.Limit(errors.Join(errs...))
}

// checker compares a document with the Go type that it is decoded into.
type checker struct {
	gone     map[string]string
	problems []error
}

// maxProblems is how many problems are kept.
const maxProblems = 1000

// problem records a problem with the line of n. Its text begins with `path` unless that is empty.
func (c *checker) problem(n *yaml.Node, path, format string, args ...any) {
	if len(c.problems) >= maxProblems {
		return
	}
	text := fmt.Sprintf(format, args...)
	if path != "" {
		text = path + ": " + text
	}
	c.problems = append(c.problems, fmt.Errorf("line %d: %s", n.Line, text))
}

// value checks a node that is decoded into type t.
func (c *checker) value(path string, n *yaml.Node, t reflect.Type) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	target := n
	if n.Kind == yaml.AliasNode {
		target = n.Alias
	}
	kind := kindOf(t)
	switch {
	case isNull(n), t.Kind() == reflect.Interface: // any value
	case t.Kind() == reflect.Slice && target.Kind == yaml.ScalarNode && isScalar(t.Elem()):
		splitList(n, target)
		c.list(path, n, t)
	case kind != target.Kind:
		c.problem(n, path, "want %s, got %s", describeType(t), describe(target))
	case t.Kind() == reflect.Struct:
		c.object(path, target, t)
	case t.Kind() == reflect.Map:
		c.table(path, target, t)
	case t.Kind() == reflect.Slice:
		c.list(path, target, t)
	case target.Decode(reflect.New(t).Interface()) != nil || t.Kind() == reflect.Int && isFraction(target):
		c.problem(n, path, "want %s, got %s", describeType(t), describe(target))
	}
}

func (c *checker) object(path string, n *yaml.Node, t reflect.Type) {
	known := fields(t)
	withValue := n.Content[:0]
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		switch field, ok := known[key.Value]; {
		case !ok && c.gone[join(path, key.Value)] != "":
			c.problem(key, join(path, key.Value), "%s", c.gone[join(path, key.Value)])
		case !ok:
			c.problem(key, "", "unknown key %s%s", join(path, key.Value),
				wording.Question(key.Value, slices.Sorted(maps.Keys(known))))
		default:
			c.value(join(path, key.Value), value, field)
		}
		if !isNull(value) {
			withValue = append(withValue, key, value)
		}
	}
	n.Content = withValue
}

func (c *checker) table(path string, n *yaml.Node, t reflect.Type) {
	for i := 0; i+1 < len(n.Content); i += 2 {
		c.value(path, n.Content[i], t.Key())
		c.value(join(path, n.Content[i].Value), n.Content[i+1], t.Elem())
	}
}

func (c *checker) list(path string, n *yaml.Node, t reflect.Type) {
	for i, item := range n.Content {
		c.value(path+"["+strconv.Itoa(i)+"]", item, t.Elem())
	}
}

// splitList replaces a node by the list in its text. The text is in `scalar`: the node itself, or the node to which it
// is an alias. An empty text is an empty list.
func splitList(n, scalar *yaml.Node) {
	list := yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: n.Line, Column: n.Column, Style: yaml.FlowStyle}
	for item := range strings.SplitSeq(scalar.Value, ",") {
		if item = strings.TrimSpace(item); item != "" {
			node := &yaml.Node{Kind: yaml.ScalarNode, Value: item, Line: n.Line, Column: n.Column}
			list.Content = append(list.Content, node)
		}
	}
	*n = list
}

// fields returns the types of a struct's fields by key.
func fields(t reflect.Type) map[string]reflect.Type {
	known := map[string]reflect.Type{}
	for f := range t.Fields() {
		name, option, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if option == "inline" {
			maps.Copy(known, fields(f.Type))
		} else {
			known[name] = f.Type
		}
	}
	return known
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func isNull(n *yaml.Node) bool {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n.ShortTag() == "!!null"
}

func isScalar(t reflect.Type) bool { return kindOf(t) == yaml.ScalarNode }

// kindOf returns the YAML kind for a Go type.
func kindOf(t reflect.Type) yaml.Kind {
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		return yaml.MappingNode
	case reflect.Slice:
		return yaml.SequenceNode
	default:
		return yaml.ScalarNode
	}
}

func describeType(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Struct, reflect.Map:
		return "keys and values"
	case reflect.Slice:
		return "a list"
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	case reflect.Int64: // a time.Duration or a type based on it
		return "a duration of more than 0, such as 10s or 1m30s"
	default:
		return "text"
	}
}

// maxQuoted is how many bytes of a value a message quotes.
const maxQuoted = 40

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "keys and values"
	case yaml.SequenceNode:
		return "a list"
	default:
		return strconv.Quote(wording.Shorten(n.Value, maxQuoted))
	}
}

// isFraction reports whether a number is not whole. The decoder would truncate it.
func isFraction(n *yaml.Node) bool {
	if n.ShortTag() != "!!float" {
		return false
	}
	x, err := strconv.ParseFloat(n.Value, 64)
	return err != nil || x != math.Trunc(x)
}
