package cdi

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/trust"
)

// editConfig applies edits to a config.json and adds annotations. If they change nothing, the result is nil.
//
// It applies the edits with the CDI library, and then makes the same changes to the JSON of the file, so that keys
// which the library does not know remain.
func editConfig(
	data []byte, edits *cdilib.ContainerEdits, annotations map[string]string, makesNodes bool,
) ([]byte, error) {
	if !utf8.Valid(data) { // decoding would replace invalid bytes, for example in a mount's path
		return nil, errors.New("not JSON: it is not UTF-8")
	}
	original, err := decodeJSON(data)
	if err != nil {
		return nil, err
	}
	old, err := parseConfig(data)
	if err != nil {
		return nil, err
	}
	config, err := parseConfig(data)
	if err != nil {
		return nil, err
	}
	if err := applyEdits(old, config, edits, makesNodes); err != nil {
		return nil, err
	}
	if len(annotations) > 0 && config.Annotations == nil {
		config.Annotations = map[string]string{}
	}
	maps.Copy(config.Annotations, annotations)
	before, err := toJSON(old)
	if err != nil {
		return nil, err
	}
	after, err := toJSON(config)
	if err != nil || reflect.DeepEqual(before, after) {
		return nil, err
	}
	merged, err := mergeJSON(original, before, after)
	if err != nil {
		return nil, err
	}
	return encodeJSON(merged)
}

// parseConfig reads a config.json like the CDI library and runtimes do.
func parseConfig(data []byte) (*oci.Spec, error) {
	var config oci.Spec
	err := json.Unmarshal(data, &config)
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok { // the error's text has names of Go types
		err = fmt.Errorf("unexpected %s in %q", e.Value, e.Field)
	}
	if err != nil {
		return nil, fmt.Errorf("not an OCI configuration: %w", err)
	}
	if config.Process == nil {
		return nil, errors.New("the OCI configuration has no process, so its container cannot be started")
	}
	return &config, nil
}

// applyEdits applies edits to config like the CDI library does. Config must equal old. Edits that config has already
// change nothing.
func applyEdits(old, config *oci.Spec, edits *cdilib.ContainerEdits, makesNodes bool) error {
	before, after := driverOf(old), driverVersion(&specs.Spec{ContainerEdits: *edits.ContainerEdits})
	if before != "" && after != "" && before != after {
		// File names contain the driver's version, so the container would get both drivers, each with its hook.
		return &OtherDriverError{before, after}
	}
	if err := edits.Apply(config); err != nil {
		return fmt.Errorf("%w: %w", ErrStale, err)
	}
	inUserNamespace := hasUserNamespace(config)
	if inUserNamespace {
		removeIDMap(old, config, edits)
	}
	if (inUserNamespace || trust.WithoutRoot()) && !makesNodes {
		bindNodes(old, config, edits)
	}
	// The library appends hooks and cgroup rules even if they exist already.
	lists := hookLists(config)
	for i, list := range hookLists(old) {
		n := len(*list)
		*lists[i] = appendNew((*lists[i])[:n:n], (*lists[i])[n:])
	}
	if rules, n := rulesOf(config), len(rulesOf(old)); len(rules) > n {
		effective := 0 // the first rule that no denial follows: the last matching rule counts
		for i, r := range rules[:n] {
			if !r.Allow {
				effective = i + 1
			}
		}
		list := appendNew(rules[effective:n:n], rules[n:])
		config.Linux.Resources.Devices = append(rules[:effective:effective], list...)
	}
	// The library moves mounts and devices that it adds again to the end. There, a mount on a directory could hide an
	// earlier mount inside, so the old order of mounts is kept only if it is one in which the library would sort them.
	depth := func(m oci.Mount) int { return strings.Count(filepath.Clean(m.Destination), "/") }
	mounts := inOldOrder(old.Mounts, config.Mounts)
	if slices.IsSortedFunc(mounts, func(a, b oci.Mount) int { return depth(a) - depth(b) }) {
		config.Mounts = mounts
	}
	if old.Linux != nil {
		config.Linux.Devices = inOldOrder(old.Linux.Devices, config.Linux.Devices)
	}
	return nil
}

func hasUserNamespace(config *oci.Spec) bool {
	isUser := func(n oci.LinuxNamespace) bool { return n.Type == oci.UserNamespace }
	return config.Linux != nil && slices.ContainsFunc(config.Linux.Namespaces, isUser)
}

