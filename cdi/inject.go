package cdi

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
)

// maxConfig bounds the config.json that is read, in bytes. runc has no limit.
const maxConfig = 64 << 20

const configName = "config.json"

// Errors of Inject for which callers print advice.
var (
	// ErrNoConfig means that a bundle's directory exists without a config.json.
	ErrNoConfig = errors.New("the bundle has no config.json")
	// ErrBadName means that a name is not the name of a CDI device.
	ErrBadName = errors.New("want VENDOR/CLASS=NAME")
	// ErrNothingOffered means that the spec directories offer no device.
	ErrNothingOffered = errors.New("there are no devices")
	// ErrStale means that a spec does not fit the host, for example because its device node is gone.
	ErrStale = errors.New("the CDI specs do not fit this host")
)

// OtherDriverError means that a config.json has devices of another driver version than the CDI specs.
type OtherDriverError struct{ Config, Specs string }

// Error names both versions.
func (e *OtherDriverError) Error() string {
	return fmt.Sprintf("it has devices of driver %s, but the CDI specs are for %s", e.Config, e.Specs)
}

// Additions are what a container gets in addition to devices.
type Additions struct {
	Edits       specs.ContainerEdits
	Annotations map[string]string
}

// Inject adds devices and additions to the bundle's config.json, like an engine with CDI. Names are qualified; dirs
// are the spec directories from the lowest priority to the highest. It reports whether the file changed. It makes the
// new content with EditConfig and replaces the file with EditBundle, and returns their errors.
func Inject(bundle string, names []string, more Additions, dirs ...string) (bool, error) {
	edits, err := Load(dirs...).edits(names)
	if err != nil {
		return false, fmt.Errorf("inject devices: %w", err)
	}
	edits = edits.Append(&cdilib.ContainerEdits{ContainerEdits: &more.Edits})
	return EditBundle(bundle, func(config []byte, _ uint32) ([]byte, error) {
		return editConfig(config, edits, more.Annotations, false)
	})
}

// EditConfig returns a config.json to which devices were added, or nil if it already has them. Names are qualified.
//
// It adds all devices or none. Parts of config.json that this program does not know remain. If the configuration has
// files of another driver than the specs, the error is an *OtherDriverError: the container would get the files of
// both. If a device is unknown, the error lists the known ones. The error wraps ErrBadName, ErrNothingOffered or
// ErrStale if that is the cause.
//
// A runtime cannot make device nodes in a user namespace. There the container gets bind mounts of the host's nodes
// instead, unless makesNodes says that the caller makes the device nodes.
func (d *SpecDirs) EditConfig(config []byte, names []string, makesNodes bool) ([]byte, error) {
	edits, err := d.edits(names)
	if err != nil {
		return nil, err
	}
	return editConfig(config, edits, nil, makesNodes)
}

// EditBundle replaces the bundle's config.json by the result of the function `edit`, or leaves it unchanged if that is
// nil. The function also gets the user ID of the bundle's owner. EditBundle reports whether the file changed, and
// keeps the file's mode and owner. If the file is missing, the error wraps ErrNoConfig.
//
// The bundle may belong to another user than the caller. Its directory is opened once, by a path whose links only root
// or the caller could have made. All work uses that handle, even if another directory takes the place of this one.
// config.json is also opened and read only once.
func EditBundle(bundle string, edit func(config []byte, owner uint32) ([]byte, error)) (bool, error) {
	return editBundle(bundle, edit, func(dir *os.File, after []byte, like os.FileInfo) error {
		return fileio.ReplaceLike(dir, configName, after, like)
	})
}

// CheckBundle makes all checks of EditBundle, and leaves the file unchanged.
func CheckBundle(bundle string, edit func(config []byte, owner uint32) ([]byte, error)) error {
	_, err := editBundle(bundle, edit, func(*os.File, []byte, os.FileInfo) error { return nil })
	return err
}

