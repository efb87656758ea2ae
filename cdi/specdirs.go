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

// SpecDirs is the content of the spec directories, and what engines do with it.
type SpecDirs struct {
	// Dirs are the directories, from the lowest priority to the highest.
	Dirs []string `json:"dirs"`
	// Files are the spec files, by directory and name.
	Files []SpecFile `json:"files"`
	// Devices has an entry for each device of each file, sorted by name, and then by priority, the highest first.
	Devices []Definition `json:"devices"`

	unread    error // of the first unreadable directory
	unreadDir int   // the index of that directory
}

// SpecFile is one file of a spec directory.
type SpecFile struct {
	Path string `json:"path"`
	// Priority is the index of the file's directory.
	Priority int    `json:"priority"`
	Kind     string `json:"kind,omitempty"`
	Version  string `json:"cdiVersion,omitempty"`
	// Devices is the number of devices in the file.
	Devices int `json:"devices"`
	// Error says why the file or directory cannot be read. Engines then offer none of its devices.
	Error string `json:"error,omitempty"`
	// Spec is the content, or nil if there is an Error.
	Spec *specs.Spec `json:"-"`
}

// State says what engines do with a device that a file defines.
type State string

// The states of a device in a file.
const (
	Available State = "available"
	// Shadowed means that a file of a higher priority also defines the device: engines offer the device of that file.
	Shadowed State = "shadowed"
	// Conflicting means that two files of one priority define the device: engines offer neither, and no device of that
	// name from any other file.
	Conflicting State = "conflict"
)

// Definition is a device that a file defines, with what engines do with it.
type Definition struct {
	// Name is the qualified name, such as "nvidia.com/gpu=0".
	Name  string `json:"name"`
	File  string `json:"file"`
	State State  `json:"state"`
	// Other is the file that shadows the device or conflicts with it.
	Other string `json:"other,omitempty"`

	priority int
}

// dirIndex returns the index of a directory in Dirs, or -1. The path there may be another one of the same directory:
// on most hosts /run/cdi is /var/run/cdi.
func (d *SpecDirs) dirIndex(dir string) int {
	info, err := os.Stat(dir)
	return slices.IndexFunc(d.Dirs, func(known string) bool {
		if known == dir {
			return true
		}
		other, otherErr := os.Stat(known)
		return err == nil && otherErr == nil && os.SameFile(info, other)
	})
}

// Load reads the spec files of the directories, which are ordered by priority, the lowest first. A directory that does
// not exist counts as empty; other failures are in the Error of a SpecFile. Like the CDI library, Load stops at a
// directory that cannot be read.
func Load(dirs ...string) *SpecDirs {
	d := &SpecDirs{}
	for _, dir := range dirs {
		if dir = filepath.Clean(dir); d.dirIndex(dir) < 0 {
			d.Dirs = append(d.Dirs, dir)
			if d.unread == nil {
				d.loadDir(dir, len(d.Dirs)-1)
			}
		}
	}
	slices.SortStableFunc(d.Devices, func(a, b Definition) int {
		return cmp.Or(compareNames(a.Name, b.Name), b.priority-a.priority, strings.Compare(a.File, b.File))
	})
	d.resolve()
	return d
}

func (d *SpecDirs) loadDir(dir string, priority int) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		d.Files = append(d.Files, SpecFile{Path: dir, Priority: priority, Error: err.Error()})
		d.unread, d.unreadDir = err, priority
		return
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if _, err := FormatOf(path); err == nil && !e.IsDir() {
			d.loadFile(path, priority)
		}
	}
}

func (d *SpecDirs) loadFile(path string, priority int) {
	f := SpecFile{Path: path, Priority: priority}
	spec, err := ReadFile(path)
	if err != nil {
		f.Error = err.Error()
	} else {
		f.Spec, f.Kind, f.Version, f.Devices = spec, spec.Kind, spec.Version, len(spec.Devices)
		for i := range spec.Devices {
			name := qualifiedName(spec.Kind, spec.Devices[i].Name)
			d.Devices = append(d.Devices, Definition{Name: name, File: path, State: Available, priority: priority})
		}
	}
	d.Files = append(d.Files, f)
}

// resolve sets the states of all devices. The devices must be sorted: those of one name together, the highest priority
// first.
func (d *SpecDirs) resolve() {
	for i := 0; i < len(d.Devices); {
		n := i + 1
		for n < len(d.Devices) && d.Devices[n].Name == d.Devices[i].Name {
			n++
		}
		resolveName(d.Devices[i:n])
		i = n
	}
}

