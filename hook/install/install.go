// Package install makes engines use prestart-hook and gpu-cdi-runtime: it plans and writes the files of an engine's
// configuration.
//
// A plan is a pure function of the files that [Read] found. [Plan.Apply] writes all files or none. Where an engine
// reads drop-ins, we write our own; otherwise our entries are added to the engine's file, and the rest of it stays the
// same byte for byte. A record contains the earlier state, so that [Host.Uninstall] can restore it. No service is
// restarted.
package install

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// header is the first line of our own files.
const header = "# Written by gpu-cdi-plugin hook install; gpu-cdi-plugin hook uninstall removes it.\n"

// wrapperName is the name of the link to prestart-hook. When run under that name, the hook acts as gpu-cdi-runtime.
// Each engine has a link of its own, gpu-cdi-runtime-ENGINE, by which it runs the engine's default runtime.
const wrapperName = "gpu-cdi-runtime"

// isWrapper reports whether a path is that of such a link, wherever it is.
func isWrapper(name string) bool {
	base := path.Base(name)
	return base == wrapperName || strings.HasPrefix(base, wrapperName+"-")
}

// hookName is the usual name of the hook.
const hookName = "prestart-hook"

// recordFile is the path of the record of what Install did.
const recordFile = "/var/lib/gpu-cdi-plugin/hook-install.json"

// ErrUnknown means that a name is not among Engines.
var ErrUnknown = errors.New("unknown engine")

// ForeignError means that another program wrote a file that has the name of one of our files.
type ForeignError struct{ Path string }

func (e *ForeignError) Error() string {
	return e.Path + " was written by another program, and is not replaced"
}

// SettingError means that a setting in an engine's file contradicts the installation, or the removal.
type SettingError struct{ Path, Problem string }

func (e *SettingError) Error() string { return e.Path + " " + e.Problem }

// isDefault is the problem of a file that makes our runtime the default one.
func isDefault(key string) string {
	return "makes " + runtimeName + " the default runtime (" + key + "): without it the engine starts no containers; " +
		"name another one there first"
}

// File is a regular file, or a symbolic link if Link is not empty. A link's Data is that of its target.
type File struct {
	Data []byte
	Link string
}

func (f *File) equal(other *File) bool {
	if f == nil || other == nil {
		return f == other
	}
	return f.Link == other.Link && (f.Link != "" || bytes.Equal(f.Data, other.Data))
}

// Change is a file before and after the change; nil means that it does not exist.
type Change struct {
	Path          string
	Before, After *File
}

// Plan has the files to write.
type Plan struct {
	// Wanted are the files of the engines, including unchanged ones, in the order of their paths.
	Wanted []Change
	// Changes are the files of Wanted that differ, and the record, in the order in which Apply writes them.
	Changes []Change
	// Restart has the services that must be restarted, and Reload those for which a reload is enough.
	Restart, Reload []string
	// Kept are the paths of our files that another program has changed since they were written. They are left as they
	// are.
	Kept []string
	// Warnings are sentences about what an administrator may not expect.
	Warnings []string

	host     *Host
	runtimes []string
	mkdirs   []string // created with the changes
	rmdirs   []string // removed after the changes if they are empty
}

// Dirs returns the directories that Apply writes to.
func (p *Plan) Dirs() ([]string, error) {
	var dirs []string
	for _, c := range p.Changes {
		at, err := p.host.real(c.Path)
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, path.Dir(at))
	}
	slices.Sort(dirs)
	return slices.Compact(dirs), nil
}

// Runtimes returns the runtimes that gpu-cdi-runtime will run because an engine names their paths.
func (p *Plan) Runtimes() ([]string, error) {
	var paths []string
	for _, name := range p.runtimes {
		at, err := Resolve(p.host.root, name)
		if err != nil {
			return nil, err
		}
		paths = append(paths, at)
	}
	return paths, nil
}

// record says what Install did.
type record struct {
	// Installed are the names of engines.
	Installed []string `json:"installed"`
	// Made are the files, links and directories that did not exist before.
	Made []string `json:"made,omitempty"`
	// Daemon are the keys that Install added to daemon.json.
	Daemon []string `json:"daemonJSON,omitempty"`
	// Digests are the digests of our own files when written, by path. If a file has another digest, another program
	// has changed it.
	Digests map[string]string `json:"digests,omitempty"`
	// Parsed are the digests of what these files say, without their comments and layout, if they could be parsed.
	Parsed map[string]string `json:"parsed,omitempty"`
}

