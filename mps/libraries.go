package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// linkLibraries makes the directory with links to the driver's libraries what it should be. Daemons that run look there
// for their servers' libraries, so it is changed link by link.
func linkLibraries(dir string, libraries map[string]string) error {
	in := filepath.Join(dir, librariesName)
	if len(libraries) == 0 {
		return nil
	}
	if err := os.MkdirAll(in, 0o755); err != nil {
		return fmt.Errorf("make the directory of libraries: %w", err)
	}
	for name, path := range libraries {
		if err := link(in, name, path); err != nil {
			return fmt.Errorf("link the driver's library %s: %w", name, err)
		}
	}
	entries, err := os.ReadDir(in)
	if err != nil {
		return fmt.Errorf("look at the driver's libraries: %w", err)
	}
	for _, e := range entries {
		if libraries[e.Name()] != "" {
			continue
		}
		if err := os.Remove(filepath.Join(in, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove a library of another driver: %w", err)
		}
	}
	return nil
}

// link makes a link, or changes it in one step.
func link(in, name, target string) error {
	if name == "" || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("%q is no name of a file", name)
	}
	at := filepath.Join(in, name)
	if now, err := os.Readlink(at); err == nil && now == target {
		return nil
	}
	fresh := filepath.Join(in, "."+name)
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(target, fresh); err != nil {
		return err
	}
	return os.Rename(fresh, at)
}
