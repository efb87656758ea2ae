package node

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/fileid"
)

// Extra is something that containers with a device get besides, where the node has it.
type Extra struct {
	cdi.Extra
	// Channels are the numbers of the IMEX channels that are wanted.
	Channels []int
	// Required tells that no device can be given to a container while a channel is missing.
	Required bool
}

const hintRequired = "make the channels (the driver makes channel 0 with NVreg_CreateImexChannel0=1, mknod makes any; " +
	"its major is that of nvidia-caps-imex-channels in /proc/devices), or set imex.required to false"

// extraFile is an extra and its spec on disk.
type extraFile struct {
	Extra
	file *specFile
	told string // what was last logged of the extra
}

func newExtraFiles(o *Options) []*extraFile {
	var list []*extraFile
	for _, e := range o.Extras {
		kind, path := e.Kind(o.Spec.Kind), ""
		if o.Path != "" {
			path = filepath.Join(filepath.Dir(o.Path), cdi.FileName(kind))
		}
		list = append(list, &extraFile{Extra: e, file: &specFile{path: path, dirs: o.Dirs, kind: kind, log: o.Log, marks: true}})
	}
	return list
}

// split takes the names of the extra's devices out of the list.
func (e *extraFile) split(names []string) (own, others []string) {
	for _, name := range names {
		if strings.HasPrefix(name, e.file.kind+"=") {
			own = append(own, name)
		} else {
			others = append(others, name)
		}
	}
	return own, others
}

// files are the spec files that the inventory keeps.
func (i *Inventory) files() []*specFile {
	list := []*specFile{i.file}
	for _, e := range i.extras {
		list = append(list, e.file)
	}
	return list
}

// missing are the paths of those that are not there.
func (i *Inventory) missing() []string {
	var list []string
	for _, f := range i.files() {
		if f.path != "" && fileid.Of(f.path).IsZero() {
			list = append(list, f.path)
		}
	}
	return list
}

// removeAll removes those of the files that are there.
func removeAll(paths []string) error {
	var errs []error
	for _, path := range paths {
		if err := atomicfile.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("take a spec back: %w", err))
		}
	}
	return errors.Join(errs...)
}

// acquire makes sure that nobody else keeps one of the files. After an error none is held.
func (i *Inventory) acquire() error {
	for _, f := range i.files() {
		if err := f.acquire(); err != nil {
			return errors.Join(err, i.release())
		}
	}
	return nil
}

func (i *Inventory) release() error {
	var errs []error
	for _, f := range i.files() {
		errs = append(errs, f.release())
	}
	return errors.Join(errs...)
}

func (i *Inventory) untouched() bool {
	return !slices.ContainsFunc(i.files(), func(f *specFile) bool { return !f.untouched() })
}

// keeps reports whether the file is one of the inventory's.
func (i *Inventory) keeps(path string) bool {
	return slices.ContainsFunc(i.files(), func(f *specFile) bool { return f.path == path })
}

// sync makes the files what the state wants, beside the other spec files that are there, and notes in the state what
// containers get besides GPUs and which names other files define too.
func (i *Inventory) sync(s *State, there *cdi.Catalogue) (written bool, err error) {
	s.Extras, s.extrasErr, s.clashes = nil, nil, nil
	for _, e := range i.extras {
		want := specOf(s.extras, e.file.kind)
		wrote, failed := e.file.sync(want, there)
		written = written || wrote
		given, clashes := e.given(want)
		if given != nil {
			s.Extras = append(s.Extras, given)
		}
		if e.Required && !sameDevices(given, want) {
			failed = cmp.Or(failed, missingNames(e, clashes))
			s.extrasErr = cmp.Or(s.extrasErr, failed)
		}
		err = cmp.Or(err, failed)
		s.clashes = append(s.clashes, clashes...)
	}
	wrote, failed := i.file.sync(s.Spec, there)
	_, clashes := i.file.offers()
	s.clashes = append(s.clashes, clashes...)
	return written || wrote, cmp.Or(failed, err)
}

