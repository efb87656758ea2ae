package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wording"
)

// SpecError means that a CDI spec cannot be written or removed.
type SpecError struct{ Err error }

func (e *SpecError) Error() string { return e.Err.Error() }

func (e *SpecError) Unwrap() error { return e.Err }

// KindError means that a spec of another kind is at the spec's path. That spec is not replaced.
type KindError struct {
	Path, Kind, Want string
}

func (e *KindError) Error() string {
	return fmt.Sprintf("write %s: it is a spec of kind %s, not %s", e.Path, e.Kind, e.Want)
}

// specFile is the CDI spec file of the GPUs or of an extra. If its path is empty, no spec is written.
type specFile struct {
	path, kind string
	extra      *Extra // nil for the GPUs
	lock       fileLock
}

// loadSpecs reads all spec files. If one of our files changes later, that leads to another reconciliation.
func (r *Reconciler) loadSpecs() *cdi.SpecDirs {
	for _, f := range r.files {
		r.see(f.path)
	}
	return cdi.Load(r.opts.Dirs...)
}

// see records the identity of a file or directory after this program wrote it. Otherwise the write would be taken for
// a change by others.
func (r *Reconciler) see(path string) { r.seen[path] = fileio.IDOf(path) }

// newSpecFile returns the file for a spec of a kind.
func newSpecFile(path, kind string, extra *Extra) *specFile {
	return &specFile{path: path, kind: kind, extra: extra, lock: fileLock{
		path:    lockPath(path),
		makeDir: makeDir,
		wrap:    func(err error) error { return &SpecError{err} },
	}}
}

// readableMode is the mode bits that let engines of all users read a spec.
const readableMode = 0o444

// IsServed reports whether an instance of this program keeps the spec file at path up to date.
func IsServed(path string) (bool, error) { return fileio.IsHeld(lockPath(path)) }

// lockPath returns the path of the lock for a spec file, which the instance that writes the file holds.
func lockPath(path string) string {
	if path == "" {
		return ""
	}
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".lock")
}

// writeSpecs writes the spec files of a plan.
func (r *Reconciler) writeSpecs(p *plan) {
	for i := range p.files {
		f := &p.files[i]
		if f.path == "" || f.err != nil {
			continue
		}
		written, err := r.writeSpec(f)
		if err != nil {
			p.fail(f, err)
		}
		p.written = p.written || written
	}
}

// writeSpec writes or removes the file, unless its content is the planned one.
func (r *Reconciler) writeSpec(f *plannedFile) (written bool, err error) {
	if err := f.lock.hold(); err != nil {
		return false, err
	}
	id := fileio.IDOf(f.path)
	if f.content == nil {
		if id.IsZero() {
			return false, nil
		}
		if err := fileio.Remove(f.path); err != nil {
			return false, &SpecError{fmt.Errorf("remove the spec without devices: %w", err)}
		}
		r.seen[f.path] = fileio.ID{}
		r.log.Info("the CDI spec "+f.path+" was removed, since it would have no device", "path", f.path)
		return true, nil
	}
	var reason string
	switch {
	case id.IsZero():
		reason = "it did not exist"
	case f.old == nil:
		reason = "it could not be read"
	case len(cdi.Diff(f.old, f.content)) > 0:
		reason = wording.ShortenList(cdi.Diff(f.old, f.content), 5, "; ")
	case id.Mode&readableMode != readableMode || othersCanChange(f.path):
		reason = "its owner or mode was wrong, or it was a link"
	default:
		return false, nil
	}
	if err := cdi.WriteFile(f.path, f.content); err != nil {
		return false, &SpecError{err}
	}
	f.created = id.IsZero()
	if r.see(f.path); r.seen[f.path].IsZero() {
		r.seen[f.path] = fileio.ID{Ino: ^uint64(0)} // a missing file counts as a change
	}
	r.log.Info(fmt.Sprintf("the CDI spec %s was written: %s", f.path, reason),
		"path", f.path, "devices", len(f.content.Devices))
	return true, nil
}

// removeCreated removes the specs that did not exist before the plan was written.
func (p *plan) removeCreated() error {
	var errs []error
	for i := range p.files {
		if !p.files[i].created {
			continue
		}
		if err := fileio.Remove(p.files[i].path); err != nil {
			errs = append(errs, fmt.Errorf("remove a spec that was written before an error: %w", err))
		}
	}
	return errors.Join(errs...)
}

// othersCanChange reports whether another user owns the file or may write to it. Engines run the hooks in a spec as
// root.
func othersCanChange(path string) bool {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	return err == nil && (int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0)
}

// makeDir creates the directory, but not its parents: /var/run is emptied at boot, but a missing parent is probably a
// mistake in the configuration.
func makeDir(dir string) error {
	if err := fileio.MakeDir(dir); err != nil { // engines of unprivileged users read it too
		return fmt.Errorf("make the spec directory: %w", err)
	}
	return nil
}