// resolveName sets the states of the definitions of one name, like the CDI library does: if two have the same
// priority, no definition of that name can be used, whatever its priority.
func resolveName(definitions []Definition) {
	for i := 1; i < len(definitions); i++ {
		definitions[i].State, definitions[i].Other = Shadowed, definitions[0].File
	}
	for i := 1; i < len(definitions); i++ {
		if a, b := &definitions[i-1], &definitions[i]; a.priority == b.priority {
			for j := range definitions {
				definitions[j].State = Conflicting
				definitions[j].Other = cmp.Or(definitions[j].Other, b.File)
			}
			a.Other, b.Other = b.File, a.File
		}
	}
}

// Names returns the qualified names of the devices that can be injected.
func (d *SpecDirs) Names() []string {
	var names []string
	for _, o := range d.Devices {
		if o.State == Available {
			names = append(names, o.Name)
		}
	}
	return names
}

// definition returns the one of a name's definitions that has the highest priority, or nil.
func (d *SpecDirs) definition(name string) *Definition {
	i := slices.IndexFunc(d.Devices, func(o Definition) bool { return o.Name == name })
	if i < 0 {
		return nil
	}
	return &d.Devices[i]
}

// Dirs returns the directories of CDI specs below a root, from the lowest priority to the highest: the administrator's
// directory, and dir. If dir is the administrator's, the other one is /var/run/cdi, which engines also read, with the
// higher priority.
func Dirs(root, dir string) []string {
	low, high := filepath.Join(root, "etc/cdi"), filepath.Join(root, "var/run/cdi")
	if filepath.Clean(dir) == low {
		return []string{low, high}
	}
	return []string{low, dir}
}

// FilesOf returns the files that define the devices, each once. If several files define a device, the one with the
// highest priority counts. A device that does not exist has no file.
func (d *SpecDirs) FilesOf(names []string) []*SpecFile {
	var files []*SpecFile
	for _, name := range names {
		if d.definition(name) == nil {
			continue
		}
		if f := d.file(name); !slices.Contains(files, f) {
			files = append(files, f)
		}
	}
	return files
}

// file returns the file that defines a device. The device must be defined.
func (d *SpecDirs) file(name string) *SpecFile {
	return d.FileAt(d.definition(name).File)
}

// locate returns a path, with its directory written as in Dirs, and the index of that directory in Dirs, or -1.
func (d *SpecDirs) locate(path string) (string, int) {
	priority := -1
	if path != "" {
		priority = d.dirIndex(filepath.Dir(path))
	}
	if priority < 0 {
		return path, priority
	}
	return filepath.Join(d.Dirs[priority], filepath.Base(path)), priority
}

// FileAt returns the file at path, or nil.
func (d *SpecDirs) FileAt(path string) *SpecFile {
	path, _ = d.locate(path)
	at := slices.IndexFunc(d.Files, func(f SpecFile) bool { return f.Path == path })
	if at < 0 {
		return nil
	}
	return &d.Files[at]
}

// OfferedFrom returns the qualified names that engines take from the file at path.
func (d *SpecDirs) OfferedFrom(path string) map[string]bool {
	path, _ = d.locate(path)
	names := map[string]bool{}
	for _, o := range d.Devices {
		if o.File == path && o.State == Available {
			names[o.Name] = true
		}
	}
	return names
}

// Unread returns an error if engines do not read the file at path, since they stop at a directory of a lower priority
// that cannot be read.
func (d *SpecDirs) Unread(path string) error {
	if _, priority := d.locate(path); d.unread == nil || priority < d.unreadDir {
		return nil
	}
	return fmt.Errorf("engines do not read %s, since they stop at the CDI directory %s: make it a directory "+
		"or remove it: %w", path, d.Dirs[d.unreadDir], d.unread)
}

func qualifiedName(kind, device string) string {
	vendor, class := parser.ParseQualifier(kind)
	return parser.QualifiedName(vendor, class, device)
}

// compareNames compares names, and runs of digits in them as numbers: 2 comes before 10.
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

// digits returns the number with which s begins, without leading zeros, or "".
func digits(s string) string {
	number := s[:len(s)-len(strings.TrimLeft(s, "0123456789"))]
	if number == "" {
		return ""
	}
	return cmp.Or(strings.TrimLeft(number, "0"), "0")
}
