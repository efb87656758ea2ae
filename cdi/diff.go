package cdi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/hookargs"
)

// Difference is one difference between a written spec and the expected one.
type Difference struct {
	// Where is the part of the spec: "driver", "device 3 (GPU-...)", "all devices" (the edits that every container
	// gets) or "spec".
	Where string `json:"where"`
	// What describes it, such as "gone" or "580.126.09 -> 585.10.02".
	What string `json:"what"`
}

// String is the difference in a line.
func (d Difference) String() string { return d.Where + ": " + d.What }

// Diff lists the differences of a written spec from the expected one, always in the same order. It is empty only if
// engines do the same with both. Of an index and a UUID that stand for one device only the index is listed. Names of
// files that differ only in the driver's version are not listed: that the versions differ is one difference.
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

// withVersion is a spec with another version of the driver in the names of files. Without one of the versions, or if
// the result is no spec, it is the spec itself.
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

// WrittenHere reports whether this program wrote a spec: that of GPUs has its hook, whose file may have any name
// (--hook-path), and that of an extra is one that GenerateExtra makes.
func WrittenHere(spec *specs.Spec) bool {
	for _, h := range spec.ContainerEdits.Hooks {
		if parseHook(h.Args) != nil && h.Args[0] == hookProgram {
			return true
		}
	}
	return slices.ContainsFunc(driver.Extras(), func(e driver.Extra) bool { return WroteExtra(e, spec) })
}

// driverVersion is the version of the driver that a spec was made for, or empty.
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

// parseHook reads the arguments of this program's hook. It is nil for another hook.
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

// device is a device of a spec. In this program's specs each device is there twice: named by its index, and then by its
// UUID.
type device struct {
	*specs.Device
	uuid  string // of a device that is named by its index
	index string // of a device that is named by its UUID
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

// diffDevices compares devices by name, in any order.
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
				continue // what is listed of the index is true of the UUID
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
