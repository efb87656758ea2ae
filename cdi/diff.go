package cdi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
)

// Difference is one difference between a written spec and the expected one.
type Difference struct {
	// Where is the affected part of the spec: "driver", "device 3 (GPU-...)", "all devices" (the edits that every
	// container gets) or "spec".
	Where string `json:"where"`
	// What describes the difference, such as "gone" or "580.126.09 -> 585.10.02".
	What string `json:"what"`
}

// String formats the difference in one line.
func (d Difference) String() string { return d.Where + ": " + d.What }

// Diff lists the differences between a written spec and the expected one, in a fixed order. The result is empty only
// if engines treat both specs alike. If an index and a UUID name one device, only the index is listed. If file names
// differ only in the driver's version, the version is listed once instead of the files.
func Diff(written, expected *specs.Spec) []Difference {
	var list []Difference
	before, after := strings.TrimPrefix(written.Version, "v"), strings.TrimPrefix(expected.Version, "v")
	if before != after {
		list = append(list, Difference{"spec", "cdiVersion " + before + " -> " + after})
	}
	if written.Kind != expected.Kind {
		list = append(list, Difference{"spec", "kind " + written.Kind + " -> " + expected.Kind})
	}
	if !maps.Equal(written.Annotations, expected.Annotations) {
		list = append(list, Difference{"spec", "annotations changed"})
	}
	if before, after := driverVersion(written), driverVersion(expected); before != after {
		list = append(list, Difference{"driver", cmp.Or(before, "unknown") + " -> " + cmp.Or(after, "unknown")})
		written = withVersion(written, before, after)
	}
	for _, what := range diffEdits(&written.ContainerEdits, &expected.ContainerEdits) {
		list = append(list, Difference{commonWhere, what})
	}
	return append(list, diffDevices(written, expected)...)
}

// withVersion returns a spec with the driver version `after` instead of `before` in its file names. If a version is
// empty or the result is not a valid spec, it returns the spec unchanged.
func withVersion(spec *specs.Spec, before, after string) *specs.Spec {
	data, err := json.Marshal(spec)
	if err != nil || before == "" || after == "" {
		return spec
	}
	other := &specs.Spec{}
	if err := json.Unmarshal(bytes.ReplaceAll(data, []byte(before), []byte(after)), other); err != nil {
		return spec
	}
	return other
}

// WrittenHere reports whether this program wrote a spec. A spec of GPUs is ours if it has our hook, whose file may
// have any name (--hook-path), or if it has none and its libraries are mounted like those of Options.WithoutHooks. The
// spec of an extra is ours if GenerateExtra makes one like it.
func WrittenHere(spec *specs.Spec) bool {
	for _, h := range spec.ContainerEdits.Hooks {
		if parseHook(h.Args) != nil && h.Args[0] == hookProgram {
			return true
		}
	}
	return isWithoutHooks(spec) ||
		slices.ContainsFunc(driver.Extras(), func(e driver.Extra) bool { return WroteExtra(e, spec) })
}

// isWithoutHooks reports whether a spec was made with Options.WithoutHooks: a library is mounted under its SONAME in
// each directory that dynamic loaders search, and containers get the variable that our specs have.
func isWithoutHooks(spec *specs.Spec) bool {
	common := &spec.ContainerEdits
	if len(common.Hooks) > 0 || !slices.Contains(common.Env, noInjection) {
		return false
	}
	files := map[string]string{} // on the host, by path in the container
	for _, m := range common.Mounts {
		files[m.ContainerPath] = m.HostPath
	}
	return slices.ContainsFunc(common.Mounts, func(m *specs.Mount) bool {
		name := path.Base(m.ContainerPath)
		isElsewhere := func(dir string) bool { return files[path.Join(dir, name)] != m.HostPath }
		return !slices.ContainsFunc(host.LoaderDirs(), isElsewhere)
	})
}

// driverVersion returns the driver version that a spec was made for, or empty.
func driverVersion(spec *specs.Spec) string {
	for _, h := range spec.ContainerEdits.Hooks {
		if work := parseHook(h.Args); work != nil && work.DriverVersion != "" {
			return work.DriverVersion
		}
	}
	for _, m := range spec.ContainerEdits.Mounts {
		if version := driver.VersionOf(m.ContainerPath); version != "" {
			return version
		}
	}
	return ""
}

// parseHook parses the arguments of this program's hook. For another hook it returns nil.
func parseHook(args []string) *hookargs.CreateContainer {
	if len(args) < 2 {
		return nil
	}
	work, err := hookargs.Parse(args[1:])
	if err != nil {
		return nil
	}
	return work
}

// device is a device of a spec. This program's specs have each device twice: named by its index, and then by its UUID.
type device struct {
	*specs.Device
	uuid  string // set if the name is the index
	index string // set if the name is the UUID
}

func devicesByName(spec *specs.Spec) map[string]device {
	isIndex := func(name string) bool { return name != "" && strings.Trim(name, "0123456789:") == "" } // "3" or "0:1"
	devices := map[string]device{}
	for i := range spec.Devices {
		d := device{Device: &spec.Devices[i]}
		if i > 0 && !isIndex(d.Name) && d.Name != AllDevices {
			previous := devices[spec.Devices[i-1].Name]
			if isIndex(previous.Name) && reflect.DeepEqual(previous.ContainerEdits, d.ContainerEdits) &&
				maps.Equal(previous.Annotations, d.Annotations) {
				previous.uuid, d.index = d.Name, previous.Name
				devices[previous.Name] = previous
			}
		}
		devices[d.Name] = d
	}
	return devices
}

// diffDevices compares devices by name. Their order does not matter.
func diffDevices(written, expected *specs.Spec) []Difference {
	before, after := devicesByName(written), devicesByName(expected)
	names := maps.Clone(before)
	maps.Copy(names, after)
	var list []Difference
	for _, name := range slices.SortedFunc(maps.Keys(names), compareNames) {
		b, a := before[name], after[name]
		if index := cmp.Or(b.index, a.index); index != "" {
			inBoth := b.Device != nil && a.Device != nil
			indexInBoth := before[index].Device != nil && after[index].Device != nil
			if inBoth && b.index == a.index || !inBoth && !indexInBoth {
				continue // the index has the same differences
			}
		}
		if b.uuid != "" && a.uuid != "" && b.uuid != a.uuid {
			list = append(list, Difference{deviceNamed(name), "was " + b.uuid + ", is " + a.uuid})
			continue
		}
		where := deviceNamed(name)
		if uuid := cmp.Or(b.uuid, a.uuid); uuid != "" {
			where += " (" + uuid + ")"
		}
		for _, what := range diffDevice(b.Device, a.Device) {
			list = append(list, Difference{where, what})
		}
	}
	return list
}

func diffDevice(before, after *specs.Device) []string {
	switch {
	case after == nil:
		return []string{"gone"}
	case before == nil:
		return []string{"new"}
	}
	lines := diffEdits(&before.ContainerEdits, &after.ContainerEdits)
	if !maps.Equal(before.Annotations, after.Annotations) {
		lines = append(lines, "annotations changed")
	}
	return lines
}
