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

// Difference is one way in which a written spec is not what it should be.
type Difference struct {
	// Where is the part of the spec: "driver", "device 3 (GPU-...)", "all devices" (the edits that every container gets)
	// or "spec".
	Where string `json:"where"`
	// What says it in words, such as "gone" or "580.126.09 -> 585.10.02: 49 mounts and the hook changed".
	What string `json:"what"`
}

// String is the difference in a line.
func (d Difference) String() string { return d.Where + ": " + d.What }

// Diff lists how written differs from wanted, in an order that depends on nothing else. It is empty only if engines do
// the same with both. A device with an index and a UUID is named once where both names differ alike.
func Diff(written, wanted *specs.Spec) []Difference {
	list := diffSpec(written, wanted)
	common := editChanges(&written.ContainerEdits, &wanted.ContainerEdits)
	if before, after := driverVersion(written), driverVersion(wanted); before != after {
		var caused changes
		caused, common = common.split(before, after)
		what := cmp.Or(before, "unknown") + " -> " + cmp.Or(after, "unknown") + ": " + caused.count()
		list = append(list, Difference{"driver", what})
	}
	for _, c := range common {
		list = append(list, Difference{allDevices, c.String()})
	}
	return append(list, diffDevices(written, wanted)...)
}

func diffSpec(written, wanted *specs.Spec) []Difference {
	var list []Difference
	before, after := strings.TrimPrefix(written.Version, "v"), strings.TrimPrefix(wanted.Version, "v")
	if before != after {
		list = append(list, Difference{"spec", "cdiVersion " + before + " -> " + after})
	}
	if written.Kind != wanted.Kind {
		list = append(list, Difference{"spec", "kind " + written.Kind + " -> " + wanted.Kind})
	}
	if !maps.Equal(written.Annotations, wanted.Annotations) {
		list = append(list, Difference{"spec", "annotations changed"})
	}
	return list
}

// WrittenHere reports whether this program wrote a spec: that of GPUs calls its hook, and that of an extra is one that
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

// parseHook is what arguments tell our hook to do, or nil if they are another hook's.
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

// deviceDiff compares the devices of two specs by name. The order of the devices means nothing.
type deviceDiff struct {
	before, after           map[string]*specs.Device
	aliasBefore, aliasAfter map[string]string
}

func diffDevices(written, wanted *specs.Spec) []Difference {
	d := deviceDiff{devicesByName(written), devicesByName(wanted), aliasesOf(written), aliasesOf(wanted)}
	names := maps.Clone(d.before)
	maps.Copy(names, d.after)
	told := map[string][]string{} // aliases that need no words of their own where they differ like this
	var list []Difference
	for _, name := range slices.SortedFunc(maps.Keys(names), compareNames) {
		lines := d.lines(name)
		if told[name] != nil && slices.Equal(told[name], lines) {
			continue
		}
		where := "device " + name
		if alias := cmp.Or(d.aliasBefore[name], d.aliasAfter[name]); alias != "" && !d.renamed(name) {
			told[alias] = lines
			where += " (" + alias + ")"
		}
		for _, what := range lines {
			list = append(list, Difference{where, what})
		}
	}
	return list
}

// lines say how one device differs.
func (d *deviceDiff) lines(name string) []string {
	before, after := d.before[name], d.after[name]
	switch {
	case after == nil:
		return []string{"gone"}
	case before == nil:
		return []string{"new"}
	case d.renamed(name):
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

// renamed reports whether an index has come to mean another device.
func (d *deviceDiff) renamed(name string) bool {
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

// aliasesOf gives each index the UUID of the same device, which stands behind it in our specs.
func aliasesOf(spec *specs.Spec) map[string]string {
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

// isIndex reports whether a device's name is like "3" or "0:1".
func isIndex(name string) bool { return name != "" && strings.Trim(name, "0123456789:") == "" }
