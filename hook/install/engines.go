package install

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Engine is something that can be installed for: an engine, or a component that several engines use.
type Engine struct {
	Name string
	// Program is the engine's program, or empty for a component.
	Program string
	// Without says how containers of the engine get devices without the hook, and Gives what the hook adds.
	Without, Gives string
	// Service reads the files when it starts.
	Service Service

	reads       []string // the files and patterns that decide what is written
	add, remove func(*edit) error
}

// Service is a service of systemd. Without a name there is none.
type Service struct {
	Name string
	// Reload reports whether it also reads its files when it is reloaded.
	Reload bool
}

// runtimeName is the name under which engines know gpu-cdi-runtime.
const runtimeName = "gpu-cdi"

const (
	podmanHooks  = "/etc/containers/oci/gpu-cdi-plugin.d"
	precreate    = podmanHooks + "/precreate.json"
	podmanDropIn = "/etc/containers/containers.conf.d/50-gpu-cdi-plugin.conf"
	crioDropIn   = "/etc/crio/crio.conf.d/50-gpu-cdi-plugin.conf"
	// commonHooks is the directory that podman and CRI-O read unless they are configured otherwise; OpenShift
	// configures adminHooks.
	commonHooks = "/usr/share/containers/oci/hooks.d"
	adminHooks  = "/etc/containers/oci/hooks.d"
	liveHook    = "50-gpu-cdi-plugin.json"
	daemonFile  = "/etc/docker/daemon.json"
)

// The files in which podman and CRI-O search for their settings. Later ones take precedence.
var (
	podmanConfigs = []string{
		"/usr/share/containers/containers.conf", "/usr/share/containers/containers.conf.d/*.conf",
		"/etc/containers/containers.conf", "/etc/containers/containers.conf.d/*.conf",
	}
	crioConfigs = []string{"/etc/crio/crio.conf", "/etc/crio/crio.conf.d/*"}
)

// Engines returns all engines and components.
func Engines() []Engine {
	return []Engine{
		{
			Name: "podman", Program: "podman",
			Without: "--device (4.1 and later)", Gives: "--annotation, and --runtime " + runtimeName,
			reads: append([]string{precreate}, podmanConfigs...), add: addPodman, remove: removePodman,
		},
		{
			Name: "docker", Program: "dockerd", Service: Service{"docker", true},
			Without: "--device (28.2 and later)", Gives: "--runtime " + runtimeName,
			reads: dockerReads(), add: addDocker, remove: removeDocker,
		},
		{
			Name: "containerd", Program: "containerd", Service: Service{Name: "containerd"},
			Without: "CDI devices (2.0 and later)", Gives: "runtime handler " + runtimeName,
			reads: []string{containerdFile, containerdDropIn}, add: addContainerd, remove: removeContainerd,
		},
		{
			Name: "crio", Program: "crio", Service: Service{Name: "crio"},
			Without: "CDI devices (1.23 and later)", Gives: "runtime handler " + runtimeName,
			reads: crioConfigs, add: addCRIO, remove: removeCRIO,
		},
		{
			Name: "live", Without: "-",
			Gives: "a createRuntime hook for annotations in CRI-O, podman",
			reads: append([]string{commonHooks + "/" + liveHook, adminHooks + "/" + liveHook}, crioConfigs...),
			add:   addLive, remove: removeLive,
		},
		{
			Name: "wrapper", Without: "-", Gives: "gpu-cdi-runtime for runc and crun without an engine",
			add: func(e *edit) error { return e.addWrapper() }, remove: func(*edit) error { return nil },
		},
	}
}

// HookDocuments returns the files with hooks that Install writes for an engine or component.
func HookDocuments(engine string) []string {
	switch engine {
	case "podman":
		return []string{precreate}
	case "live":
		return []string{commonHooks + "/" + liveHook, adminHooks + "/" + liveHook}
	}
	return nil
}

// find returns the engines with these names, in the order of the table; an unknown name is an error.
func find(names []string) ([]Engine, error) {
	var found []Engine
	for _, engine := range Engines() {
		if slices.Contains(names, engine.Name) {
			found = append(found, engine)
		}
	}
	for _, name := range names {
		if !slices.ContainsFunc(found, func(e Engine) bool { return e.Name == name }) {
			return nil, fmt.Errorf("%w %q", ErrUnknown, name)
		}
	}
	return found, nil
}

