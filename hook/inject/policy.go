package inject

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/parser"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/regular"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/yamlfile"
)

// maxPolicy is the size in bytes of the largest policy that is read.
const maxPolicy = 1 << 20

// policy decides which devices containers get by annotations. The zero value allows all devices of the specs that this
// project wrote, and no others.
type policy struct {
	// Runtime is the absolute path of the runtime behind gpu-cdi-runtime; empty is the first that is found.
	Runtime string `yaml:"runtime"`
	// Kinds are the CDI kinds that may be asked for, whoever wrote their specs; nil is those that this project wrote.
	Kinds []string `yaml:"kinds"`
	// Devices are the qualified names that may be asked for; nil is all of the kinds.
	Devices []string `yaml:"devices"`
}

// parsePolicy reads a policy. Unknown keys and malformed names are errors. The policy is nil only if the data is no
// YAML; with other errors it has what could be read.
func parsePolicy(data []byte) (*policy, error) {
	p := &policy{}
	document, err := yamlfile.Decode(data, p)
	if document == nil {
		return nil, fmt.Errorf("not YAML: %w", err)
	}
	return p, errors.Join(err, p.validate())
}

func (p *policy) validate() error {
	var problems []error
	for _, kind := range p.Kinds {
		// A kind is what stands before the name of a device.
		if _, _, _, err := parser.ParseQualifiedName(kind + "=all"); err != nil || strings.Contains(kind, "=") {
			problems = append(
				problems,
				fmt.Errorf("kinds: %.100q: want VENDOR/CLASS, such as %s", kind, cdi.DefaultKind),
			)
		}
	}
	for _, name := range p.Devices {
		kind, _, _ := strings.Cut(name, "=")
		if err := checkName(name); err != nil {
			problems = append(problems, fmt.Errorf("devices: %.100q: want VENDOR/CLASS=NAME", name))
		} else if p.Kinds != nil && !slices.Contains(p.Kinds, kind) {
			problems = append(problems, fmt.Errorf("devices: %s is of none of the kinds", name))
		}
	}
	if p.Runtime != "" && !filepath.IsAbs(p.Runtime) {
		problems = append(problems, fmt.Errorf("runtime: %.100q: want an absolute path", p.Runtime))
	}
	return errors.Join(problems...)
}

// check returns an error that ends in "allowed" unless a device, which the spec in a file defines, may be asked for.
// Without a file the device does not exist.
func (p *policy) check(name string, file *cdi.SpecFile) error {
	kind, _, _ := strings.Cut(name, "=")
	switch {
	case p.Kinds != nil && !slices.Contains(p.Kinds, kind):
		return fmt.Errorf("kind %s is not allowed", kind)
	case p.Kinds == nil && file != nil && !cdi.WrittenHere(file.Spec):
		return fmt.Errorf("%s is of another program, whose kind %s is not allowed", file.Path, kind)
	case p.Devices != nil && !slices.Contains(p.Devices, name):
		return errors.New("it is not among the devices that are allowed")
	}
	return nil
}

// readPolicy reads the policy at path, which must be root's. Without a file it is the zero value.
func readPolicy(path string) (*policy, error) {
	p, err := readAll(path)
	if err != nil {
		return nil, fmt.Errorf("policy %s: %w", path, err)
	}
	return p, nil
}

// readAll is parsePolicy for a file. The policy is nil if the file cannot be read.
func readAll(path string) (*policy, error) {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return &policy{}, nil
	}
	if err := trust.RootFile(path); err != nil {
		return nil, err
	}
	data, err := regular.ReadFile(path, maxPolicy)
	if err != nil {
		return nil, err
	}
	return parsePolicy(data)
}
