package install

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// Settings is what an engine's configuration says about devices. A setting that no file has is nil or empty: then the
// engine's default is in effect.
type Settings struct {
	// Files are the engine's files that exist, sorted.
	Files []string
	// Version is the version of containerd's config.toml, 0 without the file.
	Version int64
	// Elsewhere is a file that the engine reads and Read does not know, or empty. The other settings are unknown then.
	Elsewhere string
	// WithoutCRI is the file that disables containerd's CRI plugin, or empty.
	WithoutCRI string

	// CDI is the setting that turns CDI on or off, in CDIFile.
	CDI     *bool
	CDIFile string
	// SpecDirs are the directories of CDI specs, in SpecDirsFile. An empty list that is not nil turns CDI off.
	SpecDirs     []string
	SpecDirsFile string

	// Runtimes has the program of each runtime that a file defines: a path, a name, or "" for the engine's own.
	Runtimes map[string]string
	// Default is the name of the default runtime, in DefaultFile.
	Default     string
	DefaultFile string

	// Devices are the devices that each container gets unless it requests others, in DevicesFile.
	Devices     []string
	DevicesFile string
	// HookDirs are the directories of OCI hooks, in HookDirsFile.
	HookDirs     []string
	HookDirsFile string
	// PIDsLimit is the limit of processes in a container, in PIDsFile.
	PIDsLimit *int64
	PIDsFile  string
	// SELinux is whether the engine gives containers SELinux labels.
	SELinux *bool
}

// Program returns the program of the default runtime, or "" if it is the engine's own choice.
func (s *Settings) Program() string {
	if program := s.Runtimes[s.Default]; program != "" {
		return program
	}
	return s.Default
}

// Settings returns the settings of an engine whose files were read. An error means that a file cannot be parsed, so
// that the engine does not start with it either.
func (h *Host) Settings(engine string) (*Settings, error) {
	e, err := h.edit("")
	if err != nil {
		return nil, err
	}
	s := &Settings{Runtimes: map[string]string{}}
	switch engine {
	case "podman":
		err = e.podmanSettings(s)
	case "docker":
		err = e.dockerSettings(s)
	case "containerd":
		err = e.containerdSettings(s)
	case "crio":
		err = e.crioSettings(s)
	default:
		err = fmt.Errorf("%w %q", ErrUnknown, engine)
	}
	if n := len(s.Runtimes); err == nil && n > maxRuntimes {
		err = fmt.Errorf("read the settings of %s: they define %d runtimes, the limit is %d", engine, n, maxRuntimes)
	}
	return s, err
}

// maxRuntimes is how many runtimes an engine may have: each can be the subject of a message.
const maxRuntimes = 100

// addLayer takes the settings of one TOML file over those of earlier ones.
func addLayer[T any](l layer, into *T, file *string, keys ...string) {
	value, ok := get(l.config, keys...).(T)
	if !ok {
		return
	}
	*into = value
	if file != nil {
		*file = l.path
	}
}

// addList is like addLayer, for a list of paths. It ignores other values in the list.
func addList(l layer, into *[]string, file *string, keys ...string) {
	var list []any
	addLayer(l, &list, file, keys...)
	if list == nil {
		return
	}
	*into = []string{}
	for _, value := range list {
		if text, ok := value.(string); ok {
			*into = append(*into, text)
		}
	}
}

// addPointer is like addLayer, for a setting that need not exist.
func addPointer[T any](l layer, into **T, file *string, keys ...string) {
	if value, ok := get(l.config, keys...).(T); ok {
		*into = &value
		if file != nil {
			*file = l.path
		}
	}
}

func (s *Settings) addFiles(layers []layer) {
	for _, l := range layers {
		s.Files = append(s.Files, l.path)
	}
}

func (e *edit) podmanSettings(s *Settings) error {
	layers, err := e.layers(podmanConfigs)
	if err != nil {
		return err
	}
	s.addFiles(layers)
	for _, l := range layers {
		addList(l, &s.SpecDirs, &s.SpecDirsFile, "engine", "cdi_spec_dirs")
		addList(l, &s.HookDirs, &s.HookDirsFile, "engine", "hooks_dir")
		addPointer(l, &s.PIDsLimit, &s.PIDsFile, "containers", "pids_limit")
		addList(l, &s.Devices, &s.DevicesFile, "containers", "devices")
		addPointer(l, &s.SELinux, nil, "containers", "label")
	}
	name, file, paths, err := e.podmanRuntime()
	s.Default, s.DefaultFile = name, file
	for name, list := range paths {
		for _, path := range list { // the first that exists counts
			if text, ok := path.(string); ok && (s.Runtimes[name] == "" || !e.host.isFile(s.Runtimes[name])) {
				s.Runtimes[name] = text
			}
		}
	}
	return err
}