// given is the extra's spec with the devices that engines take from it, or nil.
func (e *extraFile) given(want *specs.Spec) (*specs.Spec, []cdi.Clash) {
	names, clashes := e.file.offers()
	if want == nil {
		return nil, clashes
	}
	less := *want
	less.Devices = slices.DeleteFunc(slices.Clone(want.Devices), func(d specs.Device) bool { return !names[d.Name] })
	if len(less.Devices) == 0 {
		return nil, clashes
	}
	return &less, clashes
}

func sameDevices(a, b *specs.Spec) bool { return maps.Equal(deviceNames(a), deviceNames(b)) }

// missingNames is the error of an extra that is required and whose names other files take.
func missingNames(e *extraFile, clashes []cdi.Clash) error {
	at := slices.IndexFunc(clashes, cdi.Clash.Lost)
	if at < 0 {
		return fmt.Errorf("%s is required, and is not in its CDI spec %s", e.Extra.Extra, e.file.path)
	}
	return exit.With(exit.Failure, clashes[at].Hint(), fmt.Errorf("%s is required: %s", e.Extra.Extra, clashes[at]))
}

// findExtras are the specs of those extras that the node has. The error is about one that it must have.
func (i *Inventory) findExtras() ([]*specs.Spec, error) {
	var list []*specs.Spec
	for _, e := range i.extras {
		found, findings := cdi.DiscoverExtra(i.opts.Host, e.Extra.Extra, e.Channels)
		if missing := missingNodes(findings); e.Required && missing != "" {
			return nil, exit.With(exit.Failure, hintRequired, fmt.Errorf("%s is required: %s", e.Extra.Extra, missing))
		}
		i.tell(e, found, findings)
		spec, err := cdi.GenerateExtra(found, e.file.kind)
		switch {
		case errors.Is(err, cdi.ErrNoDevices):
		case err != nil:
			return nil, err
		default:
			list = append(list, spec)
		}
	}
	return list, nil
}

// tell logs what there is of an extra, when that changes.
func (i *Inventory) tell(e *extraFile, found *cdi.ExtraFiles, findings []cdi.Finding) {
	text := fmt.Sprintf("containers get %s (device nodes: %d)", e.Extra.Extra, len(found.Nodes))
	if len(found.Nodes) == 0 {
		text = fmt.Sprintf("containers do not get %s, since there is no device node", e.Extra.Extra)
	}
	if missing := missingNodes(findings); missing != "" {
		text += "; " + missing
	}
	if text != e.told {
		e.told = text
		i.log.Info(text)
	}
}

// missingNodes is what is wrong with the nodes, or empty.
func missingNodes(findings []cdi.Finding) string {
	var words []string
	for _, f := range findings {
		if f.Kind == cdi.KindNode && !f.Used {
			words = append(words, f.Name+": "+f.Note)
		}
	}
	return strings.Join(words, "; ")
}

// printExtras adds the files of the extras.
func (i *Inventory) printExtras(w io.Writer) {
	for _, e := range i.extras {
		found, _ := cdi.DiscoverExtra(i.opts.Host, e.Extra.Extra, e.Channels)
		fmt.Fprintln(w, e.Extra.Extra, found.Nodes, found.Files)
	}
}

// specOf is the spec of a kind, or nil.
func specOf(list []*specs.Spec, kind string) *specs.Spec {
	at := slices.IndexFunc(list, func(s *specs.Spec) bool { return s.Kind == kind })
	if at < 0 {
		return nil
	}
	return list[at]
}

// stillThere are those extras of before of which there is one now too, without the names that other spec files take.
func (i *Inventory) stillThere(there *cdi.Catalogue, before, now []*specs.Spec) []*specs.Spec {
	var list []*specs.Spec
	for _, e := range i.extras {
		s := specOf(before, e.file.kind)
		if s == nil || specOf(now, s.Kind) == nil {
			continue
		}
		if s = cdi.Without(s, there.Clashes(e.file.path, s), cdi.Clash.Lost); s != nil {
			list = append(list, s)
		}
	}
	return list
}
