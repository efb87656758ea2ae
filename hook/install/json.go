package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// member is a member of a JSON object: document[start:end] is its text, `"name": value`.
type member struct {
	name              string
	start, value, end int
}

// object is a JSON object in a document. open is the offset after its opening brace.
type object struct {
	document []byte
	open     int
	members  []member
}

// maxMembers is how many members an object may have: each is compared with all others.
const maxMembers = 1_000

// parseObject parses a document that is one object.
func parseObject(document []byte) (*object, error) {
	d := json.NewDecoder(bytes.NewReader(document))
	if token, err := d.Token(); err != nil || token != json.Delim('{') {
		return nil, errors.Join(errors.New("it is not a JSON object"), err)
	}
	o := &object{document: document, open: int(d.InputOffset())}
	for d.More() {
		before := int(d.InputOffset())
		token, err := d.Token()
		if err != nil {
			return nil, err
		}
		name, _ := token.(string) // anything else is a syntax error
		m := member{name: name, start: before + bytes.IndexByte(document[before:], '"')}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, err
		}
		m.end = int(d.InputOffset())
		m.value = m.end - len(value)
		if len(o.members) == maxMembers {
			return nil, fmt.Errorf("it has an object with more than %d members", maxMembers)
		}
		if o.find(name) != nil {
			return nil, fmt.Errorf("it has %q twice", name)
		}
		o.members = append(o.members, m)
	}
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("it has more than one JSON value")
	}
	return o, nil
}

func (o *object) find(name string) *member {
	i := slices.IndexFunc(o.members, func(m member) bool { return m.name == name })
	if i < 0 {
		return nil
	}
	return &o.members[i]
}

// insert returns the document with a new first member. The method remove undoes this byte for byte.
func (o *object) insert(name string, value []byte) []byte {
	text := fmt.Sprintf("%q: %s", name, value)
	space := o.document[o.open:]
	space = space[:len(space)-len(bytes.TrimLeft(space, " \t\r\n"))]
	if len(o.members) > 0 {
		text = string(space) + text + ","
	} else if bytes.ContainsRune(space, '\n') {
		text = "\n    " + text
	}
	return slices.Insert(slices.Clone(o.document), o.open, []byte(text)...)
}

// remove returns the document without a member.
func (o *object) remove(name string) []byte {
	i := slices.IndexFunc(o.members, func(m member) bool { return m.name == name })
	if i < 0 {
		return o.document
	}
	from, to := o.open, o.members[i].end
	if i > 0 {
		from = o.members[i-1].end
	}
	if i+1 < len(o.members) { // remove its own comma and keep the one before
		from += strings.IndexByte(string(o.document[from:])+",", ',') + 1
		if i == 0 {
			from = o.open
		}
		to += bytes.IndexByte(o.document[to:], ',') + 1
	}
	return slices.Delete(slices.Clone(o.document), from, to)
}

// setKey sets a value in a JSON document, at a path of names. It also returns the paths of what it added: the objects
// on the way that were missing, then the value.
func setKey(document []byte, path []string, value string) ([]byte, []string, error) {
	o, err := parseObject(document)
	if err != nil {
		return nil, nil, err
	}
	m := o.find(path[0])
	switch {
	case m == nil && len(path) == 1:
		return o.insert(path[0], []byte(value)), path, nil
	case len(path) == 1:
		return slices.Replace(slices.Clone(document), m.value, m.end, []byte(value)...), nil, nil
	case m == nil:
		inner, added, err := setKey([]byte("{}"), path[1:], value)
		return o.insert(path[0], inner), append([]string{path[0]}, below(path[0], added)...), err
	}
	inner, added, err := setKey(document[m.value:m.end], path[1:], value)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path[0], err)
	}
	return slices.Replace(slices.Clone(document), m.value, m.end, inner...), below(path[0], added), nil
}

func below(name string, paths []string) []string {
	var all []string
	for _, path := range paths {
		all = append(all, name+"."+path)
	}
	return all
}

// removeKey returns a document without the value at a path of names. A missing value is not an error. With ifEmpty,
// the value is removed only if it is an empty object.
func removeKey(document []byte, path []string, ifEmpty bool) ([]byte, error) {
	o, err := parseObject(document)
	if err != nil {
		return nil, err
	}
	m := o.find(path[0])
	if m == nil {
		return document, nil
	}
	value := document[m.value:m.end]
	if len(path) == 1 {
		if ifEmpty && !isEmptyObject(value) {
			return document, nil
		}
		return o.remove(path[0]), nil
	}
	inner, err := removeKey(value, path[1:], ifEmpty)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path[0], err)
	}
	return slices.Replace(slices.Clone(document), m.value, m.end, inner...), nil
}

func isEmptyObject(document []byte) bool {
	o, err := parseObject(document)
	return err == nil && len(o.members) == 0
}
