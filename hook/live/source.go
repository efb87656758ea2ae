package live

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// source is a mount with an open, detached copy of the host's tree. The copy has no effect before it is mounted, and
// is gone when it is closed.
type source struct {
	mount
	tree  *os.File
	isDir bool
}

// openSources opens the sources of all mounts, in the host's mount namespace.
func openSources(mounts []mount) ([]source, error) {
	var sources []source
	for _, m := range mounts {
		s, err := openSource(m)
		if err != nil {
			closeSources(sources)
			return nil, fmt.Errorf("mount of %s at %s: %w", m.source, m.target, err)
		}
		sources = append(sources, s)
	}
	return sources, nil
}

func closeSources(sources []source) {
	for _, s := range sources {
		_ = s.tree.Close()
	}
}

func openSource(m mount) (source, error) {
	flags := uint(unix.OPEN_TREE_CLONE | unix.OPEN_TREE_CLOEXEC)
	if m.recursive {
		flags |= unix.AT_RECURSIVE
	}
	fd, err := unix.OpenTree(unix.AT_FDCWD, m.source, flags)
	if err != nil {
		return source{}, fmt.Errorf("open_tree: %w", err)
	}
	s := source{mount: m, tree: os.NewFile(uintptr(fd), m.source)}
	info, err := s.tree.Stat()
	if err != nil {
		return source{}, errors.Join(err, s.tree.Close())
	}
	s.isDir = info.IsDir()
	if err := s.setAttributes(); err != nil {
		return source{}, errors.Join(err, s.tree.Close())
	}
	return s, nil
}

// setAttributes gives the tree its options. The copy of a shared mount is shared too: what the container mounts below
// it would appear on the host. So the propagation of the copy is at least "slave" everywhere, like in a runtime's
// mount namespace.
func (s source) setAttributes() error {
	const top = uint(unix.AT_EMPTY_PATH)
	propagation := top
	if s.deep {
		propagation |= unix.AT_RECURSIVE
	}
	if err := s.set(top|unix.AT_RECURSIVE, unix.MountAttr{Propagation: unix.MS_SLAVE}); err != nil {
		return err
	}
	if err := s.set(propagation, unix.MountAttr{Propagation: s.propagation}); err != nil {
		return err
	}
	return s.set(top, unix.MountAttr{Attr_set: s.attributes})
}

func (s source) set(flags uint, attr unix.MountAttr) error {
	if err := unix.MountSetattr(int(s.tree.Fd()), "", flags, &attr); err != nil {
		return fmt.Errorf("mount_setattr: %w", err)
	}
	return nil
}
