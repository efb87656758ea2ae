package node

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
)

// Extra is a feature that containers get in addition to a device, if the host has it.
type Extra struct {
	driver.Extra
	// Channels are the numbers of the requested IMEX channels.
	Channels []int
	// Required makes all devices unhealthy while a channel is missing.
	Required bool
}

// RequiredError means that containers cannot get a required extra.
type RequiredError struct {
	Extra driver.Extra
	// Conflict has the spec file that also defines the extra's name. It is the zero value if the host lacks the extra.
	Conflict cdi.Conflict
	// Missing lists what the host lacks.
	Missing string
}

func (e *RequiredError) Error() string {
	return fmt.Sprintf("%s is required: %s", e.Extra, cmp.Or(e.Missing, e.Conflict.String()))
}

// Generate returns the spec of the extra, or nil if there is no device node. The parameter gpus is the CDI kind of the
// GPUs. The findings are the files and device nodes that were searched for.
func (e *Extra) Generate(h host.Host, gpus string) (*specs.Spec, []driver.Finding, error) {
	found, findings := driver.DiscoverExtra(h, e.Extra, e.Channels)
	spec, err := cdi.GenerateExtra(found, e.Kind(gpus))
	if err != nil {
		return nil, nil, fmt.Errorf("make the spec of %s: %w", e.Extra, err)
	}
	if len(spec.Devices) == 0 {
		return nil, findings, nil
	}
	return spec, findings, nil
}

// addExtras adds the specs of the extras that the host has. If a required extra is missing, the error is a
// RequiredError.
func (r *Reconciler) addExtras(d *desired) error {
	for i := range r.opts.Extras {
		e := &r.opts.Extras[i]
		spec, findings, err := e.Generate(r.opts.Host, r.opts.Spec.Kind)
		if err != nil {
			return err
		}
		nodes, missing := countNodes(findings)
		if e.Required && missing != "" {
			return &RequiredError{Extra: e.Extra, Missing: missing}
		}
		text := fmt.Sprintf("containers get %s (device nodes: %d)", e.Extra, nodes)
		if nodes == 0 {
			text = fmt.Sprintf("containers do not get %s, since there is no device node", e.Extra)
		}
		if missing != "" {
			text += "; " + missing
		}
		d.remarks = append(d.remarks, Remark{Key: string(e.Extra), Text: text})
		if spec != nil {
			d.specs[spec.Kind] = spec
		}
	}
	return nil
}

// countNodes counts the device nodes of an extra, and describes the missing ones.
func countNodes(findings []driver.Finding) (found int, missing string) {
	var words []string
	for _, f := range findings {
		switch {
		case f.Kind != driver.KindNode:
		case f.Used:
			found++
		default:
			words = append(words, f.Name+": "+f.Note)
		}
	}
	return found, strings.Join(words, "; ")
}

// unconfiguredExtras returns remarks on the specs of extras that are no longer configured. These specs stay on disk: a
// container that has the extra could not restart without its spec.
func (r *Reconciler) unconfiguredExtras() []Remark {
	var list []Remark
	for _, e := range driver.Extras() {
		kind := e.Kind(r.opts.Spec.Kind)
		path := fileIn(&r.opts, kind)
		if slices.ContainsFunc(r.files, func(f *specFile) bool { return f.kind == kind }) || fileio.IDOf(path).IsZero() {
			continue
		}
		if spec, err := cdi.ReadFile(path); err == nil && spec.Kind == kind && cdi.WroteExtra(e, spec) {
			text := fmt.Sprintf("%s is not configured, and its CDI spec %s stays until it is removed by hand", e, path)
			list = append(list, Remark{Key: text, Text: text})
		}
	}
	return list
}