func (r *record) made(path string) bool { return slices.Contains(r.Made, path) }

// Installed returns the names of the engines that are installed.
func (h *Host) Installed() ([]string, error) {
	r, err := h.record()
	return r.Installed, err
}

func (h *Host) record() (r record, err error) {
	f := h.files[recordFile]
	if f == nil {
		return r, nil
	}
	if err := json.Unmarshal(f.Data, &r); err != nil {
		return r, fmt.Errorf("read the record %s: %w", recordFile, err)
	}
	return r, nil
}

// Install plans the files of engines. The hook is an absolute path.
func (h *Host) Install(engines []string, hook string) (*Plan, error) {
	if strings.ContainsFunc(hook, func(r rune) bool { return r < ' ' || r > '~' || r == '"' || r == '\\' }) {
		return nil, fmt.Errorf("the path of the hook %q has characters that configuration files cannot have", hook)
	}
	found, err := find(engines)
	if err != nil {
		return nil, err
	}
	e, err := h.edit(hook)
	if err != nil {
		return nil, err
	}
	for _, engine := range found {
		e.engine, e.service = engine.Name, engine.Service
		if err := engine.add(e); err != nil {
			return nil, fmt.Errorf("install the hook for %s: %w", engine.Name, err)
		}
		if !slices.Contains(e.record.Installed, engine.Name) {
			e.record.Installed = append(e.record.Installed, engine.Name)
		}
	}
	slices.Sort(e.record.Installed)
	return e.plan(), nil
}

// Uninstall plans the removal of what Install did for engines.
func (h *Host) Uninstall(engines []string) (*Plan, error) {
	found, err := find(engines)
	if err != nil {
		return nil, err
	}
	e, err := h.edit("")
	if err != nil {
		return nil, err
	}
	for _, engine := range found {
		e.engine, e.service = engine.Name, engine.Service
		if err := engine.remove(e); err != nil {
			return nil, fmt.Errorf("uninstall the hook for %s: %w", engine.Name, err)
		}
		e.service = Service{}
		if err := e.remove(runtimeFile(engine.Name)); err != nil {
			return nil, err
		}
	}
	isFound := func(name string) bool { return slices.Contains(engines, name) }
	e.record.Installed = slices.DeleteFunc(e.record.Installed, isFound)
	for _, name := range slices.Sorted(maps.Keys(e.record.Digests)) {
		if !isWrapper(name) || e.needsWrapper(name) {
			continue
		}
		if err := e.remove(name); err != nil {
			return nil, err
		}
	}
	p := e.plan()
	for _, name := range e.record.Made {
		if h.isDir(name) {
			p.rmdirs = append(p.rmdirs, name)
		}
	}
	return p, nil
}

// needsWrapper reports whether an installed engine uses a link. In version 0.1.0 all engines used the same one.
func (e *edit) needsWrapper(name string) bool {
	return slices.ContainsFunc(e.record.Installed, func(engine string) bool {
		of, ofOne := strings.CutPrefix(path.Base(name), wrapperName+"-")
		return engine != "live" && (!ofOne || of == engine)
	})
}

// edit is a plan in progress: the files as they will be.
type edit struct {
	host   *Host
	hook   string
	record record
	files  map[string]*File
	// considered has the files that the named engines read, also those that do not change, each with the service that
	// reads it.
	considered map[string]Service
	service    Service // the service of the current engine
	engine     string  // the current engine
	kept       []string
	warnings   []string
	runtimes   []string
}

func (h *Host) edit(hook string) (*edit, error) {
	r, err := h.record()
	if err != nil {
		return nil, err
	}
	if r.Digests == nil {
		r.Digests = map[string]string{}
	}
	if r.Parsed == nil {
		r.Parsed = map[string]string{}
	}
	return &edit{host: h, hook: hook, files: maps.Clone(h.files), considered: map[string]Service{}, record: r}, nil
}

// matching returns the paths of the files that match a pattern, sorted.
func (e *edit) matching(pattern string) []string {
	var paths []string
	for name, f := range e.files {
		if ok, err := path.Match(pattern, name); f != nil && err == nil && ok {
			paths = append(paths, name)
		}
	}
	slices.Sort(paths)
	return paths
}

func (e *edit) set(path string, f *File, service Service) {
	e.considered[path] = service
	e.files[path] = f
}

