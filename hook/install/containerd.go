package install

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"path"
	"reflect"
	"slices"

	"github.com/pelletier/go-toml/v2"
)

// The configuration of containerd. Our runtime belongs in a drop-in, but only containerd 2 merges a drop-in's tables
// of plugins with those of config.toml. In containerd 1 a drop-in replaces the whole table of the CRI plugin.
const (
	containerdFile    = "/etc/containerd/config.toml"
	containerdDropIns = "/etc/containerd/conf.d/*.toml"
	containerdDropIn  = "/etc/containerd/conf.d/50-gpu-cdi-plugin.toml"
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
		original = []byte("version = 2\n") // for containerd 1 and 2
	}
	text := withoutContainerd(original)
	config, err := parseTOML(containerdFile, text)
	if err != nil {
		return err
	}
	l, ok := layoutOf(config)
	if !ok {
		return &SettingError{containerdFile, "has a version before 2; convert it with: containerd config migrate"}
	}
	if get(config, append(l.runtimes(), runtimeName)...) != nil {
		return &SettingError{containerdFile, "already has another runtime " + runtimeName}
	}
	layers := []map[string]any{config}
	imports := isImported(config)
	for _, name := range e.matching(containerdDropIns) {
		if !imports || name == containerdDropIn {
			continue
		}
		layer, err := parseTOML(name, e.files[name].Data)
		if err != nil {
			return err
		}
		layers = append(layers, layer)
	}
	if l.version > 2 && imports {
		return e.addContainerdDropIn(l, original, text, layers)
	}
	changed, err := l.edit(text, config, l.tables(e.wrapper(), layers))
	if err != nil {
		return err
	}
	if equal, err := sameTOML(original, changed); err != nil || equal {
		changed = original // our part keeps its place, even if others have added lines after it
		if err != nil {
			return fmt.Errorf("%s: %w", containerdFile, err)
		}
	}
	e.remove(containerdDropIn)
	e.put(containerdFile, changed)
	return nil
}

// addContainerdDropIn writes the drop-in. It removes our part from config.toml, which was needed if config.toml had an
// older version at the last installation.
func (e *edit) addContainerdDropIn(l layout, original, text []byte, layers []map[string]any) error {
	content := fmt.Sprintf("version = %d\n\n%s", l.version, l.tables(e.wrapper(), layers))
	if !bytes.Equal(original, text) {
		e.put(containerdFile, text)
	}
	return e.own(containerdDropIn, header+content)
}

func removeContainerd(e *edit) error {
	e.remove(containerdDropIn)
	original, err := e.shared(containerdFile)
	if err != nil || original == nil {
		return err
	}
	text := withoutContainerd(original)
	if e.record.made(containerdFile) && string(text) == "version = 2\n" {
		text = nil
	}
	e.put(containerdFile, text)
	return nil
}

// isImported reports whether config.toml imports our drop-in.
func isImported(config map[string]any) bool {
	imports, _ := config["imports"].([]any)
	return slices.ContainsFunc(imports, func(pattern any) bool {
		text, _ := pattern.(string)
		if !path.IsAbs(text) {
			text = path.Join(path.Dir(containerdFile), text)
		}
		matches, err := path.Match(text, containerdDropIn)
		return err == nil && matches
	})
}

const shim = "io.containerd.runc.v2"

// runtimes are the keys of the table of all runtimes.
func (l layout) runtimes() []string { return []string{"plugins", l.cri, "containerd", "runtimes"} }

