package cdi

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// mergeJSON carries the change from before to after over to original, which before is a lossy view of: whatever of
// original is not in before stays.
func mergeJSON(original, before, after any) (any, error) {
	switch a := after.(type) {
	case map[string]any:
		o, ok1 := original.(map[string]any)
		b, ok2 := before.(map[string]any)
		if ok1 && ok2 {
			return o, mergeObject(o, b, a)
		}
	case []any:
		o, ok1 := original.([]any)
		b, ok2 := before.([]any)
		if ok1 && ok2 && len(o) == len(b) {
			return mergeList(o, b, a), nil
		}
	}
	return after, nil
}

func mergeObject(original, before, after map[string]any) error {
	for key := range before {
		if _, ok := after[key]; ok {
			continue
		}
		name, err := spelling(original, key)
		if err != nil {
			return err
		}
		delete(original, name)
	}
	for key, a := range after {
		if b, ok := before[key]; ok && equalJSON(b, a) {
			continue
		}
		name, err := spelling(original, key)
		if err != nil {
			return err
		}
		if original[name], err = mergeJSON(original[name], before[key], a); err != nil {
			return err
		}
	}
	return nil
}

// spelling is how an object spells a key. Runtimes written in Go, and so the view that was changed, take a key in any
// case, and of several spellings some mixture.
func spelling(object map[string]any, key string) (string, error) {
	var spellings []string
	for k := range object {
		if strings.EqualFold(k, key) {
			spellings = append(spellings, k)
		}
	}
	switch len(spellings) {
	case 0:
		return key, nil
	case 1:
		return spellings[0], nil
	}
	slices.Sort(spellings)
	return "", fmt.Errorf("ambiguous: it has the keys %q in one object", spellings)
}

// mergeList takes elements that were there before in their original form. Each is used once.
func mergeList(original, before, after []any) []any {
	unused := map[string][]any{}
	for i, b := range before {
		key := keyOf(b)
		unused[key] = append(unused[key], original[i])
	}
	list := make([]any, len(after))
	for i, a := range after {
		list[i] = a
		if key := keyOf(a); len(unused[key]) > 0 {
			list[i], unused[key] = unused[key][0], unused[key][1:]
		}
	}
	return list
}

// keyOf is equal for equal values. They come from decodeJSON, so they can be encoded.
func keyOf(v any) string {
	data, _ := json.Marshal(v)
	return string(data)
}

// listCounts are the lengths of the lists that the CDI library appends to without looking at what is there.
type listCounts struct {
	rules int
	hooks []int
}

func countLists(config *oci.Spec) listCounts {
	c := listCounts{rules: len(rulesOf(config))}
	for _, h := range hookLists(config) {
		c.hooks = append(c.hooks, len(*h))
	}
	return c
}

// dropRepeated takes back what was appended although it was there, so that a device can be injected again.
func (c listCounts) dropRepeated(config *oci.Spec) {
	for i, h := range hookLists(config) {
		old := 0
		if i < len(c.hooks) {
			old = c.hooks[i]
		}
		*h = appendNew((*h)[:old:old], (*h)[old:], nil)
	}
	if rules := rulesOf(config); len(rules) > c.rules {
		config.Linux.Resources.Devices = appendNew(rules[:c.rules:c.rules], rules[c.rules:],
			func(r oci.LinuxDeviceCgroup) bool { return !r.Allow })
	}
}

// order is that of the lists in which the CDI library puts what it adds again behind the rest.
type order struct {
	mounts  []oci.Mount
	devices []oci.LinuxDevice
}

func orderOf(config *oci.Spec) order {
	o := order{mounts: slices.Clone(config.Mounts)}
	if config.Linux != nil {
		o.devices = slices.Clone(config.Linux.Devices)
	}
	return o
}

// restore puts what was there before in its place again, so that what is injected again changes nothing. Mounts can hide
// each other: their order is the library's unless the old one is as good, with no path behind one that is in it.
func (o order) restore(config *oci.Spec) {
	if config.Linux != nil {
		config.Linux.Devices = inOrder(o.devices, config.Linux.Devices)
	}
	mounts := inOrder(o.mounts, config.Mounts)
	if slices.IsSortedFunc(mounts, func(a, b oci.Mount) int { return depth(a) - depth(b) }) {
		config.Mounts = mounts
	}
}

// depth counts the elements of a mount's path, by which the library sorts.
func depth(m oci.Mount) int { return strings.Count(filepath.Clean(m.Destination), "/") }

// inOrder is now with what is in before too in the order of before, in front of the rest.
func inOrder[T any](before, now []T) []T {
	var list []T
	for _, b := range before {
		i := slices.IndexFunc(now, func(n T) bool { return reflect.DeepEqual(n, b) })
		if i >= 0 {
			list = append(list, now[i])
			now = slices.Delete(slices.Clone(now), i, i+1)
		}
	}
	return append(list, now...)
}

// appendNew appends those of more that the list does not have behind its last element that is a barrier.
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

// rulesOf are the rules of the device cgroup. They apply in turn, the last that fits counts: an allowance in front of a
// denial is worth nothing.
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
