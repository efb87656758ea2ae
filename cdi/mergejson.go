package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
)

// maxJSONDepth is the maximum nesting of objects and lists, which is encoding/json's limit too.
const maxJSONDepth = 10000

// decodeJSON reads one JSON value and keeps the spelling of numbers. If an object has a key twice, that is an error:
// readers differ in which of the two values they use.
func decodeJSON(data []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	v, err := decodeValue(dec, 0)
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("not JSON: there is more after the value")
	}
	return v, nil
}

func decodeValue(dec *json.Decoder, depth int) (any, error) {
	token, err := dec.Token()
	if err != nil {
		return nil, err
	}
	if depth > maxJSONDepth {
		return nil, errors.New("too many nested objects")
	}
	switch token {
	case json.Delim('{'):
		object := map[string]any{}
		for dec.More() {
			token, err := dec.Token()
			if err != nil {
				return nil, err
			}
			key, _ := token.(string) // the decoder accepts no other key
			if _, ok := object[key]; ok {
				return nil, fmt.Errorf("an object has the key %.100q twice", key)
			}
			if object[key], err = decodeValue(dec, depth+1); err != nil {
				return nil, err
			}
		}
		_, err := dec.Token()
		return object, err
	case json.Delim('['):
		list := []any{}
		for dec.More() {
			v, err := decodeValue(dec, depth+1)
			if err != nil {
				return nil, err
			}
			list = append(list, v)
		}
		_, err := dec.Token()
		return list, err
	}
	return token, nil
}

// encodeJSON writes a value in the format of runtimes.
func encodeJSON(v any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "\t")
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return buf.Bytes(), nil
}

// toJSON converts a value to the form that decodeJSON returns.
func toJSON(v any) (any, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	dec := json.NewDecoder(bytes.NewReader(data)) // no key repeats, and decodeJSON takes 3 times as long
	dec.UseNumber()
	var value any
	if err := dec.Decode(&value); err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return value, nil
}

// mergeJSON makes the changes between `before` and `after` in `original`. Before is what the CDI library reads from
// original, without the keys that the library does not know. These keys remain in the result.
func mergeJSON(original, before, after any) (any, error) {
	switch a := after.(type) {
	case map[string]any:
		o, ok1 := original.(map[string]any)
		b, ok2 := before.(map[string]any)
		if ok1 && ok2 {
			return o, mergeObject(o, b, a)
		}
	case []any:
		o, ok1 := original.([]any)
		b, ok2 := before.([]any)
		if ok1 && ok2 && len(o) == len(b) {
			return mergeList(o, b, a), nil
		}
	}
	return after, nil
}

func mergeObject(original, before, after map[string]any) error {
	for key := range before {
		if _, ok := after[key]; ok {
			continue
		}
		name, err := spelling(original, key)
		if err != nil {
			return err
		}
		delete(original, name)
	}
	for key, a := range after {
		if b, ok := before[key]; ok && reflect.DeepEqual(b, a) {
			continue
		}
		name, err := spelling(original, key)
		if err != nil {
			return err
		}
		if original[name], err = mergeJSON(original[name], before[key], a); err != nil {
			return err
		}
	}
	return nil
}

// spelling returns how an object spells a key. Go's decoder ignores the case of keys, and mixes the values of several
// spellings, and so do runtimes and the CDI library.
func spelling(object map[string]any, key string) (string, error) {
	var spellings []string
	for k := range object {
		if strings.EqualFold(k, key) {
			spellings = append(spellings, k)
		}
	}
	switch len(spellings) {
	case 0:
		return key, nil
	case 1:
		return spellings[0], nil
	}
	slices.Sort(spellings)
	return "", fmt.Errorf("ambiguous: it has the keys %q in one object", spellings)
}

// mergeList returns `after`. Elements that are also in `before` have their form in `original`, each of which is used
// once.
func mergeList(original, before, after []any) []any {
	unused := map[string][]any{}
	for i, b := range before {
		key := keyOf(b)
		unused[key] = append(unused[key], original[i])
	}
	list := make([]any, len(after))
	for i, a := range after {
		list[i] = a
		if key := keyOf(a); len(unused[key]) > 0 {
			list[i], unused[key] = unused[key][0], unused[key][1:]
		}
	}
	return list
}

// keyOf returns equal keys for equal values. The values were decoded from JSON, so encoding them cannot fail. A
// configuration can have tens of thousands of values, so they are looked up by key, not compared one by one.
func keyOf(v any) string {
	data, _ := json.Marshal(v)
	return string(data)
}
