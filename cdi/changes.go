package cdi

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// field is an attribute of an item of container edits, such as the host path of a mount.
type field struct{ name, value string }

// change is one item of container edits that is not what it should be. Before or after is nil for an item that is new
// or gone.
type change struct {
	kind          string // such as "mount"
	item          string
	before, after []field
}

// String is like "mount /usr/bin/nvidia-smi: host path /a -> /b".
func (c change) String() string {
	what := strings.TrimSpace(c.kind + " " + c.item)
	switch {
	case c.after == nil:
		return what + ": gone"
	case c.before == nil:
		return what + ": new"
	}
	var parts []string
	for _, name := range fieldNames(c.before, c.after) {
		if b, a := valueOf(c.before, name), valueOf(c.after, name); b != a {
			parts = append(parts, strings.TrimSpace(name+" "+shown(b)+" -> "+shown(a)))
		}
	}
	return what + ": " + strings.Join(parts, ", ")
}

func fieldNames(lists ...[]field) []string {
	var names []string
	for _, list := range lists {
		for _, f := range list {
			if !slices.Contains(names, f.name) {
				names = append(names, f.name)
			}
		}
	}
	return names
}

func valueOf(list []field, name string) string {
	for _, f := range list {
		if f.name == name {
			return f.value
		}
	}
	return ""
}

// shown is a value for people: never empty, never a page.
func shown(value string) string {
	const most = 200
	switch {
	case value == "":
		return "none"
	case len(value) > most:
		return strings.ToValidUTF8(value[:most], "") + "..."
	}
	return value
}

type changes []change

// count says how many items of each kind changed: "49 mounts and the hook changed".
func (list changes) count() string {
	counts := map[string]int{}
	var kinds []string
	for _, c := range list {
		if counts[c.kind]++; counts[c.kind] == 1 {
			kinds = append(kinds, c.kind)
		}
	}
	var parts []string
	for _, k := range kinds {
		switch {
		case k == kindHook || k == kindArgument:
			k = "the hook"
		case counts[k] == 1:
			k = "1 " + k
		default:
			k = strconv.Itoa(counts[k]) + " " + k + "s"
		}
		if !slices.Contains(parts, k) {
			parts = append(parts, k)
		}
	}
	if len(parts) == 0 {
		return "nothing else changed"
	}
	return strings.Join(parts, " and ") + " changed"
}

// split takes out what follows from a change of the driver's version alone: an item that both specs have, were it not
// for the version in it. One that is gone under its old name and new under another counts once.
func (list changes) split(before, after string) (caused, rest changes) {
	gone := map[string]bool{}
	for _, c := range list {
		if c.after == nil {
			gone[versionless(c, c.before, before, after)] = true
		}
	}
	added := map[string]bool{}
	for _, c := range list {
		if key := versionless(c, c.after, before, after); c.before == nil && gone[key] {
			added[key] = true
		}
	}
	for _, c := range list {
		b, a := versionless(c, c.before, before, after), versionless(c, c.after, before, after)
		switch {
		case c.after == nil && added[b]: // counted as the one that is new
		case c.before == nil && added[a], c.before != nil && c.after != nil && a == b:
			caused = append(caused, c)
		default:
			rest = append(rest, c)
		}
	}
	return caused, rest
}

// versionless is an item as text, with any of the versions replaced.
func versionless(c change, fields []field, versions ...string) string {
	text := fmt.Sprint(c.kind, c.item, fields)
	for _, v := range versions {
		if v != "" {
			text = strings.ReplaceAll(text, v, "*")
		}
	}
	return text
}

// items are parts of container edits by what they are called.
type items map[string][]field

// compareItems compares items by name.
func compareItems(kind string, before, after items) changes {
	var list changes
	names := items{}
	maps.Copy(names, before)
	maps.Copy(names, after)
	for _, name := range slices.SortedFunc(maps.Keys(names), compareNames) {
		if b, a := before[name], after[name]; !slices.Equal(b, a) {
			list = append(list, change{kind, name, b, a})
		}
	}
	return list
}
