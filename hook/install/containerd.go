package install

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"
)

// The configuration of containerd. Our runtime belongs in a drop-in, but only containerd 2 merges a drop-in's tables
// of plugins with those of config.toml. In containerd 1 a drop-in replaces the whole table of the CRI plugin.
const (
	containerdFile   = "/etc/containerd/config.toml"
	containerdDropIn = "/etc/containerd/conf.d/50-gpu-cdi-plugin.toml"
)

// The lines around our part of config.toml, including the line break before it.
const (
	beginBlock = "\n# BEGIN gpu-cdi-plugin hook install\n"
	endBlock   = "# END gpu-cdi-plugin hook install\n"
)

// layout is the layout of one version of config.toml.
type layout struct {
	version int64
	cri     string // the table of runtimes in the CRI plugin's configuration
}

func layoutOf(config map[string]any) (layout, bool) {
	version, _ := config["version"].(int64)
	if version == 2 {
		return layout{version, "io.containerd.grpc.v1.cri"}, true
	}
	return layout{version, "io.containerd.cri.v1.runtime"}, version > 2
}

func addContainerd(e *edit) error {
	original, err := e.shared(containerdFile)
	if err != nil {
		return err
	}
	if err := e.addWrapper(); err != nil {
		return err
	}
	if original == nil {
		e.record.Made = append(e.record.Made, containerdFile)
		e.put(containerdFile, []byte("version = 2\n")) // for containerd 1 and 2
	}
	layers, imported, err := e.containerdLayers()
	if err != nil {
		return err
	}
	if file := disablesCRI(layers); file != "" {
		return &SettingError{file, "disables the CRI plugin (disabled_plugins), and only that has runtime handlers: enable " +
			"it, or leave containerd out; docker and nerdctl do not need this"}
	}
	l, ok := layoutOf(layers[0].config)
	if !ok {
		return &SettingError{containerdFile, "has a version before 2; convert it with: containerd config migrate"}
	}
	tables, err := l.tables(e.wrapper(), l.merged(layers))
	if err != nil {
		return fmt.Errorf("copy the default runtime of containerd: %w", err)
	}
	program, _ := get(standardRuntime(l.merged(layers)), "options", "BinaryName").(string)
	name, file := defaultRuntime(layers)
	if name == runtimeName {
		program = name
	}
	if err := e.addRuntime(cmp.Or(program, "runc"), cmp.Or(file, containerdFile)); err != nil {
		return err
	}
	target := l.target(layers)
	if l.version > 2 && imported {
		target = containerdDropIn
		if err := e.own(target, fmt.Sprintf("%sversion = %d\n\n%s", header, l.version, tables)); err != nil {
			return err
		}
	}
	for _, layer := range layers {
		if layer.path == containerdDropIn {
			continue
		}
		wanted := ""
		if layer.path == target {
			wanted = tables
		}
		if err := l.addTo(e, layer.path, wanted); err != nil {
			return err
		}
	}
	if target == containerdDropIn {
		return nil
	}
	return e.remove(containerdDropIn)
}

// addTo makes the tables our part of one of containerd's files; without tables it removes our part.
func (l layout) addTo(e *edit, file, tables string) error {
	original := e.files[file].Data
	text, err := withoutContainerd(file, original)
	if err != nil {
		return err
	}
	config, err := ParseTOML(file, text)
	if err != nil {
		return err
	}
	if get(config, append(l.runtimes(), runtimeName)...) != nil {
		return &SettingError{file, "already has another runtime " + runtimeName}
	}
	changed := text
	if tables != "" {
		if changed, err = l.edit(file, text, config, tables); err != nil {
			return err
		}
		if equal, err := sameTOML(file, original, changed); err != nil || equal {
			changed = original // our part keeps its place, even if others have added lines after it
			if err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
		}
	}
	if bytes.Equal(changed, original) && file != containerdFile {
		return nil
	}
	if _, err := e.shared(file); err != nil {
		return err
	}
	e.put(file, changed)
	return nil
}

