package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"
)

// Strategy is a way to tell a container's runtime which devices the container gets.
type Strategy string

// The strategies. Any of them can be combined.
const (
	// CDICRI names the CDI devices in the answer's own field. It needs Kubernetes 1.28 and a runtime that knows CDI.
	CDICRI Strategy = "cdi-cri"
	// CDIAnnotations names the CDI devices in an annotation, for runtimes that know CDI under an older kubelet.
	CDIAnnotations Strategy = "cdi-annotations"
	// DeviceSpecs puts the device nodes, mounts and variables of the CDI spec into the answer itself, for runtimes that know
	// no CDI. What the spec's hooks do (the loader's cache, links) is missing then.
	DeviceSpecs Strategy = "device-specs"
	// Envvar sets NVIDIA_VISIBLE_DEVICES, for runtimes that NVIDIA's container toolkit was put in front of.
	Envvar Strategy = "envvar"
)

// Strategies lists the strategies.
func Strategies() []Strategy { return []Strategy{CDICRI, CDIAnnotations, DeviceSpecs, Envvar} }

// Specs is what is known of the CDI spec on disk. Its methods return at once.
type Specs interface {
	// SpecHas returns an error that names those of the qualified CDI names that the spec on disk does not define.
	SpecHas(names ...string) error
}

// Answers say what a container that is given devices gets.
type Answers struct {
	// Strategies are how the devices are named; at least one.
	Strategies []Strategy
	// Kind is the kind of the CDI devices, such as "nvidia.com/gpu".
	Kind string
	// ByIndex names devices by index, "3" or "0:1", in CDI names and variables, and not by UUID.
	ByIndex bool
	// AnnotationPrefix begins the keys of annotations; empty is that of CDI, "cdi.k8s.io/".
	AnnotationPrefix string
	// Specs is asked before a CDI name is handed out; nil asks nobody.
	Specs Specs
	// Spec returns the CDI spec that device nodes and mounts are taken from, or nil if there is none now. It is needed for
	// DeviceSpecs alone. What it returns is not changed later.
	Spec func() *specs.Spec
	// Extras returns the specs of what every container gets besides its devices, all devices of each; nil is none. What it
	// returns is not changed later.
	Extras func() []*specs.Spec
	// Preference says which devices the kubelet is told to take.
	Preference Preference
	// AllocationDir is where the files are that tell containers what they were given. Empty is nowhere: then nothing is
	// mounted at AllocationPath and in AllocationsDir. The kubelet remembers the paths for as long as a pod lives, also over a reboot, so the
	// directory must survive one, and have the same path on the host and here. A file goes when the kubelet's checkpoint in
	// Options.Dir has forgotten it.
	AllocationDir string
	// MPSDir has the directories of MPS control daemons; see mps.DirsOf. Containers with a GPU that is shared by MPS get
	// those of its daemon. Its path is the same on the host and here.
	MPSDir string
}

func (a *Answers) has(s Strategy) bool { return slices.Contains(a.Strategies, s) }

// byCDIName tells whether answers hold CDI names.
func (a *Answers) byCDIName() bool { return a.has(CDICRI) || a.has(CDIAnnotations) }

// check says all that is wrong.
func (a *Answers) check() error {
	var errs []error
	if len(a.Strategies) == 0 {
		errs = append(errs, fmt.Errorf("no strategy: want some of %s", strategyNames()))
	}
	for _, s := range a.Strategies {
		if !slices.Contains(Strategies(), s) {
			errs = append(errs, fmt.Errorf("strategy %q: want one of %s", s, strategyNames()))
		}
	}
	if a.byCDIName() && a.Kind == "" {
		errs = append(errs, errors.New("CDI names need a kind"))
	}
	if a.has(DeviceSpecs) && a.Spec == nil {
		errs = append(errs, fmt.Errorf("strategy %s needs a CDI spec", DeviceSpecs))
	}
	return errors.Join(errs...)
}

func strategyNames() string {
	var names []string
	for _, s := range Strategies() {
		names = append(names, string(s))
	}
	return strings.Join(names, ", ")
}
