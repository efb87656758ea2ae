package node

import (
	"fmt"
	"slices"
	"strings"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/resource"
)

// because says why engines do not take some names from our spec, as the end of a sentence.
func because(clashes []cdi.Clash, names []string) string {
	at := slices.IndexFunc(clashes, func(c cdi.Clash) bool { return c.Lost() && slices.Contains(names, c.Name) })
	if at < 0 {
		return ""
	}
	return ": " + clashes[at].String()
}

// taken returns why a device cannot be given to containers by its CDI name, or "".
func (i *Inventory) taken(clashes []cdi.Clash) func(*resource.Device) string {
	files := map[string]string{}
	for _, c := range clashes {
		if c.Lost() {
			files[c.Name] = c.String()
		}
	}
	return func(d *resource.Device) string { return files[i.qualified(d)] }
}

// checkTaken is the error of a node whose devices would all be unhealthy, since other files define their names. There
// is nothing to serve then, and an administrator has to decide which file is to go.
func (i *Inventory) checkTaken(next *State, there *cdi.Catalogue) error {
	clashes := i.ofDevices(there.Clashes(i.opts.Path, next.Spec), next.built)
	before := countHealthy(next.built)
	if before == 0 || countHealthy(unhealthy(next.built, i.taken(clashes))) > 0 {
		return nil
	}
	what, hint := "the only device", clashes[0].Hint()
	if before > 1 {
		what = fmt.Sprintf("all %d devices", before)
	}
	if _, err := cdi.ReadFile(i.opts.Path); err == nil {
		hint += " and remove " + i.opts.Path
	}
	return exit.With(exit.Failure, hint, fmt.Errorf("other CDI spec files take the names of %s of this node: %s",
		what, strings.Join(inWords(clashes), "; ")))
}

// qualified is the CDI name that a container which is given the device gets.
func (i *Inventory) qualified(d *resource.Device) string {
	return i.opts.Spec.Kind + "=" + d.CDIName(i.opts.ByIndex)
}

// ofDevices are the clashes that take the name by which a device is given to containers.
func (i *Inventory) ofDevices(clashes []cdi.Clash, resources []resource.Resource) []cdi.Clash {
	names := map[string]bool{}
	for _, r := range resources {
		for j := range r.Devices {
			names[i.qualified(&r.Devices[j])] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(clashes), func(c cdi.Clash) bool { return !c.Lost() || !names[c.Name] })
}

// inWords has a line for each file, with the names that it defines too.
func inWords(clashes []cdi.Clash) []string {
	var files, list []string
	names := map[string][]string{}
	for _, c := range clashes {
		if names[c.File] == nil {
			files = append(files, c.File)
		}
		names[c.File] = append(names[c.File], c.Name)
	}
	for _, file := range files {
		list = append(list, fmt.Sprintf("%s defines %s too", file, someOf(names[file])))
	}
	return list
}

// countHealthy counts the healthy devices, replicas of one once.
func countHealthy(resources []resource.Resource) int {
	uuids := map[string]bool{}
	for _, r := range resources {
		for j := range r.Devices {
			if r.Devices[j].Healthy {
				uuids[r.Devices[j].UUID] = true
			}
		}
	}
	return len(uuids)
}

// logClashes logs the names that other files define too, once when that begins and once when it ends.
func (i *Inventory) logClashes(s *State) {
	before := i.clashes
	i.clashes = s.clashes
	i.logGroups(s, missingIn(before, s.clashes), func(c []cdi.Clash, names, effect string) {
		i.log.Warn(fmt.Sprintf("%s defines %s too%s; %s", c[0].File, names, effect, c[0].Hint()))
	})
	i.logGroups(s, missingIn(s.clashes, before), func(c []cdi.Clash, names, _ string) {
		i.log.Info(fmt.Sprintf("%s and this node's spec no longer both define %s", c[0].File, names))
	})
}

// missingIn are the clashes of list that are not in other.
func missingIn(other, list []cdi.Clash) []cdi.Clash {
	return slices.DeleteFunc(slices.Clone(list), func(c cdi.Clash) bool { return slices.Contains(other, c) })
}

// logGroups calls log for all clashes with one file that have one effect.
func (i *Inventory) logGroups(s *State, list []cdi.Clash, log func(group []cdi.Clash, names, effect string)) {
	devices := i.ofDevices(list, s.built)
	effectOf := func(c cdi.Clash) string {
		switch {
		case !c.Lost():
			return ": engines take these from this plugin, and not from that file"
		case slices.Contains(devices, c):
			return ": these devices are unhealthy"
		case strings.HasPrefix(c.Name, i.opts.Spec.Kind+"="):
			return ": engines do not take these names from this plugin; the kubelet's allocations do not need them"
		default:
			return ": containers do not get these from this plugin"
		}
	}
	for len(list) > 0 {
		first, effect := list[0], effectOf(list[0])
		same := func(c cdi.Clash) bool { return c.File == first.File && effectOf(c) == effect }
		var group []cdi.Clash
		var names []string
		for _, c := range list {
			if same(c) {
				group, names = append(group, c), append(names, c.Name)
			}
		}
		log(group, someOf(names), effect)
		list = slices.DeleteFunc(list, same)
	}
}

// someOf is a list in a line of a log: the first few, and how many more there are.
func someOf(list []string) string {
	const most = 8
	if len(list) > most {
		list = append(slices.Clone(list[:most]), fmt.Sprintf("and %d more", len(list)-most))
	}
	return strings.Join(list, ", ")
}