// disablesCRI returns the file that disables the CRI plugin, in the names of any version, or "".
func disablesCRI(layers []layer) string {
	names := []any{"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"}
	for _, layer := range layers {
		disabled, _ := layer.config["disabled_plugins"].([]any)
		if slices.ContainsFunc(disabled, func(name any) bool { return slices.Contains(names, name) }) {
			return layer.path
		}
	}
	return ""
}

// containerdLayers returns config.toml and the files that it and they import, in the order in which containerd reads
// them, and whether our drop-in is among them or would be.
func (e *edit) containerdLayers() (layers []layer, imported bool, err error) {
	for pending := []string{containerdFile}; len(pending) > 0; pending = pending[1:] {
		file := pending[0]
		isLoaded := func(l layer) bool { return l.path == file }
		if e.files[file] == nil || slices.ContainsFunc(layers, isLoaded) {
			continue
		}
		config, err := ParseTOML(file, e.files[file].Data)
		if err != nil {
			return nil, false, err
		}
		layers = append(layers, layer{file, config})
		for _, pattern := range imports(file, config) {
			matches, err := path.Match(pattern, containerdDropIn)
			imported = imported || err == nil && matches
			pending = append(pending, e.matching(pattern)...)
		}
	}
	return layers, imported, nil
}

// imports returns the absolute patterns of the files that a file of containerd imports.
func imports(file string, config map[string]any) []string {
	list, _ := config["imports"].([]any)
	var patterns []string
	for _, pattern := range list {
		text, ok := pattern.(string)
		if !ok {
			continue
		}
		if !path.IsAbs(text) {
			text = path.Join(path.Dir(file), text)
		}
		patterns = append(patterns, path.Clean(text))
	}
	return patterns
}

// containerdImports returns the patterns of the files that the files of containerd import, whatever their names end
// in. It ignores files that cannot be parsed, which addContainerd reports, and those of other engines, which have no
// imports.
func containerdImports(files map[string]*File) []string {
	var patterns []string
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if config, err := ParseTOML(name, files[name].Data); err == nil {
			patterns = append(patterns, imports(name, config)...)
		}
	}
	return patterns
}

// criTable returns the table of the CRI plugin that has the runtimes, of either layout, or nil.
func criTable(config map[string]any) map[string]any {
	for _, version := range []int64{3, 2} {
		l, _ := layoutOf(map[string]any{"version": version})
		if table, ok := get(config, "plugins", l.cri).(map[string]any); ok {
			return table
		}
	}
	return nil
}

// merged returns the CRI plugin's table in effect. A file of version 2 may be read by containerd 1, where the table of
// a later file replaces that of an earlier one; otherwise they are merged.
func (l layout) merged(layers []layer) map[string]any {
	all := map[string]any{}
	for _, layer := range layers {
		table := criTable(layer.config)
		if l.version == 2 && table != nil {
			all = map[string]any{}
		}
		merge(all, table)
	}
	return all
}

// target returns the file for our tables: the last one whose table of the CRI plugin counts in containerd 1.
func (l layout) target(layers []layer) string {
	file := containerdFile
	for _, layer := range layers {
		if l.version == 2 && get(layer.config, "plugins", l.cri) != nil {
			file = layer.path
		}
	}
	return file
}

func removeContainerd(e *edit) error {
	layers, _, err := e.containerdLayers()
	if err != nil {
		return err
	}
	name, file := defaultRuntime(layers)
	isOurs := false
	for _, layer := range layers {
		isOurs = isOurs || len(ourTables(layer.config)) > 0
	}
	if isOurs && name == runtimeName {
		return &SettingError{file, isDefault("default_runtime_name")}
	}
	for _, layer := range layers {
		if layer.path == containerdDropIn {
			continue
		}
		original := e.files[layer.path].Data
		text, err := withoutContainerd(layer.path, original)
		if err != nil {
			return err
		}
		if bytes.Equal(text, original) {
			continue
		}
		if _, err := e.shared(layer.path); err != nil {
			return err
		}
		if layer.path == containerdFile && e.record.made(containerdFile) && string(text) == "version = 2\n" {
			text = nil
		}
		e.put(layer.path, text)
	}
	return e.remove(containerdDropIn)
}

