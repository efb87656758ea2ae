package fidelity

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"

	securejoin "github.com/cyphar/filepath-securejoin"
	"go.yaml.in/yaml/v3"
	"tags.cncf.io/container-device-interface/specs-go"
)

// fact is one thing that a container gets from a spec: a kind ("name", "device node", "file", "link"), the device that
// the container asked for, and the thing itself.
type fact struct{ kind, device, thing string }

func (f fact) String() string {
	if f.device == "" {
		return f.kind + " " + f.thing
	}
	return fmt.Sprintf("%s %s of device %s", f.kind, f.thing, f.device)
}

func compare(a, b fact) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.thing, b.thing), cmp.Compare(a.device, b.device))
}

// facts are those of a spec, sorted. Edits for all devices count for each, so a spec can have them in either place.
func facts(root string, spec *specs.Spec) []fact {
	list := []fact{{"cdiVersion", "", spec.Version}}
	for _, d := range spec.Devices {
		list = append(list, fact{"name", "", spec.Kind + "=" + d.Name})
		for _, edits := range []*specs.ContainerEdits{&spec.ContainerEdits, &d.ContainerEdits} {
			list = append(list, nodes(d.Name, edits)...)
			list = append(list, files(root, edits)...)
			list = append(list, links(edits)...)
			list = append(list, access(edits)...)
		}
	}
	slices.SortFunc(list, compare)
	return slices.Compact(list)
}

func nodes(device string, edits *specs.ContainerEdits) (list []fact) {
	for _, n := range edits.DeviceNodes {
		list = append(list, fact{"device node", device, fromTo(n.HostPath, n.Path)})
	}
	return list
}

// files resolves links in the root, so that two paths of one file are equal.
func files(root string, edits *specs.ContainerEdits) (list []fact) {
	for _, m := range edits.Mounts {
		list = append(list, fact{"file", "", fromTo(resolve(root, m.HostPath), m.ContainerPath)})
	}
	return list
}

func resolve(root, file string) string {
	real, err := securejoin.SecureJoin(root, file)
	if err != nil {
		return file
	}
	return strings.TrimPrefix(real, root)
}

func fromTo(host, container string) string {
	if host == "" || host == container {
		return container
	}
	return host + " as " + container
}

// access are the rights on nodes, options of mounts, groups, variables and hooks.
func access(edits *specs.ContainerEdits) (list []fact) {
	for _, n := range edits.DeviceNodes {
		list = append(list, fact{"permissions", "", n.Permissions})
		if n.FileMode != nil {
			list = append(list, fact{"mode", "", fmt.Sprintf("%s is %#o", n.Path, *n.FileMode)})
		}
		if n.UID != nil || n.GID != nil {
			list = append(list, fact{"owner", "", n.Path})
		}
		if n.Major != 0 {
			list = append(list, fact{"device number", "", fmt.Sprintf("%s is %d:%d", n.Path, n.Major, n.Minor)})
		}
	}
	for _, m := range edits.Mounts {
		list = append(list, fact{"mount options", "", strings.Join(slices.Sorted(slices.Values(m.Options)), ",")})
	}
	for _, gid := range edits.AdditionalGIDs {
		list = append(list, fact{"group", "", fmt.Sprint(gid)})
	}
	for _, h := range edits.Hooks {
		list = append(list, fact{"hook", "", strings.Join(h.Args[:2], " ")})
	}
	for _, v := range edits.Env {
		list = append(list, fact{"variable", "", v})
	}
	return list
}

// links are the symlinks that the hooks make, as PATH -> TARGET. They are TARGET::PATH in the arguments of
// nvidia-cdi-hook, and PATH::TARGET in those of prestart-hook.
func links(edits *specs.ContainerEdits) (list []fact) {
	for _, h := range edits.Hooks {
		theirs := slices.Contains(h.Args, "create-symlinks")
		for i, arg := range h.Args {
			if gpu, ok := strings.CutPrefix(arg, "--dri="); ok {
				list = append(list, driLinks(gpu)...)
			}
			value, ok := strings.CutPrefix(arg, "--link=")
			if !ok && i > 0 && h.Args[i-1] == "--link" {
				value, ok = arg, true
			}
			at, target, both := strings.Cut(value, "::")
			if !ok || !both {
				continue
			}
			if theirs {
				at, target = target, at
			}
			list = append(list, fact{"link", "", path.Clean(at) + " -> " + target})
		}
	}
	return list
}

// driLinks are the links that prestart-hook makes for a GPU in the form BUS/NODE,NODE.
func driLinks(gpu string) (list []fact) {
	bus, nodes, _ := strings.Cut(gpu, "/")
	for node := range strings.SplitSeq(nodes, ",") {
		kind := "card"
		if strings.HasPrefix(node, "render") {
			kind = "render"
		}
		list = append(list, fact{"link", "", fmt.Sprintf("/dev/dri/by-path/pci-%s-%s -> ../%s", bus, kind, node)})
	}
	return list
}

// parse reads a spec strictly.
func parse(t *testing.T, data string) *specs.Spec {
	t.Helper()
	spec := &specs.Spec{}
	d := yaml.NewDecoder(strings.NewReader(data))
	d.KnownFields(true)
	if err := d.Decode(spec); err != nil {
		t.Fatalf("read a spec: %v\n%s", err, data)
	}
	return spec
}

// without are the facts of a that b lacks.
func without(a, b []fact) (list []fact) {
	for _, f := range a {
		if _, found := slices.BinarySearchFunc(b, f, compare); !found {
			list = append(list, f)
		}
	}
	return list
}

// diffFacts is empty if the two lists are equal.
func diffFacts(a, b []fact) string {
	var diff strings.Builder
	for _, f := range without(a, b) {
		fmt.Fprintln(&diff, "-", f)
	}
	for _, f := range without(b, a) {
		fmt.Fprintln(&diff, "+", f)
	}
	return diff.String()
}
