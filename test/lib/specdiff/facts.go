// Package specdiff compares the product's CDI specs with those of NVIDIA's nvidia-ctk: what a container gets from each,
// and which differences are intended.
package specdiff

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

// Fact is one thing that a container gets from a spec: a kind ("name", "device node", "file", "link"), the device that
// the container asked for, and the thing itself.
type Fact struct{ kind, device, thing string }

func (f Fact) String() string {
	if f.device == "" {
		return f.kind + " " + f.thing
	}
	return fmt.Sprintf("%s %s of device %s", f.kind, f.thing, f.device)
}

func compare(a, b Fact) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.thing, b.thing), cmp.Compare(a.device, b.device))
}

// Facts are those of a spec, sorted. Edits for all devices count for each, so a spec can have them in either place.
func Facts(root string, spec *specs.Spec) []Fact {
	list := []Fact{{"cdiVersion", "", spec.Version}}
	for _, d := range spec.Devices {
		list = append(list, Fact{"name", "", spec.Kind + "=" + d.Name})
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

func nodes(device string, edits *specs.ContainerEdits) (list []Fact) {
	for _, n := range edits.DeviceNodes {
		list = append(list, Fact{"device node", device, fromTo(n.HostPath, n.Path)})
	}
	return list
}

// files resolves links in the root, so that two paths of one file are equal.
func files(root string, edits *specs.ContainerEdits) (list []Fact) {
	for _, m := range edits.Mounts {
		list = append(list, Fact{"file", "", fromTo(resolve(root, m.HostPath), m.ContainerPath)})
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
func access(edits *specs.ContainerEdits) (list []Fact) {
	for _, n := range edits.DeviceNodes {
		list = append(list, Fact{"permissions", "", n.Permissions})
		if n.FileMode != nil {
			list = append(list, Fact{"mode", "", fmt.Sprintf("%s is %#o", n.Path, *n.FileMode)})
		}
		if n.UID != nil || n.GID != nil {
			list = append(list, Fact{"owner", "", n.Path})
		}
		if n.Major != 0 {
			list = append(list, Fact{"device number", "", fmt.Sprintf("%s is %d:%d", n.Path, n.Major, n.Minor)})
		}
	}
	for _, m := range edits.Mounts {
		list = append(list, Fact{"mount options", "", strings.Join(slices.Sorted(slices.Values(m.Options)), ",")})
	}
	for _, gid := range edits.AdditionalGIDs {
		list = append(list, Fact{"group", "", fmt.Sprint(gid)})
	}
	for _, h := range edits.Hooks {
		list = append(list, Fact{"hook", "", strings.Join(h.Args[:2], " ")})
	}
	for _, v := range edits.Env {
		list = append(list, Fact{"variable", "", v})
	}
	return list
}

// links are the symlinks that the hooks make, as PATH -> TARGET. They are TARGET::PATH in the arguments of
// nvidia-cdi-hook, and PATH::TARGET in those of prestart-hook.
func links(edits *specs.ContainerEdits) (list []Fact) {
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
			list = append(list, Fact{"link", "", path.Clean(at) + " -> " + target})
		}
	}
	return list
}

// driLinks are the links that prestart-hook makes for a GPU in the form BUS/NODE,NODE.
func driLinks(gpu string) (list []Fact) {
	bus, nodes, _ := strings.Cut(gpu, "/")
	for node := range strings.SplitSeq(nodes, ",") {
		kind := "card"
		if strings.HasPrefix(node, "render") {
			kind = "render"
		}
		list = append(list, Fact{"link", "", fmt.Sprintf("/dev/dri/by-path/pci-%s-%s -> ../%s", bus, kind, node)})
	}
	return list
}

// Parse reads a spec strictly.
func Parse(t testing.TB, data string) *specs.Spec {
	t.Helper()
	spec := &specs.Spec{}
	d := yaml.NewDecoder(strings.NewReader(data))
	d.KnownFields(true)
	if err := d.Decode(spec); err != nil {
		t.Fatalf("read a spec: %v\n%s", err, data)
	}
	return spec
}

// Without are the facts of a that b lacks.
func Without(a, b []Fact) (list []Fact) {
	for _, f := range a {
		if _, found := slices.BinarySearchFunc(b, f, compare); !found {
			list = append(list, f)
		}
	}
	return list
}

// Diff is empty if the two lists are equal.
func Diff(a, b []Fact) string {
	var diff strings.Builder
	for _, f := range Without(a, b) {
		fmt.Fprintln(&diff, "-", f)
	}
	for _, f := range Without(b, a) {
		fmt.Fprintln(&diff, "+", f)
	}
	return diff.String()
}
