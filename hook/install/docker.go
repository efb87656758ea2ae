package install

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
)

// addDocker adds only the runtime. dockerd has CDI on by default since 28.2, and does not start if daemon.json has
// "features" and its command line --feature.
func addDocker(e *edit) error {
	if err := e.addWrapper(); err != nil {
		return err
	}
	original, err := e.shared(daemonFile)
	if err != nil {
		return err
	}
	if original == nil {
		e.record.Made = append(e.record.Made, daemonFile)
		original = []byte("{\n}\n")
	}
	if isEmpty(original) {
		original = slices.Concat(original, []byte("{\n}\n"))
		if !slices.Contains(e.record.Daemon, wholeObject) {
			e.record.Daemon = append(e.record.Daemon, wholeObject)
		}
	}
	settings, err := readDaemon(original)
	if err != nil {
		return err
	}
	flags := e.dockerFlags()
	if config := flags.config; config.value != "" && config.value != daemonFile {
		return &SettingError{config.file, "sets --config-file to " + config.value + ": dockerd does not read " + daemonFile}
	}
	args, err := e.addDockerRuntime(settings, flags)
	if err != nil {
		return err
	}
	entry := fmt.Sprintf(`{"path": %q}`, e.wrapper())
	if len(args) > 0 {
		quoted, _ := json.Marshal(args) // strings cannot fail
		entry = fmt.Sprintf(`{"path": %q, "runtimeArgs": %s}`, e.wrapper(), quoted)
	}
	runtime, exists := settings.Runtimes[runtimeName]
	switch {
	case exists && runtime.Path == e.wrapper():
		e.put(daemonFile, original)
		return nil
	case exists && !isWrapper(runtime.Path):
		return &SettingError{daemonFile, "already has another runtime " + runtimeName}
	}
	mark, document := cutMark(original)
	text, added, err := setKey(document, strings.Split(runtimeKey, "."), entry)
	if err != nil {
		return fmt.Errorf("change %s: %w", daemonFile, err)
	}
	for _, key := range added {
		if !slices.Contains(e.record.Daemon, key) {
			e.record.Daemon = append(e.record.Daemon, key)
		}
	}
	e.put(daemonFile, slices.Concat(mark, text))
	return nil
}

// wholeObject stands in the record for the object in a daemon.json that was empty, as dockerd allows.
const wholeObject = "{}"

// byteOrderMark may begin a daemon.json.
const byteOrderMark = "\xef\xbb\xbf"

// cutMark splits a file into the byte order mark, which it need not have, and its document.
func cutMark(text []byte) (mark, document []byte) {
	document = bytes.TrimPrefix(text, []byte(byteOrderMark))
	return text[:len(text)-len(document)], document
}

// isEmpty reports whether a file has no document.
func isEmpty(text []byte) bool {
	_, document := cutMark(text)
	return len(bytes.TrimSpace(document)) == 0
}

const runtimeKey = "runtimes." + runtimeName

// daemonSettings are the settings of daemon.json that are read here.
type daemonSettings struct {
	Features map[string]bool
	Runtimes map[string]daemonRuntime
	Default  string   `json:"default-runtime"`
	SpecDirs []string `json:"cdi-spec-dirs"`
	SELinux  *bool    `json:"selinux-enabled"`
}

// daemonRuntime is a program with arguments, or a shim of containerd with options.
type daemonRuntime struct {
	Path    string
	Args    []string `json:"runtimeArgs"`
	Type    string   `json:"runtimeType"`
	Options map[string]any
}

// addDockerRuntime records dockerd's default runtime, and returns the arguments that dockerd gives it. Where that is a
// shim for other programs than runc, it is runc.
func (e *edit) addDockerRuntime(settings daemonSettings, flags dockerFlags) (args []string, err error) {
	name, file := settings.Default, daemonFile
	if name == "" {
		name, file = flags.defaultRuntime.value, flags.defaultRuntime.file
	}
	runtime, ok := settings.Runtimes[name]
	if name == runtimeName {
		return runtime.Args, nil // ours: what was recorded before stays
	}
	if !ok {
		runtime.Path = flags.runtimes[name]
	}
	program := runtime.Path
	if runtime.Type == shim {
		program, _ = runtime.Options["BinaryName"].(string)
	}
	return runtime.Args, e.addRuntime(cmp.Or(program, "runc"), file)
}

// option is a word or the value of an option in dockerd's command line, and the file that has it.
type option struct{ value, file string }

// dockerFlags are the flags of dockerd's command line that contradict or complete daemon.json.
type dockerFlags struct {
	config, defaultRuntime option
	runtimes               map[string]string // by --add-runtime
	cdi                    option            // "true" or "false" by --feature cdi
	specDirs               []option
}

// The files with dockerd's command line. A unit or drop-in in an earlier directory replaces one of the same name in a
// later one.
var (
	unitDirs  = []string{"/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"}
	dockerEnv = []string{"/etc/default/docker", "/etc/sysconfig/docker", "/etc/conf.d/docker"}
)

func dockerReads() []string {
	reads := append([]string{daemonFile}, dockerEnv...)
	for _, dir := range unitDirs {
		reads = append(reads, dir+"/docker.service", dir+"/docker.service.d/*.conf")
	}
	return reads
}