// tables returns the TOML tables of our runtime. SystemdCgroup is the same as runc's, as the kubelet expects.
// Annotations of containers are passed on to the runtime, since device plugins set them. Annotations of pods are not:
// whoever creates a pod could take any GPU.
func (l layout) tables(wrapper string, layers []map[string]any) string {
	table := fmt.Sprintf("plugins.%q.containerd.runtimes.%s", l.cri, runtimeName)
	text := fmt.Sprintf("[%s]\n  runtime_type = %q\n"+
		"  container_annotations = [\"cdi.k8s.io/*\"]\n\n[%s.options]\n  BinaryName = %q\n", table, shim, table, wrapper)
	systemd := false
	for _, layer := range layers {
		if value, ok := get(layer, append(l.runtimes(), "runc", "options", "SystemdCgroup")...).(bool); ok {
			systemd = value
		}
	}
	if systemd {
		text += "  SystemdCgroup = true\n"
	}
	return text
}

// edit returns the text of config.toml with our tables at its end. It does not set enable_cdi: then containerd itself
// would read the annotations of all its containers, past the policy.
func (l layout) edit(text []byte, config map[string]any, tables string) ([]byte, error) {
	want := deepCopy(config)
	if l.version == 2 && get(config, l.runtimes()...) == nil {
		// In containerd 1, a table for any runtime replaces the default tables, so runc needs its own here.
		tables = fmt.Sprintf("[plugins.%q.containerd.runtimes.runc]\n  runtime_type = %q\n\n", l.cri, shim) + tables
	}
	ours, err := parseTOML("the tables of the runtime", []byte(tables))
	if err != nil {
		return nil, err
	}
	for name, runtime := range get(ours, l.runtimes()...).(map[string]any) {
		set(want, runtime, append(l.runtimes(), name)...)
	}
	changed := slices.Concat(text, []byte(beginBlock+tables+endBlock))
	got, err := parseTOML(containerdFile, changed)
	if err == nil && !reflect.DeepEqual(got, want) {
		err = errors.New("other settings would change")
	}
	if err != nil {
		return nil, &SettingError{containerdFile, "has tables to which the runtime gpu-cdi cannot be added: " + err.Error()}
	}
	return changed, nil
}

// withoutContainerd returns config.toml without what edit adds.
func withoutContainerd(text []byte) []byte {
	begin := bytes.Index(text, []byte(beginBlock))
	if begin >= 0 {
		if end := bytes.Index(text[begin:], []byte(endBlock)); end >= 0 {
			rest := text[begin+end+len(endBlock):]
			if len(rest) > 0 && !bytes.HasSuffix(text[:begin], []byte("\n")) {
				begin++ // others have added lines: keep the first one separate from the line before our part
			}
			text = slices.Concat(text[:begin], rest)
		}
	}
	return text
}

func parseTOML(name string, text []byte) (map[string]any, error) {
	config := map[string]any{}
	if err := toml.Unmarshal(text, &config); err != nil {
		if e, ok := errors.AsType[*toml.DecodeError](err); ok {
			row, column := e.Position()
			return nil, fmt.Errorf("read %s: line %d, column %d: %w", name, row, column, err)
		}
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return config, nil
}

func sameTOML(a, b []byte) (bool, error) {
	var x, y map[string]any
	err := errors.Join(toml.Unmarshal(a, &x), toml.Unmarshal(b, &y))
	return reflect.DeepEqual(x, y), err
}

// get returns the value at a path of keys, or nil if there is none.
func get(table map[string]any, keys ...string) any {
	for ; len(keys) > 1; keys = keys[1:] {
		table, _ = table[keys[0]].(map[string]any)
	}
	return table[keys[0]]
}

// set sets the value at a path of keys. A value on the way that is not a table is replaced by one.
func set(table map[string]any, value any, keys ...string) {
	for ; len(keys) > 1; keys = keys[1:] {
		next, ok := table[keys[0]].(map[string]any)
		if !ok {
			next = map[string]any{}
			table[keys[0]] = next
		}
		table = next
	}
	table[keys[0]] = value
}

func deepCopy(table map[string]any) map[string]any {
	table = maps.Clone(table)
	for key, value := range table {
		if inner, ok := value.(map[string]any); ok {
			table[key] = deepCopy(inner)
		}
	}
	return table
}