// put sets the content of a file; nil removes the file.
func (e *edit) put(path string, data []byte) {
	if data == nil {
		e.set(path, nil, e.service)
		return
	}
	e.set(path, &File{Data: data}, e.service)
}

// shared returns a file that other programs or users may also change, or nil if it does not exist.
func (e *edit) shared(path string) ([]byte, error) {
	f := e.files[path]
	switch {
	case f == nil:
		return nil, nil
	case f.Link != "":
		return nil, &SettingError{path, "is a symbolic link, which would be replaced"}
	}
	return f.Data, nil
}

// own writes one of our files. If the file has changed since we wrote it, it is kept; if another program wrote it,
// that is an error.
func (e *edit) own(path, content string) error {
	f, after, digest := e.files[path], &File{Data: []byte(content)}, e.record.Digests[path]
	switch {
	case f == nil || e.isUnchanged(path) || digest != "" && f.equal(after):
		e.record.Digests[path] = after.digest()
		if parsed := after.parsed(path); parsed != "" {
			e.record.Parsed[path] = parsed
		}
		e.set(path, after, e.service)
	case f.equal(after): // the file existed before
		e.considered[path] = e.service
	case digest == "":
		return &ForeignError{path}
	default:
		e.considered[path] = e.service
		e.kept = append(e.kept, path)
	}
	return nil
}

// isUnchanged reports whether a file says what we wrote, whatever its comments and layout are now.
func (e *edit) isUnchanged(path string) bool {
	f, parsed := e.files[path], e.record.Parsed[path]
	return e.record.Digests[path] == f.digest() || parsed != "" && parsed == f.parsed(path)
}

// remove removes one of our files. If the file has changed since we wrote it, it is kept, unless it runs our programs:
// then it is an error.
func (e *edit) remove(path string) error {
	f := e.files[path]
	isOurs, isUnchanged := e.record.Digests[path] != "", f != nil && e.isUnchanged(path)
	delete(e.record.Digests, path)
	delete(e.record.Parsed, path)
	switch {
	case f == nil || !isOurs:
	case isUnchanged:
		e.set(path, nil, e.service)
	case bytes.Contains(f.Data, []byte(wrapperName)) || bytes.Contains(f.Data, []byte(hookName)):
		return &SettingError{path, "was changed after hook install wrote it, and runs " + wrapperName + " or " + hookName +
			": remove it, or what names them"}
	default:
		e.kept = append(e.kept, path)
	}
	return nil
}

// digest identifies the content of a file or the target of a link.
func (f *File) digest() string {
	if f.Link != "" {
		return "link to " + f.Link
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256(f.Data))
}

// parsed identifies what a TOML or JSON file says. It is empty for other files, and for those that cannot be parsed.
func (f *File) parsed(name string) string {
	var config map[string]any
	var err error
	switch path.Ext(name) {
	case ".json":
		err = json.Unmarshal(f.Data, &config)
	case ".toml", ".conf":
		config, err = ParseTOML(name, f.Data)
	default:
		return ""
	}
	text, errText := json.Marshal(config)
	if err != nil || errText != nil {
		return ""
	}
	return fmt.Sprintf("sha256:%x", sha256.Sum256(text))
}

// wrapper returns the path of gpu-cdi-runtime for the current engine.
func (e *edit) wrapper() string {
	name := wrapperName
	if e.engine != "wrapper" {
		name += "-" + e.engine
	}
	return path.Join(path.Dir(e.hook), name)
}

// runtimeFile returns the file with the default runtime of an engine, which gpu-cdi-runtime reads.
func runtimeFile(engine string) string { return "/etc/gpu-cdi-plugin/runtime-" + engine + ".yaml" }

// programDirs are the directories in which gpu-cdi-runtime searches for a runtime after PATH.
var programDirs = []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"}

func (e *edit) hasProgram(name string) bool {
	return slices.ContainsFunc(programDirs, func(dir string) bool { return e.host.isFile(path.Join(dir, name)) })
}

