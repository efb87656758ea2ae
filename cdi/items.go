package cdi

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/hookargs"
)

const (
	kindHook     = "hook"
	kindArgument = "hook argument"
)

// editChanges compares edits: as sets where the order means nothing, in order for hooks.
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
		list[m.ContainerPath] = []field{
			{"host path", m.HostPath}, {"options", mountOptions(m)}, {"type", m.Type},
		}
	}
	return list
}

// mountOptions are a mount's options in one order: theirs means nothing.
func mountOptions(m *specs.Mount) string {
	return strings.Join(slices.Compact(slices.Sorted(slices.Values(m.Options))), ",")
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

// compareHooks compares hooks by their place, and of a hook that stays the arguments one by one.
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

// hookFields are all of a hook but its arguments.
func hookFields(h *specs.Hook) []field {
	fields := []field{{"path", h.Path}, {"stage", h.HookName}, {"environment", strings.Join(h.Env, " ")}}
	if h.Timeout != nil {
		fields = append(fields, field{"timeout", strconv.Itoa(*h.Timeout) + " s"})
	}
	return fields
}

// argumentItems makes items of a hook's arguments: by their place, or if they are our hook's, by what they are about.
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
	addFlags(list, &rest)
	return list
}

// addFlags makes items of the arguments that are one flag each.
func addFlags(list items, work *hookargs.CreateContainer) {
	for _, arg := range work.Args()[1:] {
		name, value, _ := strings.Cut(arg, "=")
		if name == "--dri" {
			address, nodes, _ := strings.Cut(value, "/")
			name, value = name+" "+address, nodes
		}
		list[name] = []field{{"", value}}
	}
}