// addPodman makes podman also read hooks from our own directory. The usual directories do not fit: CRI-O may read
// them, and does not start with a hook for the precreate stage. The directory is readable for every user: podman
// starts no container, even for an ordinary user, if it cannot read a directory of hooks.
func addPodman(e *edit) error {
	if err := e.addWrapper(); err != nil {
		return err
	}
	dirs, file, err := e.hookDirs(podmanConfigs, podmanDropIn, "engine")
	if err != nil {
		return err
	}
	if err := e.addPodmanRuntime(); err != nil {
		return err
	}
	content := fmt.Sprintf("[engine.runtimes]\n%s = [%q]\n", runtimeName, e.wrapper())
	switch {
	case dirs == nil:
		content = fmt.Sprintf("[engine]\nhooks_dir = [%q, %q]\n\n%s", commonHooks, podmanHooks, content)
	case !slices.Contains(dirs, podmanHooks):
		return &SettingError{file, "sets hooks_dir without " + podmanHooks}
	}
	if err := e.own(precreate, e.document(precreateDocument)); err != nil {
		return err
	}
	return e.own(podmanDropIn, header+content)
}

// podmanRuntime returns the name of podman's default runtime and the file that sets it, or "" for both, and the paths
// that podman tries for each runtime that a file has.
func (e *edit) podmanRuntime() (name, file string, paths map[string][]any, err error) {
	layers, err := e.layers(podmanConfigs)
	if err != nil {
		return "", "", nil, err
	}
	paths = map[string][]any{}
	for _, l := range layers {
		if text, ok := get(l.config, "engine", "runtime").(string); ok {
			name, file = text, l.path
		}
		runtimes, _ := get(l.config, "engine", "runtimes").(map[string]any)
		for name, list := range runtimes {
			paths[name], _ = list.([]any)
		}
	}
	return name, file, paths, nil
}

// addPodmanRuntime records podman's default runtime. Without a setting podman takes crun, or else runc.
func (e *edit) addPodmanRuntime() error {
	name, file, paths, err := e.podmanRuntime()
	if err != nil {
		return err
	}
	names := []string{name}
	if name == "" {
		names = []string{"crun", "runc"}
	}
	for _, name := range names {
		for _, path := range paths[name] {
			if text, ok := path.(string); ok && e.host.isFile(text) {
				return e.addRuntime(text, file)
			}
		}
		if e.hasProgram(name) {
			return e.addRuntime(name, file)
		}
	}
	return e.addRuntime(name, file)
}

func removePodman(e *edit) error {
	name, file, _, err := e.podmanRuntime()
	if err != nil {
		return err
	}
	if name == runtimeName && e.files[podmanDropIn] != nil {
		return &SettingError{file, isDefault("runtime")}
	}
	return errors.Join(e.remove(precreate), e.remove(podmanDropIn))
}

// addLive puts the hook into a directory that CRI-O and podman read.
func addLive(e *edit) error {
	dirs, file, err := e.hookDirs(crioConfigs, "", "crio", "runtime")
	if err != nil {
		return err
	}
	for _, dir := range append(dirs, commonHooks) {
		if dir != commonHooks && dir != adminHooks {
			continue
		}
		if dirs != nil && !slices.Contains(dirs, dir) {
			return &SettingError{file, "sets hooks_dir without " + commonHooks + " and " + adminHooks}
		}
		return e.own(dir+"/"+liveHook, e.document(createRuntimeDocument))
	}
	return nil
}

func removeLive(e *edit) error {
	return errors.Join(e.remove(commonHooks+"/"+liveHook), e.remove(adminHooks+"/"+liveHook))
}

// hookDirs returns the value of hooks_dir in a table of an engine's configuration, and the file that sets it. If
// several files set it, the last one counts. Our own file is ignored. The result is nil if no file sets it, and not nil
// for an empty list.
func (e *edit) hookDirs(patterns []string, own string, table ...string) (dirs []string, file string, err error) {
	layers, err := e.layers(patterns)
	if err != nil {
		return nil, "", err
	}
	for _, l := range layers {
		value := get(l.config, append(table, "hooks_dir")...)
		if value == nil || l.path == own {
			continue
		}
		list, ok := value.([]any)
		if !ok {
			return nil, "", &SettingError{l.path, "sets hooks_dir to something else than a list"}
		}
		dirs, file = []string{}, l.path
		for _, dir := range list { // podman 5 also has {append=true} here
			if text, ok := dir.(string); ok {
				dirs = append(dirs, text)
			}
		}
	}
	return dirs, file, nil
}

// hookPath is the path of prestart-hook in the documents.
const hookPath = "/usr/local/sbin/prestart-hook"

var (
	// precreateDocument is a document of oci-hooks(5) for podman. CRI-O does not start if a hooks directory has it, since
	// CRI-O has no stage precreate.
	//
	//go:embed hooks.d/precreate.json
	precreateDocument string

	// createRuntimeDocument is a document of oci-hooks(5) for CRI-O and podman.
	//
	//go:embed hooks.d/create-runtime.json
	createRuntimeDocument string
)

// document returns a document with the path of this host's hook.
func (e *edit) document(text string) string {
	quoted, _ := json.Marshal(e.hook) // a string cannot fail
	return strings.Replace(text, `"`+hookPath+`"`, string(quoted), 1)
}
