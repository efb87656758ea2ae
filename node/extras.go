package node

import (
	"fmt"
	"io"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/fileid"
)

// Extra is something that containers with a device get besides it, where the node has it.
type Extra struct {
	driver.Extra
	// Channels are the numbers of the wanted IMEX channels.
	Channels []int
	// Required makes all devices unhealthy while a channel is missing.
	Required bool
}

// RequiredError is that a required extra cannot be given to containers.
type RequiredError struct {
	Extra driver.Extra
	// Conflict is the spec file that defines its name too, or the zero value if the host lacks the extra.
	Conflict cdi.Conflict
	// Missing lists what the host lacks.
	Missing string
}

// Error names the extra and what the host lacks, or the other file.
func (e *RequiredError) Error() string {
	if e.Missing != "" {
		return fmt.Sprintf("%s is required: %s", e.Extra, e.Missing)
	}
	return fmt.Sprintf("%s is required: %s", e.Extra, e.Conflict)
}

// extraFile is an extra and its spec on disk.
type extraFile struct {
	Extra
	file   *specFile
	logged string // what was last logged about the extra
}

func newExtraFiles(o *Options) []*extraFile {
	var list []*extraFile
	for _, e := range o.Extras {
		kind := e.Kind(o.Spec.Kind)
		file := &specFile{path: fileIn(o, kind), dirs: o.Dirs, kind: kind, log: o.Log}
		list = append(list, &extraFile{Extra: e, file: file})
	}
	return list
}

// checkOffered returns an error unless engines take all devices of the extra's spec from our file.
func (e *extraFile) checkOffered(spec *specs.Spec, a *applied) error {
	if spec == nil {
		return nil
	}
	for i := range spec.Devices {
		name := spec.Kind + "=" + spec.Devices[i].Name
		if a.offered[name] {
			continue
		}
		at := slices.IndexFunc(a.conflicts, func(c cdi.Conflict) bool { return c.Name == name && c.Unavailable() })
		if at < 0 {
			return &RequiredError{Extra: e.Extra.Extra, Missing: "it is not in its CDI spec " + e.file.path}
		}
		return &RequiredError{Extra: e.Extra.Extra, Conflict: a.conflicts[at]}
	}
	return nil
}

// findExtras returns the specs of those extras that the node has. A required one that is missing is a RequiredError.
func (r *Reconciler) findExtras() ([]*specs.Spec, error) {
	var list []*specs.Spec
	for _, e := range r.extras {
		found, findings := driver.DiscoverExtra(r.opts.Host, e.Extra.Extra, e.Channels)
		if missing := missingNodes(findings); e.Required && missing != "" {
			return nil, &RequiredError{Extra: e.Extra.Extra, Missing: missing}
		}
		r.logExtra(e, found, findings)
		spec, err := cdi.GenerateExtra(found, e.file.kind)
		if err != nil {
			return nil, err
		}
		if len(spec.Devices) > 0 {
			list = append(list, spec)
		}
	}
	return list, nil
}

// logExtra logs what the node has of an extra, when that changes.
func (r *Reconciler) logExtra(e *extraFile, found *driver.ExtraFiles, findings []driver.Finding) {
	text := fmt.Sprintf("containers get %s (device nodes: %d)", e.Extra.Extra, len(found.Nodes))
	if len(found.Nodes) == 0 {
		text = fmt.Sprintf("containers do not get %s, since there is no device node", e.Extra.Extra)
	}
	if missing := missingNodes(findings); missing != "" {
		text += "; " + missing
	}
	if text != e.logged {
		e.logged = text
		r.log.Info(text)
	}
}

// missingNodes is what is wrong with the device nodes, or empty.
func missingNodes(findings []driver.Finding) string {
	var words []string
	for _, f := range findings {
		if f.Kind == driver.KindNode && !f.Used {
			words = append(words, f.Name+": "+f.Note)
		}
	}
	return strings.Join(words, "; ")
}

// writeExtras adds the files of the extras to a fingerprint.
func (r *Reconciler) writeExtras(w io.Writer) {
	for _, e := range r.extras {
		found, _ := driver.DiscoverExtra(r.opts.Host, e.Extra.Extra, e.Channels)
		fmt.Fprintln(w, e.Extra.Extra, found.Nodes, found.Files)
	}
}

// logUnconfiguredExtras logs the specs of extras that are no longer configured. They stay on disk: a container that was
// given the extra cannot start again without its spec.
func (r *Reconciler) logUnconfiguredExtras() {
	for _, e := range driver.Extras() {
		kind := e.Kind(r.opts.Spec.Kind)
		path := fileIn(&r.opts, kind)
		if path == "" || r.owns(path) || fileid.Of(path).IsZero() {
			continue
		}
		if spec, err := cdi.ReadFile(path); err == nil && spec.Kind == kind && cdi.WroteExtra(e, spec) {
			r.log.Info(fmt.Sprintf("%s is not configured, and its CDI spec %s stays until it is removed by hand",
				e, path))
		}
	}
}

// specOf is the spec of a kind, or nil.
func specOf(list []*specs.Spec, kind string) *specs.Spec {
	at := slices.IndexFunc(list, func(s *specs.Spec) bool { return s.Kind == kind })
	if at < 0 {
		return nil
	}
	return list[at]
}
