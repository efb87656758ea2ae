package node

import (
	"fmt"
	"slices"
	"strings"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/resource"
)

// TakenError is that other CDI spec files define the names of all of the node's devices, so that none could be given to
// containers.
type TakenError struct {
	// Devices counts the node's devices.
	Devices int
	// Conflicts are the names and the files that define them too.
	Conflicts []cdi.Conflict
	// Path is the node's own spec if there is one, or empty.
	Path string
}

// Error names the other files and the names that they define.
func (e *TakenError) Error() string {
	what := "the only device"
	if e.Devices > 1 {
		what = fmt.Sprintf("all %d devices", e.Devices)
	}
	return fmt.Sprintf("other CDI spec files define the names of %s of this node: %s",
		what, strings.Join(linesByFile(e.Conflicts), "; "))
}

// checkTaken returns a TakenError if there would be nothing to offer: an administrator has to decide which file to
// remove.
func (r *Reconciler) checkTaken(next *desired, specDirs *cdi.SpecDirs) error {
	conflicts := r.ofDevices(specDirs.Conflicts(r.opts.Path, next.spec), next.resources)
	devices := countHealthy(next.resources)
	if devices == 0 || countHealthy(resource.MarkUnhealthy(next.resources, r.takenBy(conflicts))) > 0 {
		return nil
	}
	err := &TakenError{Devices: devices, Conflicts: conflicts}
	if _, missing := cdi.ReadFile(r.opts.Path); missing == nil {
		err.Path = r.opts.Path
	}
	return err
}

// takenBy returns a function that returns which other file keeps a device from being given by its CDI name, or "".
func (r *Reconciler) takenBy(conflicts []cdi.Conflict) func(*resource.Device) string {
	files := map[string]string{}
	for _, c := range conflicts {
		if c.Unavailable() {
			files[c.Name] = c.String()
		}
	}
	return func(d *resource.Device) string { return files[r.qualified(d)] }
}

// qualified is the CDI name by which containers are given the device.
func (r *Reconciler) qualified(d *resource.Device) string {
	name := d.UUID
	if r.opts.ByIndex {
		name = d.IndexName
	}
	return r.opts.Spec.Kind + "=" + name
}

// ofDevices returns the conflicts that keep devices from being given by their CDI names.
func (r *Reconciler) ofDevices(conflicts []cdi.Conflict, resources []resource.Resource) []cdi.Conflict {
	names := map[string]bool{}
	for _, res := range resources {
		for j := range res.Devices {
			names[r.qualified(&res.Devices[j])] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(conflicts), func(c cdi.Conflict) bool {
		return !c.Unavailable() || !names[c.Name]
	})
}

// linesByFile has a line for each file, with the names that it defines too.
func linesByFile(conflicts []cdi.Conflict) []string {
	var files, lines []string
	names := map[string][]string{}
	for _, c := range conflicts {
		if names[c.File] == nil {
			files = append(files, c.File)
		}
		names[c.File] = append(names[c.File], c.Name)
	}
	for _, file := range files {
		lines = append(lines, fmt.Sprintf("%s defines %s too", file, abbreviate(names[file])))
	}
	return lines
}

// logConflicts logs a conflict when it begins and when it ends.
func (r *Reconciler) logConflicts(d *desired) {
	before, now := r.logged, r.applied.conflicts
	r.logged = now
	r.logByFile(d, missingIn(before, now), func(file, names, effect string) {
		r.log.Warn(fmt.Sprintf("%s defines %s too: %s; remove that file, or give this node's devices another CDI kind",
			file, names, effect))
	})
	r.logByFile(d, missingIn(now, before), func(file, names, _ string) {
		r.log.Info(fmt.Sprintf("%s and this node's spec no longer both define %s", file, names))
	})
}

// missingIn returns the conflicts of list that are not in other.
func missingIn(other, list []cdi.Conflict) []cdi.Conflict {
	return slices.DeleteFunc(slices.Clone(list), func(c cdi.Conflict) bool { return slices.Contains(other, c) })
}

// logByFile calls log once for the conflicts that have the same file and the same effect.
func (r *Reconciler) logByFile(d *desired, list []cdi.Conflict, log func(file, names, effect string)) {
	devices := r.ofDevices(list, d.resources)
	effectOf := func(c cdi.Conflict) string {
		switch {
		case !c.Unavailable():
			return "engines take these from this node's spec, and not from that file"
		case slices.Contains(devices, c):
			return "these devices are unhealthy"
		case strings.HasPrefix(c.Name, r.opts.Spec.Kind+"="):
			return "engines do not take these names from this node's spec; the kubelet's allocations do not need them"
		default:
			return "containers do not get these"
		}
	}
	for len(list) > 0 {
		first, effect := list[0], effectOf(list[0])
		same := func(c cdi.Conflict) bool { return c.File == first.File && effectOf(c) == effect }
		var names []string
		for _, c := range list {
			if same(c) {
				names = append(names, c.Name)
			}
		}
		log(first.File, abbreviate(names), effect)
		list = slices.DeleteFunc(list, same)
	}
}

// abbreviate joins a list for a line of a log: the first few, and how many more there are.
func abbreviate(list []string) string {
	const most = 8
	if len(list) > most {
		list = append(slices.Clone(list[:most]), fmt.Sprintf("and %d more", len(list)-most))
	}
	return strings.Join(list, ", ")
}