// addRuntime records the default runtime of the current engine for gpu-cdi-runtime: a path, or a name that the engine
// searches for in its PATH. It is empty if the engine has no default that is known. If it is our own, what was recorded
// before stays. In place of NVIDIA's, by which images would take GPUs, runc or crun is recorded. The file is the one
// that names the runtime.
func (e *edit) addRuntime(program, file string) error {
	service := e.service
	e.service = Service{} // the file is read for each container
	defer func() { e.service = service }()
	name := runtimeFile(e.engine)
	if isRuntimeOfNVIDIA(program, e.host.leadsTo) {
		other := e.otherRuntime()
		if other == "" {
			return &SettingError{file, "has " + program + " as the default runtime. It gives GPUs to images that ask for " +
				"them, so it is not run behind ours, and there is neither runc nor crun to run in its place"}
		}
		e.warnings = append(e.warnings, fmt.Sprintf("%s has %s as the default runtime of %s, which gives GPUs to images "+
			"that ask for them: %s runs %s in its place", file, program, e.engine, path.Base(e.wrapper()), other))
		program = other
	}
	switch {
	case isWrapper(program) || program == runtimeName:
		return nil
	case program == "" || !path.IsAbs(program) && strings.Contains(program, "/"):
		return e.remove(name)
	case path.IsAbs(program) && !e.host.isFile(program):
		return &SettingError{file, "names the runtime " + program + ", which does not exist"}
	case path.IsAbs(program):
		e.runtimes = append(e.runtimes, program)
	}
	quoted, _ := json.Marshal(program) // a string cannot fail
	return e.own(name, fmt.Sprintf("%sruntime: %s\n", header, quoted))
}

// otherRuntime returns the path of a runc or crun that is not NVIDIA's runtime by another name, or "".
func (e *edit) otherRuntime() string {
	for _, name := range []string{"runc", "crun"} {
		for _, dir := range programDirs {
			if at := path.Join(dir, name); e.host.isFile(at) && !isRuntimeOfNVIDIA(at, e.host.leadsTo) {
				return at
			}
		}
	}
	return ""
}

func (e *edit) addWrapper() error {
	name, after := e.wrapper(), &File{Link: path.Base(e.hook)}
	f := e.files[name]
	switch {
	case f == nil:
		e.record.Digests[name] = after.digest()
		e.set(name, after, Service{})
	case f.Link != after.Link && f.Link != e.hook:
		return &ForeignError{name}
	default:
		e.considered[name] = Service{}
	}
	return nil
}

// plan compares the edited files with those of the host.
func (e *edit) plan() *Plan {
	p := &Plan{host: e.host, Kept: e.kept, Warnings: e.warnings, runtimes: e.runtimes}
	for _, name := range slices.Sorted(maps.Keys(e.considered)) {
		c := Change{name, e.host.files[name], e.files[name]}
		p.Wanted = append(p.Wanted, c)
		if c.Before.equal(c.After) {
			continue
		}
		p.Changes = append(p.Changes, c)
		service, list := e.considered[name], &p.Restart
		if service.Reload {
			list = &p.Reload
		}
		if service.Name != "" && !slices.Contains(*list, service.Name) {
			*list = append(*list, service.Name)
		}
	}
	e.planRecord(p)
	return p
}

// planRecord adds the record to the changes of a plan. When files are added, the record is written first, so that they
// can be removed even after a power cut. When the last file is removed, the record is removed after it.
func (e *edit) planRecord(p *Plan) {
	isGone := func(name string) bool { f, known := e.files[name]; return known && f == nil }
	e.record.Made = slices.DeleteFunc(e.record.Made, isGone)
	before := e.host.files[recordFile]
	if len(e.record.Installed) == 0 {
		if before != nil {
			p.Changes = append(p.Changes, Change{recordFile, before, nil})
		}
		return
	}
	p.mkdirs = e.missingDirs(recordFile)
	for _, c := range p.Changes {
		if c.After != nil && c.After.Link == "" { // the link is in the directory of the hook
			p.mkdirs = append(p.mkdirs, e.missingDirs(c.Path)...)
		}
	}
	e.record.Made = append(e.record.Made, p.mkdirs...)
	slices.Sort(e.record.Made)
	e.record.Made = slices.Compact(e.record.Made)
	data, _ := json.MarshalIndent(e.record, "", "  ") // a struct of strings cannot fail
	if after := (&File{Data: append(data, '\n')}); !before.equal(after) {
		p.Changes = slices.Insert(p.Changes, 0, Change{recordFile, before, after})
	}
}

// missingDirs returns the directories above a file that do not exist yet.
func (e *edit) missingDirs(name string) []string {
	var dirs []string
	for dir := path.Dir(name); dir != "/" && !e.host.isDir(dir); dir = path.Dir(dir) {
		dirs = append(dirs, dir)
	}
	return dirs
}
