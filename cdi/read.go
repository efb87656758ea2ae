package cdi

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"gpu-cdi-plugin/internal/regular"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// maxSpec is the size in bytes of the largest spec file that is read. One for 16 GPUs has 40 KB.
const maxSpec = 16 << 20

// ReadFile reads one spec file. It refuses what the CDI library would refuse, and besides that files that are not
// regular or larger than 16 MiB.
func ReadFile(path string) (*specs.Spec, error) {
	// The library reads whatever is there, for ever if it is a FIFO. It has to read the file again, since it offers
	// its whole validation only on files.
	if _, err := regular.ReadFile(path, maxSpec); err != nil {
		return nil, fmt.Errorf("read CDI spec: %w", err)
	}
	spec, err := cdilib.ReadSpec(path, 0)
	if err != nil {
		return nil, fmt.Errorf("read CDI spec %s: %w", path, withoutPreamble(err))
	}
	return spec.Spec, nil
}

// withoutPreamble drops what the library says in front of a cause: that it failed to do what the caller's message
// names already.
func withoutPreamble(err error) error {
	for strings.HasPrefix(err.Error(), "failed to") {
		cause := errors.Unwrap(err)
		if cause == nil {
			break
		}
		err = cause
	}
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("the file is empty: %w", err)
	}
	return inWords(err)
}

// checkSpec applies the library's rules to a spec that is not in a file yet. It leaves out those for annotations,
// which this package does not write.
func checkSpec(spec *specs.Spec) error {
	if err := specs.ValidateVersion(spec); err != nil {
		return err
	}
	if err := validateKind(spec.Kind); err != nil {
		return err
	}
	if err := (&cdilib.ContainerEdits{ContainerEdits: &spec.ContainerEdits}).Validate(); err != nil {
		return err
	}
	if len(spec.Devices) == 0 {
		return errors.New("no devices")
	}
	names := map[string]bool{}
	for i := range spec.Devices {
		d := &spec.Devices[i]
		if err := checkDevice(d); err != nil {
			return fmt.Errorf("device %q: %w", d.Name, err)
		}
		if names[d.Name] {
			return fmt.Errorf("two devices have the name %q", d.Name)
		}
		names[d.Name] = true
	}
	return nil
}

func checkDevice(d *specs.Device) error {
	if err := parser.ValidateDeviceName(d.Name); err != nil {
		return err
	}
	e := &d.ContainerEdits
	if len(e.Env)+len(e.DeviceNodes)+len(e.NetDevices)+len(e.Mounts)+len(e.Hooks)+len(e.AdditionalGIDs) == 0 &&
		e.IntelRdt == nil {
		return errors.New("no edits")
	}
	return (&cdilib.ContainerEdits{ContainerEdits: e}).Validate()
}
