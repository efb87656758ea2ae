package node

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/resource"
)

// State has the GPUs of the node, and what it offers. It is immutable once published.
type State struct {
	// Snapshot is the last successful snapshot. A GPU that no longer answers keeps its UUID in it.
	Snapshot *gpu.Snapshot
	// Spec is the desired CDI spec, or nil if it would have no devices.
	Spec *specs.Spec
	// Resources are the resources that are offered, with what a container gets for each device. A device is healthy
	// only if containers can get it.
	Resources []resource.Resource
	// Health has the health of each device, by UUID. It is nil if health is not monitored.
	Health map[string]health.Status
	// Err says why the state is not the desired one, or is nil. If other spec files define some names, that is no such
	// error, unless the name is that of a required extra.
	Err error

	remarks []Remark
	names   map[string]string // see plan.names

	// The resources and the remarks as they were before the health of the devices was added.
	resourcesBefore []resource.Resource
	remarksBefore   []Remark
}

// withoutHealth returns the state before the health of the devices was added.
func (s State) withoutHealth() State {
	s.Resources, s.remarks, s.Health = s.resourcesBefore, s.remarksBefore, nil
	return s
}

// offers reports whether engines take a qualified name from our specs, with the desired edits.
func (s *State) offers(name string) bool {
	reason, inSpec := s.names[name]
	return inSpec && reason == ""
}

// Remark is a sentence about the present state of the node, or of the service.
type Remark struct {
	// Key identifies the subject of the remark. A new remark replaces an earlier one with the same key.
	Key string
	// Level is Error for faults because of which containers cannot get healthy devices, Warn for other faults, and
	// Info for other things that an administrator may want to know.
	Level        slog.Level
	Text, Advice string
}

// newRemark returns a remark about an error because of which containers cannot get devices.
func newRemark(key, text string, err error) Remark {
	return Remark{Key: key, Level: slog.LevelError, Text: text + ": " + strings.ReplaceAll(err.Error(), "\n", "; ")}
}

// LogRemarks logs which remarks are new and which have ended.
func LogRemarks(log *slog.Logger, before, now []Remark) {
	write := map[slog.Level]func(msg string, args ...any){
		slog.LevelError: log.Error, slog.LevelWarn: log.Warn, slog.LevelInfo: log.Info,
	}
	for _, m := range now {
		if slices.Contains(before, m) {
			continue
		}
		line := m.Text
		if m.Advice != "" {
			line += "; " + m.Advice
		}
		write[m.Level](line)
	}
	for _, m := range before {
		if !slices.ContainsFunc(now, func(n Remark) bool { return n.Key == m.Key }) {
			log.Info("no longer the case: " + m.Text)
		}
	}
}

// Remarks returns what is wrong on the node, in one line each.
func (s *State) Remarks() []string { return s.remarksFrom(slog.LevelWarn) }

func (s *State) remarksFrom(level slog.Level) []string {
	var lines []string
	for _, m := range s.remarks {
		if m.Level >= level {
			lines = append(lines, m.Text)
		}
	}
	return lines
}

// Ready returns an error before the first state is published. It also returns an error if the node has devices, but
// containers can get none of them because of the spec files or the driver as a whole.
func (s *State) Ready() error {
	if s.Snapshot == nil {
		return errors.New("the GPUs have not been read yet")
	}
	reasons := s.remarksFrom(slog.LevelError)
	hasDevices := slices.ContainsFunc(s.Resources, func(r resource.Resource) bool { return len(r.Devices) > 0 })
	if !hasDevices || len(reasons) == 0 || countHealthy(s.Resources) > 0 {
		return nil
	}
	return fmt.Errorf("no device can be given to containers: %s", strings.Join(reasons, "; "))
}

// countHealthy counts the healthy devices. All replicas of a device count as one.
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

// onlyPublished returns the resources with only those devices that were published before. None of them is healthier
// than before.
func onlyPublished(next, before []resource.Resource) []resource.Resource {
	published := map[[2]string]resource.Device{}
	for _, r := range before {
		for _, d := range r.Devices {
			published[[2]string{r.Name, d.ID}] = d
		}
	}
	list := slices.Clone(next)
	for i := range list {
		r := &list[i]
		devices := r.Devices
		r.Devices = []resource.Device{}
		for _, d := range devices {
			old, ok := published[[2]string{r.Name, d.ID}]
			if ok && d.Healthy && !old.Healthy {
				d.Healthy, d.Reason = false, old.Reason
			}
			if ok {
				r.Devices = append(r.Devices, d)
			}
		}
	}
	return list
}
