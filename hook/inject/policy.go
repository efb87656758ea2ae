package inject

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/internal/yamlfile"
)

// maxPolicy bounds the policy, in bytes.
const maxPolicy = 1 << 20

// policy decides which devices containers get by annotations. The zero value allows all devices of the spec files that
// this project wrote, and no others.
type policy struct {
	// limits apply to every container.
	limits `yaml:",inline"`
	// Rules say which containers may request devices: each device needs a rule that allows it. Nil lets all containers
	// request.
	Rules []rule `yaml:"rules"`
	// Runtime is the absolute path of the runtime behind gpu-cdi-runtime; empty means the first that is found.
	Runtime string `yaml:"runtime"`
	// Log is the absolute path of a file for errors and warnings, or "syslog"; empty means none.
	Log string `yaml:"log"`
}

// limits say which devices may be requested.
type limits struct {
	// Kinds are CDI kinds that are allowed, whichever program wrote their specs; nil allows the kinds in specs that
	// this project wrote.
	Kinds []string `yaml:"kinds"`
	// Devices are qualified names of devices that are allowed; nil allows all devices of the kinds.
	Devices []string `yaml:"devices"`
	// Allocated says whether the kubelet must have allocated the devices to the container.
	Allocated bool `yaml:"allocated"`
}

// parsePolicy parses a policy. Unknown keys and malformed names are errors. The policy is nil only if the data is not
// YAML; with other errors it has what could be parsed.
func parsePolicy(data []byte) (*policy, error) {
	p := &policy{}
	document, err := yamlfile.Decode(data, p, nil)
	if document == nil {
		return nil, fmt.Errorf("not YAML: %w", err)
	}
	return p, wording.Limit(errors.Join(err, p.validate()))
}

// PolicyRuntime returns the runtime that the content of a PolicyFile names, or "". The error says what is wrong with
// the policy.
func PolicyRuntime(data []byte) (string, error) {
	p, err := parsePolicy(data)
	if p == nil {
		return "", err
	}
	return p.Runtime, err
}

func (p *policy) validate() error {
	problems := []error{p.limits.validate("", p.Kinds)}
	for i := range p.Rules {
		path := fmt.Sprintf("rules[%d].", i)
		problems = append(problems, p.Rules[i].validate(path, p.Kinds))
		for _, uid := range p.Rules[i].BundleOwner {
			if uid < 0 {
				problems = append(problems, fmt.Errorf("%sbundle-owner: %d is not a user ID", path, uid))
			}
		}
	}
	if p.Runtime != "" && !filepath.IsAbs(p.Runtime) {
		problems = append(problems, fmt.Errorf("runtime: %.100q: want an absolute path", p.Runtime))
	}
	if p.Log != "" && p.Log != syslog && !filepath.IsAbs(p.Log) {
		problems = append(problems, fmt.Errorf("log: %.100q: want an absolute path, or %s", p.Log, syslog))
	}
	return errors.Join(problems...)
}

// validate checks the limits. Its errors name a key with `path` before it. Outer are the kinds of the whole policy.
func (l *limits) validate(path string, outer []string) error {
	var problems []error
	problem := func(format string, args ...any) { problems = append(problems, fmt.Errorf(path+format, args...)) }
	for _, kind := range l.Kinds {
		// A kind is the part before the name of a device.
		if _, _, _, err := parser.ParseQualifiedName(kind + "=all"); err != nil || strings.Contains(kind, "=") {
			problem("kinds: %.100q: want VENDOR/CLASS, such as %s", kind, cdi.DefaultKind)
		} else if outer != nil && !slices.Contains(outer, kind) {
			problem("kinds: %s is not in the policy's own kinds: add it there, or remove it here", kind)
		}
	}
	kinds := l.Kinds
	if kinds == nil {
		kinds = outer
	}
	for _, name := range l.Devices {
		kind, _, _ := strings.Cut(name, "=")
		if err := checkName(name); err != nil {
			problem("devices: %.100q: want VENDOR/CLASS=NAME", name)
		} else if kinds != nil && !slices.Contains(kinds, kind) {
			problem("devices: the kind of %s is not in kinds", name)
		}
	}
	return errors.Join(problems...)
}

// check returns an error unless the policy allows a container to have a device. File is the spec file that defines the
// device, or nil if the device does not exist. The result mustBeAllocated says that the container may have the device
// only if the kubelet allocated it to the container, which [Injector.Allowed] checks.
func (p *policy) check(c *container, name string, file *cdi.SpecFile) (mustBeAllocated bool, err error) {
	if err := p.limits.check(name); err != nil {
		return false, err
	}
	kind, _, _ := strings.Cut(name, "=")
	foreign := file != nil && !cdi.WrittenHere(file.Spec) && !slices.Contains(p.Kinds, kind)
	errForeign := func() error {
		return fmt.Errorf("%s was written by another program, and its kind %s is not allowed", file.Path, kind)
	}
	if p.Rules == nil {
		if foreign {
			return false, errForeign()
		}
		return p.Allocated, nil
	}
	allows := func(r *rule) error {
		if err := r.fits(c); err != nil {
			return err
		}
		if err := r.check(name); err != nil {
			return err
		}
		if foreign && !slices.Contains(r.Kinds, kind) {
			return errForeign()
		}
		return nil
	}
	var reasons []string
	for i := range p.Rules {
		r := &p.Rules[i]
		err := allows(r)
		switch {
		case err != nil:
			reasons = append(reasons, fmt.Sprintf("rule %d: %v", i+1, err))
		case !r.Allocated:
			return p.Allocated, nil
		default:
			mustBeAllocated = true
		}
	}
	if mustBeAllocated {
		return true, nil
	}
	return false, fmt.Errorf("no rule allows it (%s)", cmp.Or(strings.Join(reasons, "; "), "there are none"))
}

// check returns an error unless a device is within the limits.
func (l *limits) check(name string) error {
	kind, _, _ := strings.Cut(name, "=")
	switch {
	case l.Kinds != nil && !slices.Contains(l.Kinds, kind):
		return fmt.Errorf("kind %s is not allowed", kind)
	case l.Devices != nil && !slices.Contains(l.Devices, name):
		return errors.New("it is not among the devices that are allowed")
	}
	return nil
}

// dependsOnContainer reports whether the policy depends on the container that requests the devices.
func (p *policy) dependsOnContainer() bool { return p.Rules != nil || p.Allocated }

// readPolicy reads the policy at path, which must belong to root. If there is no file, it returns the zero value.
func readPolicy(path string) (*policy, error) {
	p, err := readAll(path)
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", path, err)
	}
	return p, nil
}

// readAll reads and parses a policy. Like parsePolicy, it can return both an error and what could be parsed.
func readAll(path string) (*policy, error) {
	data, err := readTrusted(path)
	if err != nil {
		return nil, err
	}
	return parsePolicy(data)
}

// readTrusted reads a file that must belong to root. It returns nothing without the file.
func readTrusted(path string) ([]byte, error) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err := trust.RootFile(path); err != nil {
		return nil, err
	}
	return fileio.ReadFile(path, maxPolicy)
}
