package install

import (
	"encoding/json"
	"fmt"
	"slices"
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
	settings, err := readDaemon(original)
	if err != nil {
		return err
	}
	runtime, exists := settings.Runtimes[runtimeName]
	switch {
	case exists && runtime.Path == e.wrapper():
		e.put(daemonFile, original)
		return nil
	case exists && !runsWrapper(runtime.Path):
		return &SettingError{daemonFile, "already has another runtime " + runtimeName}
	}
	text, added, err := setKey(original, strings.Split(runtimeKey, "."), fmt.Sprintf("{\"path\": %q}", e.wrapper()))
	if err != nil {
		return fmt.Errorf("change %s: %w", daemonFile, err)
	}
	for _, key := range added {
		if !slices.Contains(e.record.Daemon, key) {
			e.record.Daemon = append(e.record.Daemon, key)
		}
	}
	e.put(daemonFile, text)
	return nil
}

const runtimeKey = "runtimes." + runtimeName

// daemonSettings are the parts of daemon.json that matter here.
type daemonSettings struct {
	Features map[string]bool
	Runtimes map[string]struct{ Path string }
	Default  string `json:"default-runtime"`
}

func readDaemon(text []byte) (s daemonSettings, err error) {
	if _, err = parseObject(text); err == nil {
		err = json.Unmarshal(text, &s)
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
	if err != nil || original == nil {
		return err
	}
	settings, err := readDaemon(original)
	if err != nil {
		return err
	}
	runtime, exists := settings.Runtimes[runtimeName]
	switch isOurs := runsWrapper(runtime.Path); {
	case exists && isOurs && settings.Default == runtimeName:
		return &SettingError{daemonFile, isDefault("default-runtime")}
	case exists && isOurs && !slices.Contains(keys, runtimeKey):
		keys = append(slices.Clip(keys), runtimeKey)
	case exists && !isOurs && slices.Contains(keys, runtimeKey):
		e.kept = append(e.kept, daemonFile)
		keys = slices.DeleteFunc(slices.Clone(keys), func(key string) bool { return key == runtimeKey })
	}
	text := original
	for _, key := range slices.Backward(keys) {
		if key == "features.cdi" && !settings.Features["cdi"] { // version 0.1.0 added it
			continue // it has been switched off since
		}
		isObject := !strings.Contains(key, ".")
		if text, err = removeKey(text, strings.Split(key, "."), isObject); err != nil {
			return fmt.Errorf("change %s: %w", daemonFile, err)
		}
	}
	if isEmptyObject(text) && e.record.made(daemonFile) {
		text = nil
	}
	e.put(daemonFile, text)
	return nil
}
