package cdi

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

const (
	kindHook     = "hook"
	kindArgument = "hook argument"
)

// items are the parts of container edits of one kind by name, such as mounts by their path in the container, each with
// its attributes.
type items map[string][]field

// field is an attribute of an item, such as the host path of a mount.
type field struct{ name, value string }

// change is a difference in one item. Before is nil for a new item, after for one that is gone.
type change struct {
	kind          string // such as "mount"
	item          string
	before, after []field
}

type changes []change

// editChanges compares edits: hooks in their order, everything else without regard to order.
func editChanges(before, after *specs.ContainerEdits) changes {
	return slices.Concat(
		compareItems("environment variable", envItems(before), envItems(after)),
		compareItems("node", nodeItems(before), nodeItems(after)),
		compareItems("mount", mountItems(before), mountItems(after)),
		compareHooks(before.Hooks, after.Hooks),
		compareItems("network device", netItems(before), netItems(after)),
		compareItems("additional group", groupItems(before), groupItems(after)),
		compareItems("intelRdt", rdtItems(before), rdtItems(after)),
	)
}

func envItems(e *specs.ContainerEdits) items {
	list := items{}
	for _, v := range e.Env {
		name, value, _ := strings.Cut(v, "=")
		list[name] = []field{{"", value}}
	}
	return list
}

func nodeItems(e *specs.ContainerEdits) items {
	list := items{}
	for _, n := range e.DeviceNodes {
		fields := []field{
			{"host path", cmp.Or(n.HostPath, n.Path)},
			{"permissions", cmp.Or(n.Permissions, "rwm")},
			{"type", n.Type},
		}
		if n.Major != 0 || n.Minor != 0 {
			fields = append(fields, field{"numbers", fmt.Sprintf("%d:%d", n.Major, n.Minor)})
		}
		if n.FileMode != nil {
			fields = append(fields, field{"mode", fmt.Sprintf("%#o", uint32(*n.FileMode))})
		}
		if n.UID != nil {
			fields = append(fields, field{"user", strconv.FormatUint(uint64(*n.UID), 10)})
		}
		if n.GID != nil {
			fields = append(fields, field{"group", strconv.FormatUint(uint64(*n.GID), 10)})
		}
		list[n.Path] = fields
	}
	return list
}

func mountItems(e *specs.ContainerEdits) items {
	list := items{}
	for _, m := range e.Mounts {
		options := slices.Compact(slices.Sorted(slices.Values(m.Options))) // their order has no meaning
		list[m.ContainerPath] = []field{
			{"host path", m.HostPath}, {"options", strings.Join(options, ",")}, {"type", m.Type},
		}
	}
	return list
}

func netItems(e *specs.ContainerEdits) items {
	list := items{}
	for _, d := range e.NetDevices {
		list[d.HostInterfaceName] = []field{{"name", d.Name}}
	}
	return list
}

func groupItems(e *specs.ContainerEdits) items {
	list := items{}
	for _, gid := range e.AdditionalGIDs {
		list[strconv.FormatUint(uint64(gid), 10)] = []field{{}}
	}
	return list
}

func rdtItems(e *specs.ContainerEdits) items {
	if e.IntelRdt == nil {
		return nil
	}
	return items{"": {{"", fmt.Sprintf("%+v", *e.IntelRdt)}}}
}

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

// compareHooks compares hooks by position, and the arguments of a hook one by one.
func compareHooks(before, after []*specs.Hook) changes {
	var list changes
	for i := range max(len(before), len(after)) {
		switch {
		case i >= len(after):
			list = append(list, change{kindHook, before[i].Path, hookFields(before[i]), nil})
		case i >= len(before):
			list = append(list, change{kindHook, after[i].Path, nil, hookFields(after[i])})
		default:
			list = append(list, compareHook(before[i], after[i])...)
		}
	}
	return list
}