// defaultRuntime returns the name of the default runtime, and the last file that sets it; both are empty if none does.
func defaultRuntime(layers []layer) (name, file string) {
	for _, layer := range layers {
		if text, ok := get(criTable(layer.config), "containerd", "default_runtime_name").(string); ok {
			name, file = text, layer.path
		}
	}
	return name, file
}

const shim = "io.containerd.runc.v2"

// runtimes are the keys of the table of all runtimes.
func (l layout) runtimes() []string { return []string{"plugins", l.cri, "containerd", "runtimes"} }

// tables returns the TOML tables of our runtime: a copy of the default runtime with our program. Annotations of
// containers are passed on to the runtime, since device plugins set them. Annotations of pods are not: whoever creates
// a pod could take any GPU.
func (l layout) tables(wrapper string, cri map[string]any) (string, error) {
	runtime := deepCopy(standardRuntime(cri))
	options, _ := runtime["options"].(map[string]any)
	options = deepCopy(options)
	delete(runtime, "options")
	delete(runtime, "pod_annotations")
	annotations, _ := runtime["container_annotations"].([]any)
	if !slices.Contains(annotations, any(passedOn)) {
		annotations = append(slices.Clip(annotations), passedOn)
	}
	runtime["runtime_type"], runtime["container_annotations"] = shim, annotations
	set(options, wrapper, "BinaryName")
	name := fmt.Sprintf("plugins.%q.containerd.runtimes.%s", l.cri, runtimeName)
	text, err := tomlTable(name, runtime)
	if err != nil {
		return "", err
	}
	inner, err := tomlTable(name+".options", options)
	return text + "\n" + inner, err
}

// passedOn are the annotations that our runtime gets.
const passedOn = "cdi.k8s.io/*"

// standardRuntime returns the default runtime, or runc if the shim of runc does not run that; nil stands for
// containerd's own runc. If ours is the default, it is copied again.
func standardRuntime(cri map[string]any) map[string]any {
	name, _ := get(cri, "containerd", "default_runtime_name").(string)
	for _, name := range []string{name, "runc"} {
		runtime, ok := get(cri, "containerd", "runtimes", name).(map[string]any)
		if kind := runtime["runtime_type"]; ok && (kind == nil || kind == "" || kind == shim) {
			return runtime
		}
	}
	return nil
}

// edit returns the text of a file with our tables at its end. It does not set enable_cdi: then containerd
// itself would read the annotations of all its containers, past the policy.
func (l layout) edit(file string, text []byte, config map[string]any, tables string) ([]byte, error) {
	want := deepCopy(config)
	if l.version == 2 && get(config, l.runtimes()...) == nil {
		// In containerd 1, a table for any runtime replaces the default tables, so runc needs its own here.
		tables = fmt.Sprintf("[plugins.%q.containerd.runtimes.runc]\nruntime_type = '%s'\n\n", l.cri, shim) + tables
	}
	ours, err := ParseTOML("the tables of the runtime", []byte(tables))
	if err != nil {
		return nil, err
	}
	for name, runtime := range get(ours, l.runtimes()...).(map[string]any) {
		set(want, runtime, append(l.runtimes(), name)...)
	}
	changed := slices.Concat(text, []byte(beginBlock+tables+endBlock))
	got, err := ParseTOML(file, changed)
	if err == nil && !reflect.DeepEqual(got, want) {
		err = errors.New("other settings would change")
	}
	if err != nil {
		return nil, &SettingError{file, "has tables to which the runtime gpu-cdi cannot be added: " + err.Error()}
	}
	return changed, nil
}