// isRootOf reports whether a user of the host is root in the user namespace of a config.json.
func isRootOf(data []byte, uid uint32) bool {
	config, err := parseConfig(data)
	isRoot := func(m oci.LinuxIDMapping) bool { return m.ContainerID == 0 && m.HostID == uid && m.Size > 0 }
	return err == nil && hasUserNamespace(config) && slices.ContainsFunc(config.Linux.UIDMappings, isRoot)
}

// removeIDMap gives new mounts the options of the edits, without "idmap", which the library adds. With this option the
// container's root would own the host's files, and could write to them if it may change its mounts. The overlayfs that
// holds the files in a driver container does not support it.
func removeIDMap(old, config *oci.Spec, edits *cdilib.ContainerEdits) {
	for _, m := range edits.Mounts {
		i := slices.IndexFunc(config.Mounts, func(c oci.Mount) bool { return c.Destination == m.ContainerPath })
		isSame := func(o oci.Mount) bool { return reflect.DeepEqual(o, config.Mounts[i]) }
		if i >= 0 && !slices.ContainsFunc(old.Mounts, isSame) {
			config.Mounts[i].Options = slices.Clone(m.Options)
		}
	}
}

// bindNodes replaces new device nodes by bind mounts of the host's nodes, which keep their owner and mode. The rules
// of the device cgroup stay. The mounts come last, so that no other mount hides them.
func bindNodes(old, config *oci.Spec, edits *cdilib.ContainerEdits) {
	for _, n := range edits.DeviceNodes {
		isNode := func(d oci.LinuxDevice) bool { return d.Path == n.Path }
		i := slices.IndexFunc(config.Linux.Devices, isNode)
		if i < 0 || old.Linux != nil && slices.ContainsFunc(old.Linux.Devices, isNode) {
			continue
		}
		config.Linux.Devices = slices.Delete(config.Linux.Devices, i, i+1)
		isMount := func(m oci.Mount) bool { return m.Destination == n.Path }
		config.Mounts = append(slices.DeleteFunc(config.Mounts, isMount), oci.Mount{
			Destination: n.Path, Source: cmp.Or(n.HostPath, n.Path), Type: "bind",
			Options: []string{"bind", "rw", "nosuid", "noexec", "rprivate"},
		})
	}
}

// driverOf returns the version of the driver whose files are in a config.json, or "".
func driverOf(config *oci.Spec) string {
	var edits specs.ContainerEdits
	for _, m := range config.Mounts {
		edits.Mounts = append(edits.Mounts, &specs.Mount{ContainerPath: m.Destination})
	}
	for _, list := range hookLists(config) {
		for _, h := range *list {
			edits.Hooks = append(edits.Hooks, &specs.Hook{Args: h.Args})
		}
	}
	return driverVersion(&specs.Spec{ContainerEdits: edits})
}

// inOldOrder returns `before` if it has the same elements as `after` in any order, and `after` otherwise.
func inOldOrder[T any](before, after []T) []T {
	if len(before) != len(after) {
		return after
	}
	left := make(map[string]int, len(after))
	for _, a := range after {
		left[keyOf(a)]++
	}
	for _, b := range before {
		key := keyOf(b)
		if left[key] == 0 {
			return after
		}
		left[key]--
	}
	return before
}

// appendNew appends those elements of `more` that are not in `list`.
func appendNew[T any](list, more []T) []T {
	has := make(map[string]bool, len(list))
	for _, e := range list {
		has[keyOf(e)] = true
	}
	for _, m := range more {
		if key := keyOf(m); !has[key] {
			has[key] = true
			list = append(list, m)
		}
	}
	return list
}

// rulesOf returns the rules of the device cgroup.
func rulesOf(config *oci.Spec) []oci.LinuxDeviceCgroup {
	if config.Linux == nil || config.Linux.Resources == nil {
		return nil
	}
	return config.Linux.Resources.Devices
}

func hookLists(config *oci.Spec) []*[]oci.Hook {
	h := cmp.Or(config.Hooks, &oci.Hooks{})
	return []*[]oci.Hook{
		&h.Prestart, //nolint:staticcheck // deprecated, but CDI specs may have them
		&h.CreateRuntime, &h.CreateContainer, &h.StartContainer, &h.Poststart, &h.Poststop,
	}
}
