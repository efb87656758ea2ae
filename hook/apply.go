package hook

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"strings"

	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/rootfs"
)

// apply makes the plan's changes. What fails is in notes, and the rest is still done; the error is for libraries that
// no program in the container would find.
func apply(p *plan, root *rootfs.Root) (notes []error, err error) {
	note := func(err error) bool {
		if err != nil {
			notes = append(notes, err)
		}
		return err == nil
	}
	note(makeLinks(p.links, root))
	var lost []error
	for _, s := range p.searches {
		written, err := writeOrCover(root, s.file)
		if !note(err) {
			lost = append(lost, s.checkReachable(root))
		}
		if written && s.config.path != "" {
			note(root.WriteFile(s.config.path, s.config.data, s.config.mode))
		}
	}
	for _, f := range p.files {
		note(root.WriteFile(f.path, f.data, f.mode))
	}
	for _, f := range p.masks {
		note(root.MountFile(f.path, f.data, f.mode))
	}
	return notes, errors.Join(lost...)
}

// makeLinks makes all links that it can. In a read-only root that is none, so its error tells of the first.
func makeLinks(links []hookargs.Link, root *rootfs.Root) error {
	var first error
	failed := 0
	for _, l := range links {
		if err := root.Symlink(l.Target, l.Path); err != nil {
			first = cmp.Or(first, err)
			failed++
		}
	}
	if failed > 1 {
		return fmt.Errorf("%w (and %d more links)", first, failed-1)
	}
	return first
}

// writeOrCover writes a file or, in a root that is read-only or at a place that cannot be changed, mounts one over it.
func writeOrCover(root *rootfs.Root, f file) (written bool, err error) {
	if err = root.WriteFile(f.path, f.data, f.mode); err == nil {
		return true, nil
	}
	if coverErr := root.MountFile(f.path, f.data, f.mode); coverErr != nil {
		return false, fmt.Errorf("%w; %w", err, coverErr)
	}
	return false, nil
}

// checkReachable returns an error if a library can be found only by the file that could not be written. Libraries in a
// directory below another's, such as vdpau/, are opened by their path and need not be found.
func (s search) checkReachable(root *rootfs.Root) error {
	var lost []string
	for _, lib := range s.libraries {
		dir := path.Dir(lib.Path)
		if isBelowAnother(dir, s.libraries) {
			continue
		}
		if !s.isDefault(dir, root.IsFile) || !root.IsFile(path.Join(dir, lib.SONAME)) {
			lost = append(lost, lib.SONAME)
		}
	}
	if len(lost) > 0 {
		return fmt.Errorf("without %s nothing in the container finds %s", s.path, abridge(lost))
	}
	return nil
}

func isBelowAnother(dir string, libs []hookargs.Library) bool {
	for _, lib := range libs {
		if strings.HasPrefix(dir, path.Dir(lib.Path)+"/") {
			return true
		}
	}
	return false
}

func abridge(names []string) string {
	const most = 3
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}
