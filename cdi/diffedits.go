package cdi

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/wording"
)

// parts are the parts of container edits. A key is the kind and name of a part, such as "mount /usr/bin/nvidia-smi".
type parts map[string]attributes

// attributes are the JSON values of a part, by their names in a spec.
type attributes map[string]json.RawMessage

// diffEdits lists the differences of edits. Only for hooks and their arguments does the order matter.
func diffEdits(before, after *specs.ContainerEdits) []string {
	if reflect.DeepEqual(before, after) {
		return nil
	}
	var lines []string
	b, a := partsOf(before), partsOf(after)
	names := maps.Clone(b)
	maps.Copy(names, a)
	for _, name := range slices.SortedFunc(maps.Keys(names), compareNames) {
		var what string
		switch {
		case a[name] == nil:
			what = "gone"
		case b[name] == nil:
			what = "new"
		default:
			what = diffAttributes(b[name], a[name])
		}
		if what != "" {
			lines = append(lines, wording.Shorten(name, shown)+": "+what)
		}
	}
	sameArguments := func(b, a *specs.Hook) bool { return slices.Equal(b.Args, a.Args) }
	if len(lines) == 0 && !slices.EqualFunc(before.Hooks, after.Hooks, sameArguments) {
		lines = append(lines, "hook arguments: the order changed")
	}
	return lines
}

// diffAttributes describes changed attributes, such as "options [\"rw\"] -> [\"ro\"], type none -> \"bind\"", or
// returns "".
func diffAttributes(before, after attributes) string {
	names := maps.Clone(before)
	maps.Copy(names, after)
	var changes []string
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if b, a := string(before[name]), string(after[name]); b != a {
			b, a = cmp.Or(b, "none"), cmp.Or(a, "none")
			changes = append(changes, name+" "+wording.Shorten(b, shown)+" -> "+wording.Shorten(a, shown))
		}
	}
	return strings.Join(changes, ", ")
}

func partsOf(e *specs.ContainerEdits) parts {
	p := parts{}
	for _, v := range e.Env {
		name, value, _ := strings.Cut(v, "=")
		p["environment variable "+name] = attributesOf(map[string]string{"value": value})
	}
	for _, n := range e.DeviceNodes {
		node := *n
		node.HostPath, node.Permissions = cmp.Or(n.HostPath, n.Path), cmp.Or(n.Permissions, "rwm")
		p["device node "+n.Path] = attributesOf(node)
	}
	for _, m := range e.Mounts {
		mount := *m
		mount.Options = slices.Compact(slices.Sorted(slices.Values(m.Options))) // the order has no meaning
		p["mount "+m.ContainerPath] = attributesOf(mount)
	}
	for i, h := range e.Hooks {
		hook := *h
		hook.Args = nil
		p[fmt.Sprint("hook ", i+1)] = attributesOf(hook)
		p.addArguments(h.Args)
	}
	for _, d := range e.NetDevices {
		p["network device "+d.HostInterfaceName] = attributesOf(d)
	}
	for _, gid := range e.AdditionalGIDs {
		p[fmt.Sprint("additional group ", gid)] = attributes{}
	}
	if e.IntelRdt != nil {
		p["intelRdt"] = attributesOf(e.IntelRdt)
	}
	return p
}

// addArguments adds the arguments of a hook. An argument of this program's hook names dozens of libraries, each of
// which becomes a part.
func (p parts) addArguments(args []string) {
	if work := parseHook(args); work != nil {
		for _, l := range work.Libraries {
			p["hook argument for "+l.SONAME] = attributesOf(map[string]string{"path": l.Path})
		}
		work.Libraries = nil
		args = slices.Concat(args[:1], work.Args())
	}
	for _, arg := range args {
		p["hook argument "+arg] = attributes{}
	}
}

// attributesOf returns the attributes of a part. Values must be such that JSON can encode them.
func attributesOf(part any) attributes {
	data, _ := json.Marshal(part)
	a := attributes{}
	_ = json.Unmarshal(data, &a)
	return a
}

// shown is how many bytes of a value are shown.
const shown = 200