func compareHook(before, after *specs.Hook) changes {
	var list changes
	if b, a := hookFields(before), hookFields(after); !slices.Equal(b, a) {
		list = append(list, change{kindHook, "", b, a})
	}
	arguments := compareItems(kindArgument, argumentItems(before.Args), argumentItems(after.Args))
	if len(arguments) == 0 && !slices.Equal(before.Args, after.Args) {
		order := []field{{"", strings.Join(before.Args, " ")}}
		arguments = changes{{kindArgument, "order", order, []field{{"", strings.Join(after.Args, " ")}}}}
	}
	return append(list, arguments...)
}

// hookFields are the attributes of a hook without its arguments.
func hookFields(h *specs.Hook) []field {
	fields := []field{{"path", h.Path}, {"stage", h.HookName}, {"environment", strings.Join(h.Env, " ")}}
	if h.Timeout != nil {
		fields = append(fields, field{"timeout", strconv.Itoa(*h.Timeout) + " s"})
	}
	return fields
}

// argumentItems are a hook's arguments by position, or those of this program's hook by what each is about: a library, a
// link, the DRM nodes of a GPU, or another flag.
func argumentItems(args []string) items {
	list := items{}
	work := parseHook(args)
	if work == nil {
		for i, arg := range args {
			list[strconv.Itoa(i)] = []field{{"", arg}}
		}
		return list
	}
	list["0"] = []field{{"", args[0]}}
	for _, l := range work.Libraries {
		list["library "+l.SONAME] = append(list["library "+l.SONAME], field{"", l.Path})
	}
	for _, l := range work.Links {
		list["link "+l.Path] = append(list["link "+l.Path], field{"", l.Target})
	}
	rest := *work
	rest.Libraries, rest.Links = nil, nil
	for _, arg := range rest.Args()[1:] {
		name, value, _ := strings.Cut(arg, "=")
		if name == "--dri" {
			address, nodes, _ := strings.Cut(value, "/")
			name, value = name+" "+address, nodes
		}
		list[name] = []field{{"", value}}
	}
	return list
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
	value := func(list []field, name string) string {
		for _, f := range list {
			if f.name == name {
				return f.value
			}
		}
		return ""
	}
	var names, parts []string
	for _, f := range slices.Concat(c.before, c.after) {
		if slices.Contains(names, f.name) {
			continue
		}
		names = append(names, f.name)
		if b, a := value(c.before, f.name), value(c.after, f.name); b != a {
			parts = append(parts, strings.TrimSpace(f.name+" "+shorten(b)+" -> "+shorten(a)))
		}
	}
	return what + ": " + strings.Join(parts, ", ")
}

// shorten is a value for people to read: never empty, never long.
func shorten(value string) string {
	const most = 200
	switch {
	case value == "":
		return "none"
	case len(value) > most:
		return strings.ToValidUTF8(value[:most], "") + "..."
	}
	return value
}

// count is how many items of each kind changed: "49 mounts and the hook changed".
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

// split separates the changes that only the driver's versions, before and after, have caused: an item that is equal in
// both specs except for the version in it. One that is gone under its old name and new under another counts once.
func (list changes) split(before, after string) (caused, rest changes) {
	key := func(c change, fields []field) string { // an item as text, with * for the versions
		text := fmt.Sprint(c.kind, c.item, fields)
		for _, v := range []string{before, after} {
			if v != "" {
				text = strings.ReplaceAll(text, v, "*")
			}
		}
		return text
	}
	gone, moved := map[string]bool{}, map[string]bool{}
	for _, c := range list {
		if c.after == nil {
			gone[key(c, c.before)] = true
		}
	}
	for _, c := range list {
		if k := key(c, c.after); c.before == nil && gone[k] {
			moved[k] = true
		}
	}
	for _, c := range list {
		b, a := key(c, c.before), key(c, c.after)
		switch {
		case c.after == nil && moved[b]: // counted as the one that is new
		case c.before == nil && moved[a], c.before != nil && c.after != nil && a == b:
			caused = append(caused, c)
		default:
			rest = append(rest, c)
		}
	}
	return caused, rest
}
