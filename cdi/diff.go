package cdi

import (
	"cmp"
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
	// What describes it, such as "gone" or "580.126.09 -> 585.10.02: 49 mounts and the hook changed".
	What string `json:"what"`
}

// String is the difference in a line.
func (d Difference) String() string { return d.Where + ": " + d.What }

// Diff lists the differences of a written spec from the expected one, always in the same order. It is empty only if
// engines do the same with both. Where an index and a UUID of one device differ alike, only the index is listed.
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
	common := editChanges(&written.ContainerEdits, &expected.ContainerEdits)
	if before, after := driverVersion(written), driverVersion(expected); before != after {
		var caused changes
		caused, common = common.split(before, after)
		what := cmp.Or(before, "unknown") + " -> " + cmp.Or(after, "unknown") + ": " + caused.count()
		list = append(list, Difference{"driver", what})
	}
	for _, c := range common {
		list = append(list, Difference{allDevices, c.String()})
	}
	return append(list, diffDevices(written, expected)...)
}

// WrittenHere reports whether this program wrote a spec: that of GPUs has its hook, and that of an extra is one that
// GenerateExtra makes.
func WrittenHere(spec *specs.Spec) bool {
	for _, h := range spec.ContainerEdits.Hooks {
		if parseHook(h.Args) != nil {
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

// deviceDiff compares the devices of two specs by name, in any order. The aliases are the UUIDs of indexes.
type deviceDiff struct {
	before, after           map[string]*specs.Device
	aliasBefore, aliasAfter map[string]string
}

func diffDevices(written, expected *specs.Spec) []Difference {
	d := deviceDiff{devicesByName(written), devicesByName(expected), aliasesOf(written), aliasesOf(expected)}
	names := maps.Clone(d.before)
	maps.Copy(names, d.after)
	listed := map[string][]string{} // the differences that were listed with the index of a UUID
	var list []Difference
	for _, name := range slices.SortedFunc(maps.Keys(names), compareNames) {
		lines := d.lines(name)
		if listed[name] != nil && slices.Equal(listed[name], lines) {
			continue
		}
		where := deviceNamed(name)
		if alias := cmp.Or(d.aliasBefore[name], d.aliasAfter[name]); alias != "" && !d.reassigned(name) {
			listed[alias] = lines
			where += " (" + alias + ")"
		}
		for _, what := range lines {
			list = append(list, Difference{where, what})
		}
	}
	return list
}

// lines are the differences of one device.
func (d *deviceDiff) lines(name string) []string {
	before, after := d.before[name], d.after[name]
	switch {
	case after == nil:
		return []string{"gone"}
	case before == nil:
		return []string{"new"}
	case d.reassigned(name):
		return []string{"was " + d.aliasBefore[name] + ", is " + d.aliasAfter[name]}
	}
	var lines []string
	for _, c := range editChanges(&before.ContainerEdits, &after.ContainerEdits) {
		lines = append(lines, c.String())
	}
	if !maps.Equal(before.Annotations, after.Annotations) {
		lines = append(lines, "annotations changed")
	}
	return lines
}

// reassigned reports whether an index is now that of another device.
func (d *deviceDiff) reassigned(name string) bool {
	a, b := d.aliasBefore[name], d.aliasAfter[name]
	return a != "" && b != "" && a != b
}

func devicesByName(spec *specs.Spec) map[string]*specs.Device {
	m := map[string]*specs.Device{}
	for i := range spec.Devices {
		m[spec.Devices[i].Name] = &spec.Devices[i]
	}
	return m
}

// aliasesOf maps each index to the UUID of the same device, which follows it in this program's specs.
func aliasesOf(spec *specs.Spec) map[string]string {
	isIndex := func(name string) bool { return name != "" && strings.Trim(name, "0123456789:") == "" } // "3" or "0:1"
	aliases := map[string]string{}
	for i := 1; i < len(spec.Devices); i++ {
		a, b := &spec.Devices[i-1], &spec.Devices[i]
		if isIndex(a.Name) && !isIndex(b.Name) && b.Name != AllDevices &&
			reflect.DeepEqual(a.ContainerEdits, b.ContainerEdits) {
			aliases[a.Name] = b.Name
		}
	}
	return aliases
}