func editBundle(bundle string, edit func(config []byte, owner uint32) ([]byte, error),
	write func(dir *os.File, after []byte, like os.FileInfo) error,
) (bool, error) {
	dir, err := trust.OpenDir(bundle)
	if err != nil {
		return false, fmt.Errorf("inject devices: %w", err)
	}
	defer dir.Close()
	f, err := openConfig(dir)
	if err != nil {
		return false, fmt.Errorf("inject devices: %w", err)
	}
	defer f.Close()
	data, info, err := fileio.ReadRegular(f, maxConfig)
	if err != nil {
		return false, fmt.Errorf("inject devices: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return false, fmt.Errorf("inject devices: %w", &fs.PathError{Op: "stat", Path: bundle, Err: err})
	}
	after, err := edit(data, st.Uid)
	if err != nil {
		return false, fmt.Errorf("inject devices: %s: %w", f.Name(), err)
	}
	if after == nil {
		return false, nil
	}
	if err := checkOwn(f, dir, data); err != nil {
		return false, fmt.Errorf("inject devices: %w", err)
	}
	if err := write(dir, after, info); err != nil {
		return false, fmt.Errorf("inject devices: %w", err)
	}
	return true, nil
}

// openConfig opens config.json in a bundle. It does not follow a link, and does not wait for the writer of a FIFO.
func openConfig(dir *os.File) (*os.File, error) {
	path := filepath.Join(dir.Name(), configName)
	fd, err := unix.Openat(int(dir.Fd()), configName, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("%s is a symbolic link, not a regular file", path)
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w: %w", ErrNoConfig, &fs.PathError{Op: "open", Path: path, Err: err})
	case err != nil:
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return os.NewFile(uintptr(fd), path), nil
}

// checkOwn returns an error if config.json was replaced since it was opened, is a hard link, or has another owner than
// the bundle. Otherwise the bundle's owner could make this process read a file elsewhere and write its content into
// the bundle. There is one exception: podman gives the bundle of a container with a user namespace to the container's
// root, but not config.json, in which the user namespace is recorded.
func checkOwn(f, dir *os.File, config []byte) error {
	var file, bundle unix.Stat_t
	if err := errors.Join(unix.Fstat(int(f.Fd()), &file), unix.Fstat(int(dir.Fd()), &bundle)); err != nil {
		return fmt.Errorf("stat %s and its directory: %w", f.Name(), err)
	}
	switch {
	case file.Nlink == 0:
		return fmt.Errorf("%s was replaced while it was read", f.Name())
	case file.Nlink != 1:
		return fmt.Errorf("%s has %d names (hard links), want one", f.Name(), file.Nlink)
	case file.Uid != bundle.Uid && (int(file.Uid) != os.Geteuid() || !isRootOf(config, bundle.Uid)):
		return fmt.Errorf("%s belongs to user %d, its bundle to user %d", f.Name(), file.Uid, bundle.Uid)
	}
	return nil
}

// DeviceNodes returns the paths on the host of the device nodes that containers get with devices, given by their names.
func (d *SpecDirs) DeviceNodes(names []string) ([]string, error) {
	edits, err := d.edits(names)
	if err != nil {
		return nil, err
	}
	var paths []string
	for _, n := range edits.DeviceNodes {
		paths = append(paths, cmp.Or(n.HostPath, n.Path))
	}
	return paths, nil
}

// edits returns the common edits of each spec and the edits of the devices, merged like the CDI library does.
func (d *SpecDirs) edits(names []string) (*cdilib.ContainerEdits, error) {
	if err := d.check(names); err != nil {
		return nil, err
	}
	edits := &cdilib.ContainerEdits{}
	specSeen := map[string]bool{}
	for _, name := range names {
		f := d.file(name)
		if !specSeen[f.Path] {
			specSeen[f.Path] = true
			edits = edits.Append(&cdilib.ContainerEdits{ContainerEdits: &f.Spec.ContainerEdits})
		}
		_, _, device := parser.ParseDevice(name)
		for i := range f.Spec.Devices {
			if dev := &f.Spec.Devices[i]; dev.Name == device {
				edits = edits.Append(&cdilib.ContainerEdits{ContainerEdits: &dev.ContainerEdits})
			}
		}
	}
	return edits, nil
}

// check returns an error unless all devices can be injected.
func (d *SpecDirs) check(names []string) error {
	var missing []string
	for _, name := range names {
		if _, _, _, err := parser.ParseQualifiedName(name); err != nil {
			return fmt.Errorf("device %q: %w: %w", name, ErrBadName, err)
		}
		found := d.definition(name)
		if found == nil && !slices.Contains(missing, name) {
			missing = append(missing, name)
		}
		if found != nil && found.State == Conflicting {
			return fmt.Errorf("device %s: %s and %s both define it, so it cannot be used: remove one of the two files",
				name, found.File, found.Other)
		}
	}
	if len(missing) > 0 {
		return d.unknown(missing)
	}
	return nil
}

// unknown returns the error about devices that do not exist. It lists the devices of the same kinds or, if there are
// none, the kinds that exist, and the spec files that cannot be read.
func (d *SpecDirs) unknown(missing []string) error {
	what := "device " + missing[0] + " does not exist"
	if len(missing) > 1 {
		what = "devices " + strings.Join(missing, ", ") + " do not exist"
	}
	var likely, kinds []string
	for _, name := range d.Names() {
		kind, device, _ := strings.Cut(name, "=")
		if slices.ContainsFunc(missing, func(m string) bool { return strings.HasPrefix(m, kind+"=") }) {
			likely = append(likely, device)
		}
		if !slices.Contains(kinds, kind) {
			kinds = append(kinds, kind)
		}
	}
	switch {
	case len(likely) > 0:
		what += "; there are " + strings.Join(likely, ", ")
	case len(kinds) > 0:
		what += "; there are devices of the kind " + strings.Join(kinds, ", ")
	}
	for _, f := range d.Files {
		if f.Error != "" {
			what += "; a spec file cannot be read: " + f.Error
		}
	}
	if len(kinds) == 0 {
		return fmt.Errorf("%s: %w in %s", what, ErrNothingOffered, strings.Join(d.Dirs, ", "))
	}
	return errors.New(what)
}
