package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// editConfig applies edits to a config.json. The result is nil if they change nothing.
//
// It compares the configuration before and after the CDI library's edits, and applies the difference to the JSON of the
// file, so that keys which the library does not know stay.
func editConfig(data []byte, edits *cdilib.ContainerEdits) ([]byte, error) {
	original, err := decodeJSON(data)
	if err != nil {
		return nil, err
	}
	config, err := parseConfig(data)
	if err != nil {
		return nil, err
	}
	before, err := toJSON(config)
	if err != nil {
		return nil, err
	}
	if err := applyEdits(config, edits); err != nil {
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

// parseConfig reads a configuration as the CDI library and runtimes do.
func parseConfig(data []byte) (*oci.Spec, error) {
	var config oci.Spec
	err := json.Unmarshal(data, &config)
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok { // its text has names of Go types
		err = fmt.Errorf("unexpected %s in %q", e.Value, e.Field)
	}
	if err != nil {
		return nil, fmt.Errorf("not an OCI configuration: %w", err)
	}
	if config.Process == nil {
		return nil, errors.New("not the configuration of a container that can be started: it has no process")
	}
	return &config, nil
}

// applyEdits applies edits as the CDI library does, but edits that were applied before change nothing.
func applyEdits(config *oci.Spec, edits *cdilib.ContainerEdits) error {
	before, after := driverOf(config), driverVersion(&specs.Spec{ContainerEdits: *edits.ContainerEdits})
	if before != "" && after != "" && before != after {
		// The files have the version in their names, so the container would have both, and a hook for each.
		return &OtherDriverError{before, after}
	}
	var mounts []oci.Mount
	var devices []oci.LinuxDevice
	if mounts = slices.Clone(config.Mounts); config.Linux != nil {
		devices = slices.Clone(config.Linux.Devices)
	}
	var hooks []int
	for _, list := range hookLists(config) {
		hooks = append(hooks, len(*list))
	}
	rules := len(rulesOf(config))

	if err := edits.Apply(config); err != nil {
		return fmt.Errorf("%w: %w", ErrStale, err)
	}
	// The library appends hooks and cgroup rules even if they are there already.
	for i, list := range hookLists(config) {
		old := 0
		if i < len(hooks) {
			old = hooks[i]
		}
		*list = appendNew((*list)[:old:old], (*list)[old:], nil)
	}
	if all := rulesOf(config); len(all) > rules {
		config.Linux.Resources.Devices = appendNew(all[:rules:rules], all[rules:],
			func(r oci.LinuxDeviceCgroup) bool { return !r.Allow })
	}
	// It moves mounts and devices that it adds again to the end. Mounts can hide each other: the library's order stays
	// unless the old one has no path behind one that is in it either.
	if config.Linux != nil {
		config.Linux.Devices = inOrder(devices, config.Linux.Devices)
	}
	depth := func(m oci.Mount) int { return strings.Count(filepath.Clean(m.Destination), "/") } // the library's order
	mounts = inOrder(mounts, config.Mounts)
	if slices.IsSortedFunc(mounts, func(a, b oci.Mount) int { return depth(a) - depth(b) }) {
		config.Mounts = mounts
	}
	return nil
}

// driverOf is the version of the driver whose files are in a configuration, or empty.
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

// inOrder is the list after in which the elements that are in before too come first, in the order of before.
func inOrder[T any](before, after []T) []T {
	var list []T
	for _, b := range before {
		if i := slices.IndexFunc(after, func(a T) bool { return reflect.DeepEqual(a, b) }); i >= 0 {
			list = append(list, after[i])
			after = slices.Delete(slices.Clone(after), i, i+1)
		}
	}
	return append(list, after...)
}

// appendNew appends the elements of more that the list does not have after its last barrier.
func appendNew[T any](list, more []T, barrier func(T) bool) []T {
	for _, m := range more {
		from := 0
		for i := range list {
			if barrier != nil && barrier(list[i]) {
				from = i + 1
			}
		}
		if !slices.ContainsFunc(list[from:], func(e T) bool { return reflect.DeepEqual(e, m) }) {
			list = append(list, m)
		}
	}
	return list
}

// rulesOf are the rules of the device cgroup. The last rule that matches counts, so an allowance before a denial has no
// effect.
func rulesOf(config *oci.Spec) []oci.LinuxDeviceCgroup {
	if config.Linux == nil || config.Linux.Resources == nil {
		return nil
	}
	return config.Linux.Resources.Devices
}

func hookLists(config *oci.Spec) []*[]oci.Hook {
	h := config.Hooks
	if h == nil {
		return nil
	}
	return []*[]oci.Hook{
		&h.Prestart, //nolint:staticcheck // deprecated, but CDI specs may have them
		&h.CreateRuntime, &h.CreateContainer, &h.StartContainer, &h.Poststart, &h.Poststop,
	}
}
