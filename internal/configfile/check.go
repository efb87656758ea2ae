package configfile

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// NotEmpty returns an error if a value is empty.
func NotEmpty(key, value string) error {
	if value == "" {
		return fmt.Errorf("%s is empty", key)
	}
	return nil
}

// Absolute returns an error if the path of a directory is relative. Other programs use the directory by its path on
// the host.
func Absolute(key, dir string) error {
	if !filepath.IsAbs(dir) {
		return fmt.Errorf("%s %q: want an absolute path, the same as on the host", key, dir)
	}
	return nil
}

// OneOf returns an error if the list does not contain the value.
func OneOf[T ~string](at string, value T, list []string) error {
	if !slices.Contains(list, string(value)) {
		return fmt.Errorf("%s: unknown value %q; known are %s", at, value, strings.Join(list, ", "))
	}
	return nil
}
