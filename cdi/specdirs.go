package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// SpecDirs is the content of the spec directories, as engines see it.
type SpecDirs struct {
	// Dirs are the directories, from the lowest priority to the highest.
	Dirs []string `json:"dirs"`
	// Files are the spec files, by directory and name.
	Files []SpecFile `json:"files"`
	// Devices has a row for each device of each file, sorted by name, then by priority from the highest.
	Devices []Offer `json:"devices"`

	unread    error // of the first directory that cannot be read
	unreadDir int   // the index of that directory
}

// SpecFile is one file of a spec directory.
type SpecFile struct {
	Path string `json:"path"`
	// Priority is the index of the file's directory.
	Priority int    `json:"priority"`
	Kind     string `json:"kind,omitempty"`
	Version  string `json:"cdiVersion,omitempty"`
	// Devices counts the devices.
	Devices int `json:"devices"`
	// Error is why the file or directory cannot be read. Engines then offer none of its devices.
	Error string `json:"error,omitempty"`
	// Spec is the content, nil with an Error.
	Spec *specs.Spec `json:"-"`
}

// State is what engines do with a device that a file defines.
type State string

// The states.
const (
	Available State = "available"
	// Shadowed is a device that a file of a higher priority defines too: engines offer that one.
	Shadowed State = "shadowed"
	// Conflicting is a device that two files of one priority define: engines offer neither, nor one of another priority.
	Conflicting State = "conflict"
)

// Offer is a device that a file defines.
type Offer struct {
	// Name is the qualified name, such as "nvidia.com/gpu=0".
	Name  string `json:"name"`
	File  string `json:"file"`
	State State  `json:"state"`
	// Other is the file that shadows the device or conflicts with it.
	Other string `json:"other,omitempty"`

	priority int
}

// dirIndex is the index of a directory in Dirs, or -1. It may have another name there: on most hosts /run/cdi is
// /var/run/cdi.
func (c *SpecDirs) dirIndex(dir string) int {
	info, err := os.Stat(dir)
	return slices.IndexFunc(c.Dirs, func(known string) bool {
		if known == dir {
			return true
		}
		other, otherErr := os.Stat(known)
		return err == nil && otherErr == nil && os.SameFile(info, other)
	})
}

// Load reads the spec files of the directories, which are in the order of their priorities, the lowest first. A
// directory that does not exist is empty; any other failure is the Error of a file. Like the CDI library it stops at a
// directory that cannot be read.
func Load(dirs ...string) *SpecDirs {
	c := &SpecDirs{}
	for _, dir := range dirs {
		if dir = filepath.Clean(dir); c.dirIndex(dir) < 0 {
			c.Dirs = append(c.Dirs, dir)
			if c.unread == nil {
				c.loadDir(dir, len(c.Dirs)-1)
			}
		}
	}
	slices.SortStableFunc(c.Devices, func(a, b Offer) int {
		return cmp.Or(compareNames(a.Name, b.Name), b.priority-a.priority, strings.Compare(a.File, b.File))
	})
	c.resolve()
	return c
}

func (c *SpecDirs) loadDir(dir string, priority int) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.Files = append(c.Files, SpecFile{Path: dir, Priority: priority, Error: err.Error()})
		c.unread, c.unreadDir = err, priority
		return
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if _, err := FormatOf(path); err == nil && !e.IsDir() {
			c.loadFile(path, priority)
		}
	}
}

func (c *SpecDirs) loadFile(path string, priority int) {
	f := SpecFile{Path: path, Priority: priority}
	spec, err := ReadFile(path)
	if err != nil {
		f.Error = err.Error()
	} else {
		f.Spec, f.Kind, f.Version, f.Devices = spec, spec.Kind, spec.Version, len(spec.Devices)
		for i := range spec.Devices {
			name := qualifiedName(spec.Kind, spec.Devices[i].Name)
			c.Devices = append(c.Devices, Offer{Name: name, File: path, State: Available, priority: priority})
		}
	}
	c.Files = append(c.Files, f)
}

// resolve sets the states. The devices are sorted, so that those of one name are neighbours, the highest priority
// first.
func (c *SpecDirs) resolve() {
	for i := 0; i < len(c.Devices); {
		n := i + 1
		for n < len(c.Devices) && c.Devices[n].Name == c.Devices[i].Name {
			n++
		}
		resolveName(c.Devices[i:n])
		i = n
	}
}

