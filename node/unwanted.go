package node

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/fileid"
	"gpu-cdi-plugin/internal/lock"
)

// markName is an extended attribute of the specs of extras that were written here: a hash of the content. It goes with the
// file and its content: who writes the spec anew by hand, with `cdi generate --write` or otherwise, or edits it in its
// place, makes it his own.
const markName = "gpu-cdi-plugin.serve"

// markSpaces are where the attribute may be: tmpfs has those of users since Linux 6.6, and those of root before.
func markSpaces() []string { return []string{"user.", "trusted."} }

// mark notes that the spec at path was written here. Where that cannot be noted the file is taken for somebody else's.
func mark(path string, spec *specs.Spec) {
	for _, space := range markSpaces() {
		if unix.Lsetxattr(path, space+markName, hashOf(spec), 0) == nil {
			return
		}
	}
}

// marked reports whether the spec at path was written here, and is what was written.
func marked(path string) bool {
	spec, err := cdi.ReadFile(path)
	if err != nil {
		return false
	}
	want := hashOf(spec)
	there := make([]byte, len(want))
	return slices.ContainsFunc(markSpaces(), func(space string) bool {
		n, err := unix.Lgetxattr(path, space+markName, there)
		return err == nil && bytes.Equal(there[:n], want)
	})
}

func hashOf(spec *specs.Spec) []byte {
	text, err := json.Marshal(spec)
	if err != nil {
		panic(err) // strings and numbers can always be written
	}
	sum := sha256.Sum256(text)
	return sum[:]
}

// unwanted are the files of extras that are configured no longer and that this program wrote, here or elsewhere.
func (i *Inventory) unwanted() map[cdi.Extra]string {
	if i.opts.Path == "" {
		return nil
	}
	files := map[cdi.Extra]string{}
	for _, e := range cdi.Extras() {
		kind := e.Kind(i.opts.Spec.Kind)
		path := filepath.Join(filepath.Dir(i.opts.Path), cdi.FileName(kind))
		if i.keeps(path) || fileid.Of(path).IsZero() {
			continue
		}
		if spec, err := cdi.ReadFile(path); err == nil && spec.Kind == kind && e.Wrote(spec) {
			files[e] = path
		}
	}
	return files
}

// tellUnwanted logs which specs of extras there are that are configured no longer.
func (i *Inventory) tellUnwanted() {
	for e, path := range i.unwanted() {
		text := fmt.Sprintf("%s is not configured; its spec %s was written by hand and stays until `cdi remove`", e, path)
		if marked(path) {
			text = fmt.Sprintf("%s is not configured; its spec %s stays as long as a pod may have been given it", e, path)
		}
		i.log.Info(text)
	}
}

// settled is how long after the start the kubelet has surely written down what it gave to pods before it.
const settled = 10 * time.Second

// removeUnwanted removes the specs of extras that are configured no longer, if they were written here, if no pod was
// given the extra, whose containers could not start again, and if no other instance keeps them.
func (i *Inventory) removeUnwanted() {
	if i.opts.Given == nil || time.Since(i.began) < min(i.opts.Interval, settled) {
		return
	}
	for e, path := range i.unwanted() {
		if !marked(path) {
			continue
		}
		given, err := i.opts.Given(e.Kind(i.opts.Spec.Kind))
		if err == nil && !given {
			var removed bool
			if removed, err = removeUnlessKept(path); removed {
				i.log.Info(fmt.Sprintf("the CDI spec %s is removed, since %s is not configured any more and no pod has it", path, e))
			}
		}
		if err != nil && !errors.Is(err, lock.ErrHeld) {
			i.log.Debug(fmt.Sprintf("the CDI spec %s of %s, which is not configured any more, stays: %v", path, e, err))
		}
	}
}

// removeUnlessKept removes a spec that no instance keeps, unless somebody wrote one of his own there meanwhile.
func removeUnlessKept(path string) (removed bool, err error) {
	l, err := lock.Acquire(lockOf(path))
	if err != nil {
		return false, err
	}
	if marked(path) {
		if err = atomicfile.Remove(path); err != nil {
			err = fmt.Errorf("remove the spec of an extra: %w", err)
		}
		removed = err == nil
	}
	return removed, errors.Join(err, l.Release())
}

// lockOf is the file that says who keeps a spec.
func lockOf(path string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".lock")
}
