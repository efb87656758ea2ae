package node

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/resource"
)

// TakenError means that other CDI spec files define the names of all healthy devices of the node. Containers could
// then get none of the devices.
type TakenError struct {
	// Devices is the number of the node's healthy devices.
	Devices int
	// Conflicts are the names of these devices, and the other files that define them.
	Conflicts []cdi.Conflict
	// Path is the path of this program's own spec, or empty if there is none.
	Path string
}

func (e *TakenError) Error() string {
	what := "the only healthy device"
	if e.Devices > 1 {
		what = fmt.Sprintf("all %d healthy devices", e.Devices)
	}
	names := map[string][]string{}
	for _, c := range e.Conflicts {
		names[c.File] = append(names[c.File], c.Name)
	}
	var lines []string
	for _, file := range slices.Sorted(maps.Keys(names)) {
		lines = append(lines, fmt.Sprintf("%s also defines %s", file, wording.ShortenList(names[file], 8, ", ")))
	}
	return fmt.Sprintf("other CDI spec files define the names of %s of this node: %s", what, strings.Join(lines, "; "))
}

// cdiName returns the CDI name by which containers get the device.
func (r *Reconciler) cdiName(d *resource.Device) string {
	name := d.UUID
	if r.opts.ByIndex {
		name = d.IndexName
	}
	return r.opts.Spec.Kind + "=" + name
}

// deviceConflicts returns the conflicts because of which containers cannot get devices by their CDI names.
func (r *Reconciler) deviceConflicts(p *plan) []cdi.Conflict {
	names := map[string]bool{}
	for _, res := range p.resources {
		for j := range res.Devices {
			names[r.cdiName(&res.Devices[j])] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(p.conflicts), func(c cdi.Conflict) bool {
		return !c.Unavailable() || !names[c.Name]
	})
}

// conflictRemarks returns remarks on the conflicts of a plan. There is one for all conflicts with the same file that
// have the same effect.
func (r *Reconciler) conflictRemarks(p *plan) []Remark {
	type group struct {
		file, effect string
		level        slog.Level
	}
	var groups []group
	names := map[group][]string{}
	devices := r.deviceConflicts(p)
	for _, c := range p.conflicts {
		g := group{file: c.File, level: slog.LevelWarn}
		switch {
		case !c.Unavailable():
			g.effect = "engines take these from this node's spec, and not from that file"
		case slices.Contains(devices, c):
			g.effect, g.level = "these devices are unhealthy", slog.LevelError
		case strings.HasPrefix(c.Name, r.opts.Spec.Kind+"="):
			g.effect = "engines do not take these names from this node's spec; the kubelet's allocations do not need them"
		default:
			g.effect = "containers do not get these"
		}
		if names[g] == nil {
			groups = append(groups, g)
		}
		names[g] = append(names[g], c.Name)
	}
	var list []Remark
	for _, g := range groups {
		list = append(list, Remark{
			Key: g.file + ": " + g.effect, Level: g.level,
			Text:   fmt.Sprintf("%s also defines %s: %s", g.file, wording.ShortenList(names[g], 8, ", "), g.effect),
			Advice: "remove that file, or give this node's devices another CDI kind",
		})
	}
	return list
}