// resolveName sets the states of the offers of one name as the CDI library does: if two have one priority, none of that
// name can be used, whatever its priority.
func resolveName(offers []Offer) {
	for i := 1; i < len(offers); i++ {
		offers[i].State, offers[i].Other = Shadowed, offers[0].File
	}
	for i := 1; i < len(offers); i++ {
		if a, b := &offers[i-1], &offers[i]; a.priority == b.priority {
			for j := range offers {
				offers[j].State = Conflicting
				offers[j].Other = cmp.Or(offers[j].Other, b.File)
			}
			a.Other, b.Other = b.File, a.File
		}
	}
}

// Names are the qualified names that can be injected.
func (c *SpecDirs) Names() []string {
	var names []string
	for _, o := range c.Devices {
		if o.State == Available {
			names = append(names, o.Name)
		}
	}
	return names
}

// offer is the device of the highest priority with that name, or nil.
func (c *SpecDirs) offer(name string) *Offer {
	i := slices.IndexFunc(c.Devices, func(o Offer) bool { return o.Name == name })
	if i < 0 {
		return nil
	}
	return &c.Devices[i]
}

// FilesOf are the files that offer the devices, each once. Devices that do not exist have none.
func (c *SpecDirs) FilesOf(names []string) []*SpecFile {
	var files []*SpecFile
	for _, name := range names {
		if c.offer(name) == nil {
			continue
		}
		if f := c.file(name); !slices.Contains(files, f) {
			files = append(files, f)
		}
	}
	return files
}

// file is the file that offers a device, which must be offered.
func (c *SpecDirs) file(name string) *SpecFile {
	return c.FileAt(c.offer(name).File)
}

// locate is a path with its directory as Dirs names it, and the directory's index in Dirs, or -1.
func (c *SpecDirs) locate(path string) (string, int) {
	priority := -1
	if path != "" {
		priority = c.dirIndex(filepath.Dir(path))
	}
	if priority < 0 {
		return path, priority
	}
	return filepath.Join(c.Dirs[priority], filepath.Base(path)), priority
}

// FileAt is the file at path, or nil.
func (c *SpecDirs) FileAt(path string) *SpecFile {
	path, _ = c.locate(path)
	at := slices.IndexFunc(c.Files, func(f SpecFile) bool { return f.Path == path })
	if at < 0 {
		return nil
	}
	return &c.Files[at]
}

// OfferedFrom are the qualified names that engines take from the file at path.
func (c *SpecDirs) OfferedFrom(path string) map[string]bool {
	path, _ = c.locate(path)
	names := map[string]bool{}
	for _, o := range c.Devices {
		if o.File == path && o.State == Available {
			names[o.Name] = true
		}
	}
	return names
}

// Unread returns an error if engines do not read the file at path, because they stop at a directory of a lower priority
// that cannot be read.
func (c *SpecDirs) Unread(path string) error {
	if _, priority := c.locate(path); c.unread == nil || priority < c.unreadDir {
		return nil
	}
	return fmt.Errorf("engines do not read %s, since they stop at the CDI directory %s: make it a directory "+
		"or remove it: %w", path, c.Dirs[c.unreadDir], c.unread)
}

func qualifiedName(kind, device string) string {
	vendor, class := parser.ParseQualifier(kind)
	return parser.QualifiedName(vendor, class, device)
}

// compareNames compares names, with runs of digits as numbers: 2 is before 10.
func compareNames(a, b string) int {
	for i := 0; i < len(a) && i < len(b); i++ {
		x, y := digits(a[i:]), digits(b[i:])
		if x != y && x != "" && y != "" {
			return cmp.Or(cmp.Compare(len(x), len(y)), strings.Compare(x, y))
		}
		if a[i] != b[i] {
			return int(a[i]) - int(b[i])
		}
	}
	return len(a) - len(b)
}

// digits is the number that s begins with, without leading zeros, or empty.
func digits(s string) string {
	number := s[:len(s)-len(strings.TrimLeft(s, "0123456789"))]
	if number == "" {
		return ""
	}
	return cmp.Or(strings.TrimLeft(number, "0"), "0")
}
