package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/regular"
	"gpu-cdi-plugin/internal/trust"
)

// maxConfig is the size in bytes of the largest config.json that is read. That of runc has no limit.
const maxConfig = 64 << 20

const configName = "config.json"

// ErrNoConfig is that a bundle's directory is there and config.json is not in it.
var ErrNoConfig = errors.New("the bundle has no config.json")

// Inject puts devices into the bundle's config.json, as an engine that knows CDI would. Names are qualified; dirs are
// the spec directories from the lowest priority to the highest. It reports whether the file changed: devices that are
// there already change nothing.
//
// All devices are put in or none. A bundle that has the files of another driver than the specs is refused: it would get
// those of both. What config.json has and this program does not know is kept, and so are the file's
// mode and owner. An error about an unknown device lists those that exist; one about a bundle without config.json wraps
// ErrNoConfig.
//
// The bundle may belong to another user than the caller. Its directory is opened once, by a path whose links only root
// or the caller could have made, and all happens in it, whatever takes its place meanwhile.
func Inject(bundle string, names []string, dirs ...string) (bool, error) {
	edits, err := Load(dirs...).edits(names)
	if err != nil {
		return false, fmt.Errorf("inject devices: %w", err)
	}
	dir, err := trust.OpenDir(bundle)
	if err != nil {
		return false, fmt.Errorf("inject devices: %w", err)
	}
	defer dir.Close()
	data, info, err := readConfig(dir)
	if err != nil {
		return false, fmt.Errorf("inject devices: %w", err)
	}
	after, err := editConfig(data, edits)
	if err != nil {
		return false, fmt.Errorf("inject devices: %s: %w", filepath.Join(bundle, configName), err)
	}
	if after == nil {
		return false, nil
	}
	if err := atomicfile.WriteLike(dir, configName, after, info); err != nil {
		return false, fmt.Errorf("inject devices: %w", err)
	}
	return true, nil
}

// readConfig reads config.json in a bundle. One that could be another file of somebody else's is an error: a symbolic
// link, one of several names of a file, or a file of another owner than the bundle's.
func readConfig(dir *os.File) ([]byte, fs.FileInfo, error) {
	path := filepath.Join(dir.Name(), configName)
	fd, err := unix.Openat(int(dir.Fd()), configName, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ELOOP):
		return nil, nil, fmt.Errorf("%s is a symbolic link, not a regular file", path)
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil, fmt.Errorf("%w: %w", ErrNoConfig, &fs.PathError{Op: "open", Path: path, Err: err})
	case err != nil:
		return nil, nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	data, info, err := regular.Read(f, maxConfig)
	if err != nil {
		return nil, nil, err
	}
	var file, bundle unix.Stat_t
	if err := errors.Join(unix.Fstat(fd, &file), unix.Fstat(int(dir.Fd()), &bundle)); err != nil {
		return nil, nil, fmt.Errorf("stat %s and its directory: %w", path, err)
	}
	switch {
	case file.Nlink != 1:
		return nil, nil, fmt.Errorf("%s has %d names (hard links), and a bundle's file has one", path, file.Nlink)
	case file.Uid != bundle.Uid:
		return nil, nil, fmt.Errorf("%s belongs to user %d, and its bundle to user %d", path, file.Uid, bundle.Uid)
	}
	return data, info, nil
}

// edits are what the devices want, first what their spec wants in any case, as the CDI library puts them together.
func (c *Catalogue) edits(names []string) (*cdilib.ContainerEdits, error) {
	if err := c.check(names); err != nil {
		return nil, err
	}
	edits := &cdilib.ContainerEdits{}
	specSeen := map[string]bool{}
	for _, name := range names {
		f := c.file(name)
		if !specSeen[f.Path] {
			specSeen[f.Path] = true
			edits = edits.Append(&cdilib.ContainerEdits{ContainerEdits: &f.Spec.ContainerEdits})
		}
		_, _, device := parser.ParseDevice(name)
		for i := range f.Spec.Devices {
			if d := &f.Spec.Devices[i]; d.Name == device {
				edits = edits.Append(&cdilib.ContainerEdits{ContainerEdits: &d.ContainerEdits})
			}
		}
	}
	return edits, nil
}

// check returns an error unless all devices can be injected.
func (c *Catalogue) check(names []string) error {
	var missing []string
	for _, name := range names {
		if _, _, _, err := parser.ParseQualifiedName(name); err != nil {
			return exit.With(exit.Usage, "", fmt.Errorf("device %q: want VENDOR/CLASS=NAME: %w", name, err))
		}
		offer := c.offer(name)
		if offer == nil && !slices.Contains(missing, name) {
			missing = append(missing, name)
		}
		if offer != nil && offer.State == Conflict {
			err := fmt.Errorf("device %s: %s and %s both define it, so it cannot be used", name, offer.File, offer.Other)
			return exit.With(exit.Failure, "remove one of the two files", err)
		}
	}
	if len(missing) > 0 {
		return c.unknown(missing)
	}
	return nil
}