// ourTables returns the keys of the tables of our runtime, in both layouts.
func ourTables(config map[string]any) [][]string {
	var tables [][]string
	for _, cri := range []string{"io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} {
		keys := append(layout{cri: cri}.runtimes(), runtimeName)
		if program, _ := get(config, append(keys, "options", "BinaryName")...).(string); isWrapper(program) {
			tables = append(tables, keys)
		}
	}
	return tables
}

// withoutContainerd returns the text of a file without what edit adds. A program that has rewritten the file may have
// dropped the lines around our part, or moved other tables between them: then only our tables are removed.
func withoutContainerd(file string, text []byte) ([]byte, error) {
	config, err := ParseTOML(file, text)
	if err != nil {
		return nil, err
	}
	if rest, ours := cutBlock(text); ours != nil && equalWithout(config, rest, ours) {
		return rest, nil
	}
	ours := ourTables(config)
	if len(ours) == 0 {
		return text, nil
	}
	rest := withoutTables(text, ours)
	if !equalWithout(config, rest, ours) {
		return nil, &SettingError{file, "has the runtime " + runtimeName + " in a form that cannot be removed: " +
			"remove it by hand"}
	}
	return rest, nil
}

// cutBlock returns a text without our part, and the keys of our runtimes in that part. Without our part there are no
// keys.
func cutBlock(text []byte) (rest []byte, runtimes [][]string) {
	begin := bytes.Index(text, []byte(beginBlock))
	if begin < 0 {
		return text, nil
	}
	length := bytes.Index(text[begin:], []byte(endBlock))
	if length < 0 {
		return text, nil
	}
	config, err := ParseTOML("our part", text[begin:begin+length])
	if err != nil {
		return text, nil
	}
	for _, keys := range ourTables(config) {
		runtimes = append(runtimes, keys)
		parent := keys[:len(keys)-1]
		if runc := append(slices.Clone(parent), "runc"); get(config, runc...) != nil {
			runtimes = append(runtimes, runc)
		}
	}
	rest = text[begin+length+len(endBlock):]
	if len(rest) > 0 && !bytes.HasSuffix(text[:begin], []byte("\n")) {
		begin++ // others have added lines: keep the first one separate from the line before our part
	}
	return slices.Concat(text[:begin], rest), runtimes
}

// equalWithout reports whether a text is a configuration without some tables. Empty tables do not count.
func equalWithout(config map[string]any, text []byte, tables [][]string) bool {
	want := deepCopy(config)
	for _, keys := range tables {
		remove(want, keys...)
	}
	got, err := ParseTOML("the changed file", text)
	return err == nil && reflect.DeepEqual(prune(want), prune(got))
}

// withoutTables returns a TOML text without tables and those in them, and without the lines around our part. Comments
// before the next table stay.
func withoutTables(text []byte, tables [][]string) []byte {
	var kept, comments []byte
	skip := false
	for line := range bytes.Lines(text) {
		trimmed := strings.TrimSpace(string(line))
		if trimmed == strings.TrimSpace(beginBlock) || trimmed == strings.TrimSpace(endBlock) {
			continue
		}
		if keys := tableHeader(trimmed); keys != nil {
			skip = slices.ContainsFunc(tables, func(table []string) bool {
				return len(keys) >= len(table) && slices.Equal(keys[:len(table)], table)
			})
			if !skip {
				kept = append(kept, comments...)
			}
			comments = nil
		}
		switch {
		case !skip:
			kept = append(kept, line...)
		case trimmed == "" || trimmed[0] == '#':
			comments = append(comments, line...)
		default:
			comments = nil
		}
	}
	return append(kept, comments...)
}

// tableHeader returns the keys of a line that begins a table, or nil for another line.
func tableHeader(line string) []string {
	var keys []string
	table, err := ParseTOML("a line", []byte(line))
	if err != nil || !strings.HasPrefix(line, "[") {
		return nil
	}
	for len(table) == 1 {
		for key, value := range table {
			keys = append(keys, key)
			table, _ = value.(map[string]any)
		}
	}
	return keys
}
