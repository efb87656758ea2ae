package node

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/lock"
)

// SpecError is that a CDI spec cannot be written or removed.
type SpecError struct {
	Path string
	Err  error
}

// Error is the text of the cause, which names the file.
func (e *SpecError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *SpecError) Unwrap() error { return e.Err }

// KindError is that the path of a spec has one of another kind, which is not replaced.
type KindError struct {
	Path, Kind, Want string
}

// Error names the file and both kinds.
func (e *KindError) Error() string {
	return fmt.Sprintf("write %s: it is a spec of kind %s, not %s", e.Path, e.Kind, e.Want)
}

// specFile is a CDI spec on disk. An empty path is none.
type specFile struct {
	fileLock

	path, kind string
	dirs       []string
	log        *slog.Logger
	id         fileid.ID // of the file after the last apply
}

// appliedSpec is the result of writing a spec.
type appliedSpec struct {
	written   bool
	offered   map[string]bool // the qualified names that engines take from the file with the desired edits
	conflicts []cdi.Conflict  // the desired names that other files define too
	err       error           // why the file is not as desired
}

// readableMode is the mode bits with which engines of all users can read a spec.
const readableMode = 0o444

// lockPath is the lock of the instance that writes a spec.
func lockPath(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".lock")
}

// acquire makes sure that no other instance writes the file.
func (f *specFile) acquire() error {
	if f.path == "" {
		return nil
	}
	if err := makeDir(filepath.Dir(f.path)); err != nil {
		return &SpecError{f.path, err}
	}
	l, err := lock.Acquire(lockPath(f.path))
	switch {
	case errors.Is(err, lock.ErrHeld):
		return err
	case err != nil:
		return &SpecError{f.path, err}
	}
	f.lock = l
	return nil
}

// restoreLock makes the directory and the lock's file again if they were removed.
func (f *specFile) restoreLock() error {
	if f.lock == nil {
		return nil
	}
	if err := makeDir(filepath.Dir(f.path)); err != nil {
		return &SpecError{f.path, err}
	}
	return f.lock.Renew()
}

// apply makes the file the desired spec, beside the other spec files; nil removes it. A name that
// another file of the same priority defines is left out: with it in both, engines would offer neither, and the users of
// the other file would lose their device too.
func (f *specFile) apply(want *specs.Spec, specDirs *cdi.SpecDirs) appliedSpec {
	f.id = fileid.ID{}
	if f.path == "" {
		return appliedSpec{offered: qualifiedNames(want)}
	}
	a := appliedSpec{conflicts: specDirs.Conflicts(f.path, want)}
	if a.err = specDirs.Unread(f.path); a.err == nil {
		a.written, a.err = f.put(cdi.Without(want, a.conflicts, cdi.Conflict.LeftToOther))
	}
	if a.err != nil {
		f.id, a.offered = fileid.Of(f.path), f.unchangedNames(want)
	} else {
		a.offered = qualifiedNames(cdi.Without(want, a.conflicts, cdi.Conflict.Unavailable))
	}
	return a
}

// put writes the spec, or removes the file if there is none, unless the file is right already.
func (f *specFile) put(spec *specs.Spec) (written bool, err error) {
	if err := f.restoreLock(); err != nil {
		return false, err
	}
	id := fileid.Of(f.path)
	old, err := f.read()
	if err != nil {
		return false, err
	}
	switch {
	case spec == nil && id.IsZero():
		return false, nil
	case spec == nil:
		return f.remove()
	}
	if old == nil || len(cdi.Diff(old, spec)) > 0 || id.Mode&readableMode != readableMode || othersCanChange(f.path) {
		if id, err = f.write(id.IsZero(), old, spec); err != nil {
			return false, err
		}
		written = true
	}
	f.id = id
	return written, nil
}

// othersCanChange reports whether another user owns the file or may write to it. Engines run a spec's hooks as root.
func othersCanChange(path string) bool {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	return err == nil && (int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0)
}

