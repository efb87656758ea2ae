package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
)

// maxJSONDepth is how deep objects and lists can be in each other; encoding/json has the same limit.
const maxJSONDepth = 10000

// decodeJSON reads one JSON value, numbers as they are written. A key that an object has twice is an error: what counts
// then depends on the reader.
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
		return nil, errors.New("not JSON: something follows the value")
	}
	return v, nil
}

func decodeValue(dec *json.Decoder, depth int) (any, error) {
	token, err := dec.Token()
	if err != nil {
		return nil, err
	}
	if depth > maxJSONDepth {
		return nil, errors.New("too many objects in each other")
	}
	switch token {
	case json.Delim('{'):
		return decodeObject(dec, depth)
	case json.Delim('['):
		return decodeList(dec, depth)
	}
	return token, nil
}

func decodeObject(dec *json.Decoder, depth int) (any, error) {
	object := map[string]any{}
	for dec.More() {
		token, err := dec.Token()
		if err != nil {
			return nil, err
		}
		key, _ := token.(string) // the decoder accepts no other
		if _, ok := object[key]; ok {
			return nil, fmt.Errorf("an object has the key %.100q twice", key)
		}
		if object[key], err = decodeValue(dec, depth+1); err != nil {
			return nil, err
		}
	}
	_, err := dec.Token()
	return object, err
}

func decodeList(dec *json.Decoder, depth int) (any, error) {
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

// encodeJSON writes a value as runtimes do.
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

// toJSON is a value as decodeJSON would read it.
func toJSON(v any) (any, error) {
	data, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return decodeJSON(data)
}

func equalJSON(a, b any) bool { return reflect.DeepEqual(a, b) }
