package node

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/lock"
)

// specFile is the spec on disk. Reconciles and requests both look at it.
type specFile struct {
	path, kind string
	dirs       []string
	log        *slog.Logger
	marks      bool // what is written gets a mark

	mu      sync.Mutex
	lock    *lock.Lock // nil before acquire and after release
	want    *specs.Spec
	seen    fileid.ID       // of the file when it was what it should be
	kept    *fileid.Kept    // that file, or an earlier one
	looked  time.Time       // when a request last found it by its path
	names   map[string]bool // the devices of the wanted spec that engines take from the file, as they are wanted
	clashes []cdi.Clash     // the names of the wanted spec that other files define too
}

const (
	hintWrite = "name a directory that can be made or written to, with --cdi-dir"
	hintKind  = "remove it by hand if it is not needed, or name another directory with --cdi-dir"
)

// readable is the mode of a spec file that engines of all users can read.
const readable = 0o444

// acquire makes sure that nobody else keeps the file, before anything is written.
func (f *specFile) acquire() error {
	if f.path == "" {
		return nil
	}
	if err := makeDir(filepath.Dir(f.path)); err != nil {
		return exit.With(exit.Failure, hintWrite, err)
	}
	l, err := lock.Acquire(lockOf(f.path))
	switch {
	case errors.Is(err, lock.ErrHeld):
		return err
	case err != nil:
		return exit.With(exit.Failure, hintWrite, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lock = l
	return nil
}

// release leaves the file to others.
func (f *specFile) release() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.lock == nil {
		return nil
	}
	err := f.lock.Release()
	f.lock, f.kept = nil, nil
	return err
}

// renew puts the lock's file, and the directory, back if somebody removed them.
func (f *specFile) renew() error {
	if f.lock == nil {
		return nil
	}
	if err := makeDir(filepath.Dir(f.path)); err != nil {
		return exit.With(exit.Failure, hintWrite, err)
	}
	return f.lock.Renew()
}

// sync makes the file what is wanted, beside the other spec files that are there, and reports whether it had to. A name
// that another file of its priority defines is left out: with it in both, engines would offer neither, and the users of
// the other file would lose their device too. The error says why the file is not what it should be.
func (f *specFile) sync(want *specs.Spec, there *cdi.Catalogue) (written bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.syncLocked(want, there)
}

func (f *specFile) syncLocked(want *specs.Spec, there *cdi.Catalogue) (written bool, err error) {
	f.want, f.seen, f.names, f.clashes = want, fileid.ID{}, deviceNames(want), nil
	if f.path == "" {
		return false, nil
	}
	f.clashes = there.Clashes(f.path, want)
	if err = there.Unread(f.path); err == nil {
		written, err = f.put(cdi.Without(want, f.clashes, cdi.Clash.Yields))
	}
	if err != nil {
		f.names = f.agreeing()
		return written, err
	}
	f.names = deviceNames(cdi.Without(want, f.clashes, cdi.Clash.Lost))
	return written, nil
}

// put makes the file a spec, or removes it where there is none.
func (f *specFile) put(spec *specs.Spec) (written bool, err error) {
	if err := f.renew(); err != nil {
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
	if old == nil || len(cdi.Diff(old, spec)) > 0 || id.Mode&readable != readable || othersCanChange(f.path) {
		if id, err = f.write(old, spec); err != nil {
			return false, err
		}
		written = true
	}
	f.seen = id
	return written, nil
}

// othersCanChange reports whether a file that engines take hooks from, which they run as root, belongs to another user
// or can be written to by one.
func othersCanChange(path string) bool {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	return err == nil && (int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0)
}

// read is the spec on disk, or nil if there is none that can be read. The error is about one of another kind: that is
// not ours to replace.
func (f *specFile) read() (*specs.Spec, error) {
	spec, err := cdi.ReadFile(f.path)
	if err != nil {
		return nil, nil //nolint:nilerr,nilnil // a spec that cannot be read has our name and is of no use to anybody
	}
	if spec.Kind != f.kind {
		return nil, exit.With(exit.Failure, hintKind,
			fmt.Errorf("write %s: it is a spec of kind %s, not %s", f.path, spec.Kind, f.kind))
	}
	return spec, nil
}

func (f *specFile) write(old, want *specs.Spec) (fileid.ID, error) {
	if err := cdi.WriteFile(f.path, want); err != nil {
		return fileid.ID{}, exit.With(exit.Failure, hintWrite, err)
	}
	if f.marks {
		mark(f.path, want)
	}
	what := "there was none that can be read"
	if old != nil {
		what = cmp.Or(summary(cdi.Diff(old, want)), "not every user could read it")
	}
	f.log.Info(fmt.Sprintf("the CDI spec %s was written with %d devices: %s", f.path, len(want.Devices), what),
		"path", f.path, "devices", len(want.Devices))
	return written(f.path), nil
}

// written identifies a file that was just written. If it is gone already, that is no file's identity, so that the next
// look notices.
func written(path string) fileid.ID {
	if id := fileid.Of(path); !id.IsZero() {
		return id
	}
	return fileid.ID{Ino: ^uint64(0)}
}

func (f *specFile) remove() (bool, error) {
	if err := atomicfile.Remove(f.path); err != nil {
		return false, exit.With(exit.Failure, hintWrite, fmt.Errorf("remove the spec without devices: %w", err))
	}
	f.log.Info("the CDI spec "+f.path+" was removed, since it would have no device", "path", f.path)
	return true, nil
}

// makeDir makes the directory if only that is missing: /var/run is emptied at boot. A missing parent is more likely a
// mistake.
func makeDir(dir string) error {
	if err := atomicfile.MakeDir(dir); err != nil { // engines of users without privileges read it too
		return fmt.Errorf("make the spec directory: %w", err)
	}
	return nil
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

func deviceNames(s *specs.Spec) map[string]bool {
	names := map[string]bool{}
	if s != nil {
		for i := range s.Devices {
			names[s.Devices[i].Name] = true
		}
	}
	return names
}

// untouched reports whether the file is what it was after the last sync.
func (f *specFile) untouched() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.path == "" || fileid.Of(f.path) == f.seen
}

// lookTime is for how long the file that was found by its path is asked itself: only a look shows that what leads to it was
// moved, or that something was mounted there.
const lookTime = time.Second

// stands reports whether the file is what is wanted. A request waits for this, so the path is not looked up for each of
// many.
func (f *specFile) stands() bool {
	if f.seen.IsZero() {
		return false
	}
	id, now := f.kept.ID(), time.Now()
	if id == f.seen && id.Settled(now) && now.Sub(f.looked) < lookTime {
		return true
	}
	if fileid.Of(f.path) != f.seen {
		return false
	}
	f.looked = now
	if id != f.seen {
		f.kept, _ = fileid.Keep(f.path) // without it the path is looked up each time
	}
	return true
}

// has is the error that names the devices which engines would not find.
func (f *specFile) has(names []string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.path == "" {
		return nil
	}
	var err error
	if !f.stands() {
		_, err = f.syncLocked(f.want, cdi.Load(f.dirs...))
	}
	var missing []string
	for _, name := range names {
		if !f.names[strings.TrimPrefix(name, f.kind+"=")] {
			missing = append(missing, name)
		}
	}
	switch {
	case len(missing) == 0:
		return nil
	case err != nil:
		return fmt.Errorf("the CDI spec is not what it should be: %w", err)
	}
	return fmt.Errorf("%s does not have %s%s", f.path, strings.Join(missing, ", "), because(f.clashes, missing))
}

// offers are the names of the devices that engines take from the file as they are wanted, and the names of the wanted
// spec that other files define too. Both are of the last sync, and not changed later.
func (f *specFile) offers() (names map[string]bool, clashes []cdi.Clash) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.names, f.clashes
}

// agreeing are the names of the devices that the file happens to have right and that engines take from it.
func (f *specFile) agreeing() map[string]bool {
	names := map[string]bool{}
	disk, err := cdi.ReadFile(f.path)
	if err != nil || f.want == nil || disk.Kind != f.want.Kind || !reflect.DeepEqual(f.want.ContainerEdits, disk.ContainerEdits) {
		return names
	}
	taken := cdi.Load(f.dirs...).Taken(f.path)
	for _, d := range disk.Devices {
		names[d.Name] = taken[d.Name] && slices.ContainsFunc(f.want.Devices, func(w specs.Device) bool {
			return w.Name == d.Name && reflect.DeepEqual(w.ContainerEdits, d.ContainerEdits)
		})
	}
	return names
}