// read returns the spec on disk, or nil if there is none that can be read. A spec of another kind is a KindError.
func (f *specFile) read() (*specs.Spec, error) {
	spec, err := cdi.ReadFile(f.path)
	if err != nil {
		return nil, nil //nolint:nilerr,nilnil // an unreadable spec under our name is of no use to anyone
	}
	if spec.Kind != f.kind {
		return nil, &KindError{f.path, spec.Kind, f.kind}
	}
	return spec, nil
}

func (f *specFile) write(missing bool, old, want *specs.Spec) (fileid.ID, error) {
	if err := cdi.WriteFile(f.path, want); err != nil {
		return fileid.ID{}, &SpecError{f.path, err}
	}
	reason := "it did not exist"
	switch {
	case old != nil:
		reason = cmp.Or(summary(cdi.Diff(old, want)), "its owner or mode was wrong, or it was a link")
	case !missing:
		reason = "it could not be read"
	}
	f.log.Info(fmt.Sprintf("the CDI spec %s was written with %d devices: %s", f.path, len(want.Devices), reason),
		"path", f.path, "devices", len(want.Devices))
	return writtenID(f.path), nil
}

// writtenID identifies a file that was just written. If it is gone already, the ID is that of no file, so that the next
// comparison notices.
func writtenID(path string) fileid.ID {
	if id := fileid.Of(path); !id.IsZero() {
		return id
	}
	return fileid.ID{Ino: ^uint64(0)}
}

func (f *specFile) remove() (bool, error) {
	if err := atomicfile.Remove(f.path); err != nil {
		return false, &SpecError{f.path, fmt.Errorf("remove the spec without devices: %w", err)}
	}
	f.log.Info("the CDI spec "+f.path+" was removed, since it would have no device", "path", f.path)
	return true, nil
}

// makeDir makes the directory if it alone is missing: /var/run is emptied at boot. A missing parent is more likely a
// mistake in the configuration.
func makeDir(dir string) error {
	if err := atomicfile.MakeDir(dir); err != nil { // engines of users without privileges read it too
		return fmt.Errorf("make the spec directory: %w", err)
	}
	return nil
}

// changed reports whether the file is not the one of the last apply.
func (f *specFile) changed() bool { return f.path != "" && fileid.Of(f.path) != f.id }

// unchangedNames are the qualified names of the devices that the file has with the desired edits and that engines take
// from it.
func (f *specFile) unchangedNames(want *specs.Spec) map[string]bool {
	names := map[string]bool{}
	disk, err := cdi.ReadFile(f.path)
	if err != nil || want == nil || disk.Kind != want.Kind ||
		!reflect.DeepEqual(want.ContainerEdits, disk.ContainerEdits) {
		return names
	}
	taken := cdi.Load(f.dirs...).OfferedFrom(f.path)
	for _, d := range disk.Devices {
		names[disk.Kind+"="+d.Name] = taken[d.Name] && slices.ContainsFunc(want.Devices, func(w specs.Device) bool {
			return w.Name == d.Name && reflect.DeepEqual(w.ContainerEdits, d.ContainerEdits)
		})
	}
	return names
}

func qualifiedNames(s *specs.Spec) map[string]bool {
	names := map[string]bool{}
	if s != nil {
		for i := range s.Devices {
			names[s.Kind+"="+s.Devices[i].Name] = true
		}
	}
	return names
}

// summary is a list of differences in a line of a log.
func summary(list []cdi.Difference) string {
	const most = 5
	var words []string
	for _, d := range list[:min(most, len(list))] {
		words = append(words, d.String())
	}
	if len(list) > most {
		words = append(words, fmt.Sprintf("and %d more", len(list)-most))
	}
	return strings.Join(words, "; ")
}

// removeFiles removes those of the files that exist.
func removeFiles(paths []string) error {
	var errs []error
	for _, path := range paths {
		if err := atomicfile.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove a spec that was written before an error: %w", err))
		}
	}
	return errors.Join(errs...)
}