// offer is the device of the highest priority with that name, or nil.
func (c *Catalogue) offer(name string) *Offer {
	i := slices.IndexFunc(c.Devices, func(o Offer) bool { return o.Name == name })
	if i < 0 {
		return nil
	}
	return &c.Devices[i]
}

// FilesOf are the files that offer the devices, each once. Devices that do not exist have none.
func (c *Catalogue) FilesOf(names []string) []*SpecFile {
	var files []*SpecFile
	for _, name := range names {
		if c.offer(name) == nil {
			continue
		}
		if f := c.file(name); !slices.Contains(files, f) {
			files = append(files, f)
		}
	}
	return files
}

// file is the file that offers a device, which must be offered.
func (c *Catalogue) file(name string) *SpecFile {
	offer := c.offer(name)
	return &c.Files[slices.IndexFunc(c.Files, func(f SpecFile) bool { return f.Path == offer.File })]
}

// unknown is the error about devices that do not exist, with those that do.
func (c *Catalogue) unknown(missing []string) error {
	what := "device " + missing[0] + " does not exist"
	if len(missing) > 1 {
		what = "devices " + strings.Join(missing, ", ") + " do not exist"
	}
	there, kinds := c.likely(missing)
	hint := ""
	switch {
	case len(there) > 0:
		what += "; there are " + strings.Join(there, ", ")
	case len(kinds) > 0:
		what += "; there are devices of the kind " + strings.Join(kinds, ", ")
	default:
		what += ": there are no devices in " + strings.Join(c.Dirs, ", ")
		hint = "gpu-cdi-plugin cdi generate --write makes the spec of this host's GPUs"
	}
	for _, f := range c.Files {
		if f.Error != "" {
			hint = "a spec file cannot be read: " + f.Error
		}
	}
	return exit.With(exit.Failure, hint, errors.New(what))
}

// likely are the devices of the same kinds as the missing ones, without the kind, and all kinds that there are.
func (c *Catalogue) likely(missing []string) (there, kinds []string) {
	for _, name := range c.Names() {
		kind, device, _ := strings.Cut(name, "=")
		if slices.ContainsFunc(missing, func(m string) bool { return strings.HasPrefix(m, kind+"=") }) {
			there = append(there, device)
		}
		if !slices.Contains(kinds, kind) {
			kinds = append(kinds, kind)
		}
	}
	return there, kinds
}

// editConfig applies edits to a config.json. The result is nil if they change nothing.
//
// What the edits changed is found by comparing the configuration as the CDI library sees it before and after, and is
// carried over to the file's own JSON, so that what the library does not know stays.
func editConfig(data []byte, edits *cdilib.ContainerEdits) ([]byte, error) {
	original, err := decodeJSON(data)
	if err != nil {
		return nil, err
	}
	config, err := parseConfig(data)
	if err != nil {
		return nil, err
	}
	before, err := toJSON(config)
	if err != nil {
		return nil, err
	}
	if err := sameDriver(config, edits); err != nil {
		return nil, err
	}
	order := orderOf(config)
	counts := countLists(config)
	if err := edits.Apply(config); err != nil {
		hint := "the spec may be out of date: gpu-cdi-plugin cdi diff tells"
		return nil, exit.With(exit.Failure, hint, fmt.Errorf("apply CDI edits: %w", err))
	}
	counts.dropRepeated(config)
	order.restore(config)
	after, err := toJSON(config)
	if err != nil || equalJSON(before, after) {
		return nil, err
	}
	merged, err := mergeJSON(original, before, after)
	if err != nil {
		return nil, err
	}
	return encodeJSON(merged)
}

// sameDriver says whether a configuration has the files of another driver than the edits want. Most of those have their
// version in their names, so the container would have both, and a hook for each.
func sameDriver(config *oci.Spec, edits *cdilib.ContainerEdits) error {
	before, after := driverOf(config), driverVersion(&specs.Spec{ContainerEdits: *edits.ContainerEdits})
	if before == "" || after == "" || before == after {
		return nil
	}
	return exit.With(exit.Failure, "make config.json anew, then inject the devices", fmt.Errorf(
		"devices of driver %s are in it, and the CDI specs are for %s", before, after))
}

// driverOf is the version of the driver whose files were put into a configuration, or empty.
func driverOf(config *oci.Spec) string {
	var edits specs.ContainerEdits
	for _, m := range config.Mounts {
		edits.Mounts = append(edits.Mounts, &specs.Mount{ContainerPath: m.Destination})
	}
	for _, list := range hookLists(config) {
		for _, h := range *list {
			edits.Hooks = append(edits.Hooks, &specs.Hook{Args: h.Args})
		}
	}
	return driverVersion(&specs.Spec{ContainerEdits: edits})
}

// parseConfig reads a configuration as the CDI library and runtimes do.
func parseConfig(data []byte) (*oci.Spec, error) {
	var config oci.Spec
	if err := json.Unmarshal(data, &config); err != nil {
		return nil, fmt.Errorf("not an OCI configuration: %w", inWords(err))
	}
	if config.Process == nil {
		return nil, errors.New("not the configuration of a container that can be started: it has no process")
	}
	return &config, nil
}
