package inject

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
)

const (
	// maxDevices is how many devices a container may request. A host has at most 16 GPUs with 7 MIG devices each.
	maxDevices = 1024
	// maxName bounds the name of a device, in bytes. The name of a MIG device by its UUID has 55.
	maxName = 255
)

// requested returns the names of the devices that the annotations in config.json request, each once, in the order of
// the annotations' keys. The value of such an annotation is a list of qualified names, separated by commas.
func requested(config []byte) ([]string, error) {
	var c struct {
		Annotations map[string]json.RawMessage `json:"annotations"`
	}
	if err := json.Unmarshal(config, &c); err != nil {
		if _, ok := errors.AsType[*json.UnmarshalTypeError](err); ok { // the error's text has names of Go types
			err = errors.New("the configuration or its annotations are not an object")
		}
		return nil, fmt.Errorf("read the annotations: %w", err)
	}
	var names []string
	known := map[string]bool{}
	for _, key := range slices.Sorted(maps.Keys(c.Annotations)) {
		if !strings.HasPrefix(key, cdilib.AnnotationPrefix) {
			continue
		}
		var value string
		if err := json.Unmarshal(c.Annotations[key], &value); err != nil {
			return nil, fmt.Errorf("annotation %.100q is not a text", key)
		}
		for name := range strings.SplitSeq(value, ",") {
			if err := checkName(name); err != nil {
				return nil, fmt.Errorf("annotation %.100q: device %.100q: %w", key, name, err)
			}
			if !known[name] {
				known[name] = true
				names = append(names, name)
			}
			if len(names) > maxDevices {
				return nil, fmt.Errorf(
					"annotation %.100q: the container requests more than %d devices",
					key,
					maxDevices,
				)
			}
		}
	}
	return names, nil
}

func checkName(name string) error {
	if len(name) > maxName {
		return fmt.Errorf("the name has %d bytes, the limit is %d", len(name), maxName)
	}
	if _, _, _, err := parser.ParseQualifiedName(name); err != nil {
		return errors.New("want VENDOR/CLASS=NAME, and commas without spaces between several")
	}
	return nil
}
