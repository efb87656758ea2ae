package install

import (
	"cmp"
	"fmt"
	"maps"
)

// builtin are the settings of CRI-O's own handlers, which no file has, as far as CRI-O gives them to no other handler.
var builtin = map[string]any{"monitor_env": []any{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}}

// crioRuntimes are the handlers of CRI-O, of which a later file replaces those of the same name.
type crioRuntimes struct {
	handlers map[string]map[string]any
	files    map[string]string // the file of each handler
	// name is the name of the default handler, and file the file that sets it; both are empty if none does.
	name, file string
	// other is another program's file with a handler of our name, or empty.
	other string
}

func (e *edit) crioRuntimes() (*crioRuntimes, error) {
	layers, err := e.layers(crioConfigs)
	if err != nil {
		return nil, err
	}
	r := &crioRuntimes{handlers: map[string]map[string]any{}, files: map[string]string{}}
	for _, l := range layers {
		if name, ok := get(l.config, "crio", "runtime", "default_runtime").(string); ok {
			r.name, r.file = name, l.path
		}
		handlers, _ := get(l.config, "crio", "runtime", "runtimes").(map[string]any)
		if handlers[runtimeName] != nil && l.path != crioDropIn {
			r.other = l.path
		}
		for name, handler := range handlers {
			r.handlers[name], _ = handler.(map[string]any)
			r.files[name] = l.path
		}
	}
	return r, nil
}

// standard returns the default handler and its name. Without a name it is crun, and in CRI-O before 1.31 runc.
func (r *crioRuntimes) standard() (string, map[string]any) {
	names := []string{r.name}
	if r.name == "" {
		names = []string{"crun", "runc"}
	}
	for _, name := range names {
		if handler := r.handlers[name]; handler != nil {
			return name, handler
		}
	}
	return r.name, builtin
}

// addCRIO writes a copy of the default handler with our program, since CRI-O has no defaults for all of a handler:
// without monitor_path it searches for conmon in its PATH, and does not start if none is there.
func addCRIO(e *edit) error {
	if err := e.addWrapper(); err != nil {
		return err
	}
	runtimes, err := e.crioRuntimes()
	if err != nil {
		return err
	}
	if runtimes.other != "" {
		return &SettingError{runtimes.other, "already has another runtime " + runtimeName}
	}
	name, handler := runtimes.standard()
	program, _ := handler["runtime_path"].(string)
	if name == "" && e.hasProgram("crun") {
		name = "crun"
	}
	if err := e.addRuntime(cmp.Or(program, name), cmp.Or(runtimes.files[name], crioConfigs[0])); err != nil {
		return err
	}
	handler = maps.Clone(handler)
	switch handler["runtime_type"] {
	case "vm":
		return &SettingError{runtimes.file, "has a default_runtime with virtual machines, which gpu-cdi-runtime cannot run"}
	case nil, "":
		handler["runtime_type"] = "oci"
	}
	for _, key := range []string{"platform_runtime_paths", "inherit_default_runtime"} { // they bypass runtime_path
		delete(handler, key)
	}
	handler["runtime_path"] = e.wrapper()
	text, err := tomlTable("crio.runtime.runtimes."+runtimeName, handler)
	if err != nil {
		return fmt.Errorf("copy the default runtime of CRI-O: %w", err)
	}
	return e.own(crioDropIn, header+text)
}

func removeCRIO(e *edit) error {
	runtimes, err := e.crioRuntimes()
	if err != nil {
		return err
	}
	if runtimes.name == runtimeName && e.files[crioDropIn] != nil {
		return &SettingError{runtimes.file, isDefault("default_runtime")}
	}
	return e.remove(crioDropIn)
}