func (e *edit) crioSettings(s *Settings) error {
	layers, err := e.layers(crioConfigs)
	if err != nil {
		return err
	}
	s.addFiles(layers)
	for _, l := range layers {
		addList(l, &s.SpecDirs, &s.SpecDirsFile, "crio", "runtime", "cdi_spec_dirs")
		addList(l, &s.HookDirs, &s.HookDirsFile, "crio", "runtime", "hooks_dir")
		addPointer(l, &s.PIDsLimit, &s.PIDsFile, "crio", "runtime", "pids_limit")
		addList(l, &s.Devices, &s.DevicesFile, "crio", "runtime", "additional_devices")
		addPointer(l, &s.SELinux, nil, "crio", "runtime", "selinux")
	}
	runtimes, err := e.crioRuntimes()
	if err != nil {
		return err
	}
	s.Default, s.DefaultFile = runtimes.name, runtimes.file
	for name, handler := range runtimes.handlers {
		s.Runtimes[name], _ = handler["runtime_path"].(string)
	}
	return nil
}

func (e *edit) containerdSettings(s *Settings) error {
	layers, _, err := e.containerdLayers()
	if err != nil || len(layers) == 0 {
		return err
	}
	s.addFiles(layers)
	s.Version, _ = layers[0].config["version"].(int64)
	s.WithoutCRI = disablesCRI(layers)
	l, ok := layoutOf(layers[0].config)
	if !ok { // version 1, without imports that matter
		old, _ := get(layers[0].config, "plugins", "cri").(map[string]any)
		layers = []layer{{containerdFile, map[string]any{"plugins": map[string]any{"io.containerd.grpc.v1.cri": old}}}}
		l = layout{2, "io.containerd.grpc.v1.cri"}
	}
	cri := layer{containerdFile, l.merged(layers)}
	for _, file := range layers { // the last file with the setting
		var discard *bool
		addPointer(layer{file.path, criTable(file.config)}, &discard, &s.CDIFile, "enable_cdi")
		addList(layer{file.path, criTable(file.config)}, new([]string), &s.SpecDirsFile, "cdi_spec_dirs")
	}
	addPointer(cri, &s.CDI, nil, "enable_cdi")
	addList(cri, &s.SpecDirs, nil, "cdi_spec_dirs")
	addPointer(cri, &s.SELinux, nil, "enable_selinux")
	_, s.DefaultFile = defaultRuntime(layers)
	s.Default, _ = get(cri.config, "containerd", "default_runtime_name").(string)
	runtimes, _ := get(cri.config, "containerd", "runtimes").(map[string]any)
	for name, table := range runtimes {
		runtime, _ := table.(map[string]any)
		s.Runtimes[name], _ = get(runtime, "options", "BinaryName").(string)
	}
	return nil
}

func (e *edit) dockerSettings(s *Settings) error {
	flags := e.dockerFlags()
	if config := flags.config; config.value != "" && config.value != daemonFile {
		s.Elsewhere = config.value
		return nil
	}
	for _, file := range append([]string{daemonFile}, dockerEnv...) {
		if e.files[file] != nil {
			s.Files = append(s.Files, file)
		}
	}
	var settings daemonSettings
	if f := e.files[daemonFile]; f != nil {
		var err error
		if settings, err = readDaemon(f.Data); err != nil {
			return err
		}
	}
	if on, ok := settings.Features["cdi"]; ok {
		s.CDI, s.CDIFile = &on, daemonFile
	} else if flags.cdi.value != "" {
		on := flags.cdi.value == "true"
		s.CDI, s.CDIFile = &on, flags.cdi.file
	}
	if settings.SpecDirs != nil {
		s.SpecDirs, s.SpecDirsFile = settings.SpecDirs, daemonFile
	} else if len(flags.specDirs) > 0 {
		for _, dir := range flags.specDirs {
			s.SpecDirs, s.SpecDirsFile = append(s.SpecDirs, dir.value), dir.file
		}
	}
	s.SELinux = settings.SELinux
	s.Default, s.DefaultFile = settings.Default, daemonFile
	if s.Default == "" {
		s.Default, s.DefaultFile = flags.defaultRuntime.value, flags.defaultRuntime.file
	}
	maps.Copy(s.Runtimes, flags.runtimes)
	for name, runtime := range settings.Runtimes {
		program, _ := runtime.Options["BinaryName"].(string)
		s.Runtimes[name] = cmp.Or(runtime.Path, program)
	}
	return nil
}

// HookDirs returns the directories of OCI hooks that podman and CRI-O read by default.
func HookDirs() []string { return []string{commonHooks, adminHooks} }

// IsRuntimeOfNVIDIA reports whether a program of a host, a path or a name, is or leads to NVIDIA's container runtime,
// which reads NVIDIA_VISIBLE_DEVICES from a container's environment and so from its image. A script that runs it is not
// known.
func IsRuntimeOfNVIDIA(root, program string) bool {
	return isRuntimeOfNVIDIA(program, func(name string) string { return target(root, name) })
}

func isRuntimeOfNVIDIA(program string, leadsTo func(path string) string) bool {
	paths := []string{program}
	if !path.IsAbs(program) {
		for _, dir := range programDirs {
			paths = append(paths, path.Join(dir, program))
		}
	}
	isNVIDIAs := func(name string) bool {
		rest, ok := strings.CutPrefix(path.Base(name), "nvidia-container-runtime")
		return ok && (rest == "" || rest[0] == '.' || rest == "-experimental") // .cdi and others are the same program
	}
	return program != "" && slices.ContainsFunc(paths, func(name string) bool {
		return isNVIDIAs(name) || isNVIDIAs(leadsTo(name))
	})
}