func (e *edit) dockerFlags() dockerFlags {
	units, dropIns := map[string]string{}, map[string]string{}
	for _, dir := range slices.Backward(unitDirs) {
		for _, file := range e.matching(dir + "/docker.service") {
			units["docker.service"] = file
		}
		for _, file := range e.matching(dir + "/docker.service.d/*.conf") {
			dropIns[path.Base(file)] = file
		}
	}
	var words []option
	for _, names := range []map[string]string{units, dropIns} {
		for _, name := range slices.Sorted(maps.Keys(names)) {
			words = addWords(words, names[name], string(e.files[names[name]].Data))
		}
	}
	for _, file := range dockerEnv {
		if f := e.files[file]; f != nil {
			words = addWords(words, file, string(f.Data))
		}
	}
	return parseFlags(words)
}

// addWords adds the words of a file to those of a command line. An empty ExecStart removes those before it.
func addWords(words []option, file, text string) []option {
	for line := range strings.Lines(strings.ReplaceAll(text, "\\\n", " ")) {
		line = strings.TrimSpace(line)
		if line == "" || strings.ContainsAny(line[:1], "#;[") {
			continue
		}
		key, value, _ := strings.Cut(line, "=")
		if key == "ExecStart" && value == "" {
			words = nil
		}
		for word := range strings.FieldsFuncSeq(line, func(r rune) bool { return strings.ContainsRune(" \t'\"", r) }) {
			words = append(words, option{word, file})
		}
	}
	return words
}

func parseFlags(words []option) dockerFlags {
	flags := dockerFlags{runtimes: map[string]string{}}
	for i, word := range words {
		_, text, _ := strings.Cut(word.value, "--") // also in OPTIONS=--debug
		name, value, hasValue := strings.Cut(text, "=")
		if !hasValue && i+1 < len(words) {
			value = words[i+1].value
		}
		switch name {
		case "config-file":
			flags.config = option{value, word.file}
		case "default-runtime":
			flags.defaultRuntime = option{value, word.file}
		case "add-runtime":
			if name, path, ok := strings.Cut(value, "="); ok {
				flags.runtimes[name] = path
			}
		case "feature":
			if feature, on, explicit := strings.Cut(value, "="); feature == "cdi" {
				flags.cdi = option{strconv.FormatBool(!explicit || on == "true"), word.file}
			}
		case "cdi-spec-dir":
			flags.specDirs = append(flags.specDirs, option{value, word.file})
		}
	}
	return flags
}

func readDaemon(text []byte) (s daemonSettings, err error) {
	if isEmpty(text) {
		return s, nil
	}
	_, document := cutMark(text)
	if _, err = parseObject(document); err == nil {
		err = json.Unmarshal(document, &s)
	}
	if bytes.HasPrefix(text, []byte("\xff\xfe")) || bytes.HasPrefix(text, []byte("\xfe\xff")) {
		return s, &SettingError{daemonFile, "is in UTF-16: write it again in UTF-8"}
	}
	if err != nil {
		return s, fmt.Errorf("read %s: %w", daemonFile, err)
	}
	return s, nil
}

func removeDocker(e *edit) error {
	original, err := e.shared(daemonFile)
	keys := e.record.Daemon
	e.record.Daemon = nil
	if err != nil {
		return err
	}
	settings, err := readDaemon(original)
	if err != nil {
		return err
	}
	runtime, exists := settings.Runtimes[runtimeName]
	byFlag := e.dockerFlags().defaultRuntime
	switch isOurs := isWrapper(runtime.Path); {
	case isOurs && settings.Default == runtimeName:
		return &SettingError{daemonFile, isDefault("default-runtime")}
	case isOurs && byFlag.value == runtimeName:
		return &SettingError{byFlag.file, isDefault("--default-runtime")}
	case isOurs && !slices.Contains(keys, runtimeKey):
		keys = append(slices.Clip(keys), runtimeKey)
	case exists && !isOurs && slices.Contains(keys, runtimeKey):
		e.kept = append(e.kept, daemonFile)
		keys = slices.DeleteFunc(slices.Clone(keys), func(key string) bool { return key == runtimeKey })
	}
	if isEmpty(original) {
		return nil
	}
	if slices.Contains(keys, "features.cdi") { // version 0.1.0 added it
		e.service.Reload = false
	}
	mark, text := cutMark(original)
	for _, key := range slices.Backward(keys) {
		if key == wholeObject || key == "features.cdi" && !settings.Features["cdi"] {
			continue // below; or it has been switched off since
		}
		isObject := !strings.Contains(key, ".")
		if text, err = removeKey(text, strings.Split(key, "."), isObject); err != nil {
			return fmt.Errorf("change %s: %w", daemonFile, err)
		}
	}
	switch {
	case isEmptyObject(text) && e.record.made(daemonFile):
		e.put(daemonFile, nil)
		return nil
	case isEmptyObject(text) && slices.Contains(keys, wholeObject):
		text = text[:bytes.IndexByte(text, '{')]
	}
	e.put(daemonFile, append(append([]byte{}, mark...), text...)) // not nil, even if it is empty
	return nil
}
