package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// programInfo is what a program says of its build.
type programInfo struct {
	name string
	info *debug.BuildInfo
}

func readPrograms(paths []string) ([]programInfo, error) {
	var list []programInfo
	for _, path := range paths {
		info, err := buildinfo.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("read what %s consists of: %w", path, err)
		}
		list = append(list, programInfo{filepath.Base(path), info})
	}
	return list, nil
}

// modules returns the versions of the modules that programs consist of, by path.
func modules(programs []programInfo) map[string]*debug.Module {
	all := map[string]*debug.Module{}
	for _, p := range programs {
		for _, m := range p.info.Deps {
			if m.Replace != nil {
				m = m.Replace
			}
			all[m.Path] = m
		}
	}
	return all
}

// writeSBOM writes a CycloneDX list: the programs, the modules of each, and the Go standard library.
func writeSBOM(path, version string, paths []string) error {
	programs, err := readPrograms(paths)
	if err != nil {
		return err
	}
	date, err := buildDate()
	if err != nil {
		return err
	}
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{
		Timestamp: date.Format("2006-01-02T15:04:05Z"),
		Component: &cdx.Component{
			BOMRef: "release", Type: cdx.ComponentTypeApplication, Name: name, Version: version,
			Licenses: &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}},
		},
	}
	components, dependencies := []cdx.Component{}, []cdx.Dependency{}
	all := modules(programs)
	for _, p := range slices.Sorted(maps.Keys(all)) {
		components = append(components, component(all[p]))
	}
	golang := &debug.Module{Path: "stdlib", Version: strings.TrimPrefix(programs[0].info.GoVersion, "go")}
	components = append(components, component(golang))
	var names []string
	for _, p := range programs {
		components = append(components, cdx.Component{
			BOMRef: p.name, Type: cdx.ComponentTypeApplication, Name: p.name, Version: version,
		})
		uses := []string{purl(golang)}
		for _, m := range modules([]programInfo{p}) {
			uses = append(uses, purl(m))
		}
		slices.Sort(uses)
		dependencies = append(dependencies, cdx.Dependency{Ref: p.name, Dependencies: &uses})
		names = append(names, p.name)
	}
	dependencies = append(dependencies, cdx.Dependency{Ref: "release", Dependencies: &names})
	bom.Components, bom.Dependencies = &components, &dependencies
	var text bytes.Buffer
	if err := cdx.NewBOMEncoder(&text, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom); err != nil {
		return fmt.Errorf("write the list of modules: %w", err)
	}
	return os.WriteFile(path, text.Bytes(), 0o644)
}

// purl returns the package URL of a module.
func purl(m *debug.Module) string { return "pkg:golang/" + m.Path + "@" + m.Version }

func component(m *debug.Module) cdx.Component {
	return cdx.Component{
		BOMRef: purl(m), Type: cdx.ComponentTypeLibrary, Name: m.Path, Version: m.Version, PackageURL: purl(m),
	}
}

// writeLicences writes the licences of the modules and of Go.
func writeLicences(path string, paths []string) error {
	programs, err := readPrograms(paths)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	fmt.Fprintf(&text, "The programs %s consist of the modules below besides their own code.\n", namesOf(programs))
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return fmt.Errorf("find the licence of Go: %w", err)
	}
	if err := addLicences(&text, "Go "+runtime.Version(), string(bytes.TrimSpace(root))); err != nil {
		return err
	}
	all := modules(programs)
	for _, p := range slices.Sorted(maps.Keys(all)) {
		m := all[p]
		dir, err := moduleDir(m)
		if err != nil {
			return err
		}
		if err := addLicences(&text, m.Path+" "+m.Version, dir); err != nil {
			return err
		}
	}
	return os.WriteFile(path, text.Bytes(), 0o644)
}

func namesOf(programs []programInfo) string {
	var names []string
	for _, p := range programs {
		names = append(names, p.name)
	}
	return strings.Join(names, ", ")
}

// moduleDir returns the directory of a module in the module cache.
func moduleDir(m *debug.Module) (string, error) {
	out, err := exec.Command("go", "mod", "download", "-json", m.Path+"@"+m.Version).Output()
	if err != nil {
		return "", fmt.Errorf("find the module %s: %w: %s", m.Path, err, out)
	}
	var found struct{ Dir string }
	if err := json.Unmarshal(out, &found); err != nil {
		return "", fmt.Errorf("find the module %s: %w", m.Path, err)
	}
	return found.Dir, nil
}

// licenceNames are the beginnings of the names of files that a copy must have with it.
var licenceNames = []string{"LICENSE", "LICENCE", "COPYING", "NOTICE", "PATENTS"}

func addLicences(text *bytes.Buffer, title, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("find the licence of %s: %w", title, err)
	}
	found := false
	for _, e := range entries {
		is := func(prefix string) bool { return strings.HasPrefix(strings.ToUpper(e.Name()), prefix) }
		if e.IsDir() || !slices.ContainsFunc(licenceNames, is) {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return fmt.Errorf("find the licence of %s: %w", title, err)
		}
		line := strings.Repeat("=", 80)
		fmt.Fprintf(text, "\n%s\n%s: %s\n%s\n\n%s\n", line, title, e.Name(), line, bytes.TrimSpace(data))
		found = true
	}
	if !found {
		return fmt.Errorf("there is no licence of %s in %s", title, dir)
	}
	return nil
}
