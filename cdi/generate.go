package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/exit"
)

// DefaultKind is the kind of the specs, since it is what people type.
const DefaultKind = "nvidia.com/gpu"

// AllDevices is the name of the device that is all others together.
const AllDevices = "all"

// Options are what a spec depends on besides the node.
type Options struct {
	// Kind is vendor/class of the spec; empty is DefaultKind.
	Kind string
	// HookPath is the absolute path of prestart-hook on the host.
	HookPath string
	// Capabilities limit what containers get; 0 is All.
	Capabilities Capabilities
}

// ErrNoDevices is wrapped by Generate's error about a snapshot without a device that containers can be given.
var ErrNoDevices = errors.New("no GPU can be offered")

const hintNoDevices = "gpu-cdi-plugin devices shows what the driver says of the GPUs, " +
	"gpu-cdi-plugin cdi generate --explain what was left out and why"

// Generate makes the spec. Each GPU has its index and its UUID as names, each MIG device PARENT:INDEX and its UUID, and
// "all" is all of them. A GPU in MIG mode is offered only as its MIG devices.
//
// The findings are the GPUs and MIG devices, in the order of the snapshot; one that is not in the spec says why.
// They are there with ErrNoDevices too, which has exit status 11. The spec has the lowest cdiVersion that carries it.
func Generate(s *gpu.Snapshot, d *Driver, o Options) (*specs.Spec, []Finding, error) {
	o.Kind = cmp.Or(o.Kind, DefaultKind)
	if err := o.validate(); err != nil {
		return nil, nil, err
	}
	g := newGenerator(d, o)
	for i := range s.Devices {
		g.addGPU(&s.Devices[i])
	}
	if len(g.offers) == 0 {
		return nil, g.findings, exit.With(exit.NoGPU, hintNoDevices, noDevices(g.findings))
	}
	common, err := g.commonEdits(s)
	if err != nil {
		return nil, nil, err
	}
	spec := &specs.Spec{Kind: o.Kind, Devices: g.devices(), ContainerEdits: common}
	spec.Version, err = specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, nil, fmt.Errorf("choose the CDI version: %w", err)
	}
	return spec, g.findings, nil
}

func (o Options) validate() error {
	if err := validateKind(o.Kind); err != nil {
		return err
	}
	if !filepath.IsAbs(o.HookPath) {
		return fmt.Errorf("hook path %q is not absolute", o.HookPath)
	}
	return nil
}

func validateKind(kind string) error {
	vendor, class := parser.ParseQualifier(kind)
	if vendor == "" || class == "" {
		return fmt.Errorf("kind %q: want VENDOR/CLASS, such as %s", kind, DefaultKind)
	}
	err := cmp.Or(parser.ValidateVendorName(vendor), parser.ValidateClassName(class))
	if err != nil {
		return fmt.Errorf("kind %q: %w", kind, err)
	}
	return nil
}

func noDevices(findings []Finding) error {
	var why []string
	for _, f := range findings {
		why = append(why, f.Name+": "+f.Note)
	}
	if len(why) == 0 {
		return fmt.Errorf("%w: the driver has none", ErrNoDevices)
	}
	return fmt.Errorf("%w: %s", ErrNoDevices, strings.Join(why, "; "))
}
