package live

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook"
	"gpu-cdi-plugin/hook/rootfs"
	"gpu-cdi-plugin/internal/proc"
)

// mapOwners changes the owners of the plan's nodes from IDs in the container to IDs on the host.
func (c *container) mapOwners() error {
	for _, n := range c.plan.nodes {
		uid, err := c.uid.Host(n.uid)
		if err != nil {
			return fmt.Errorf("device node %s: user %w", n.path, err)
		}
		gid, err := c.gid.Host(n.gid)
		if err != nil {
			return fmt.Errorf("device node %s: group %w", n.path, err)
		}
		c.nodes = append(c.nodes, rootfs.Node{Mode: n.mode, Device: n.device, UID: uid, GID: gid})
	}
	return nil
}

// check opens the container's root, and returns an error if a part of the plan cannot be carried out there. It changes
// nothing. Mounts are those of the host.
func (c *container) check(mounts []proc.Mount) (err error) {
	if err := c.checkNotPivoted(); err != nil {
		return err
	}
	if c.root, err = rootfs.Open(c.path, c.host.Dev()); err != nil {
		return fmt.Errorf("open the container's root in the mount namespace of process %d: %w", c.PID, err)
	}
	if err := c.root.CheckContainer(); err != nil {
		return fmt.Errorf("%s is not a container's root, nothing was changed: %w", c.path, err)
	}
	// The owner of the bundle can replace config.json, so that the path names any mount of the host.
	if err := c.root.CheckMountedSince(mounts); err != nil {
		return fmt.Errorf("%s is not the root of process %d, nothing was changed: %w", c.path, c.PID, err)
	}
	c.root.TreatTmpfsAsOwn(func(dev uint64) bool {
		device := fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev))
		return slices.ContainsFunc(mounts, func(m proc.Mount) bool { return m.Device == device })
	})
	for i, n := range c.plan.nodes {
		if c.root.HasNode(n.path, c.nodes[i]) {
			continue
		}
		check := c.root.CheckNode
		if c.hasUsers {
			check = func(name string) error { return c.root.CheckMountPoint(name, false) }
		}
		if err := check(n.path); err != nil {
			return fmt.Errorf("device node %s cannot be made: %w", n.path, err)
		}
	}
	for i, s := range c.sources {
		if below, err := belowSource(c.sources[:i], s); below || err != nil {
			if err != nil {
				return fmt.Errorf("%s cannot be mounted at %s: %w", s.source, s.target, err)
			}
			continue
		}
		if err := c.root.CheckMountPoint(s.target, s.isDir); err != nil {
			return fmt.Errorf("%s cannot be mounted at %s: %w", s.source, s.target, err)
		}
	}
	return nil
}

// belowSource reports whether a mount's target is inside the target of an earlier mount. Then its mount point must
// exist in the host's directory that is mounted there, since nothing is created in the host's directories.
func belowSource(earlier []source, s source) (bool, error) {
	for _, over := range slices.Backward(earlier) {
		name, isBelow := strings.CutPrefix(s.target, over.target+"/")
		if !isBelow {
			continue
		}
		how := unix.OpenHow{
			Flags:   unix.O_PATH | unix.O_CLOEXEC,
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		}
		fd, err := unix.Openat2(int(over.tree.Fd()), name, &how)
		if err != nil {
			return true, fmt.Errorf("%s in %s, which is mounted at %s: %w", name, over.source, over.target, err)
		}
		return true, unix.Close(fd)
	}
	return false, nil
}

// checkNotPivoted returns an error unless the root of the process's mount namespace is still the host's. The runtime
// changes that when it pivots.
func (c *container) checkNotPivoted() error {
	inside, err := os.Stat("/")
	if err != nil {
		return err
	}
	if !os.SameFile(inside, c.hostRoot) {
		return fmt.Errorf("process %d has another root than the host: "+
			"the runtime runs this hook after the container has pivoted to its own", c.PID)
	}
	return nil
}

// apply makes the nodes and mounts, and does the createContainer work. It also returns an error if the hook was
// interrupted or the process has ended meanwhile.
func (c *container) apply(ctx context.Context, warnings *[]error) error {
	for i, n := range c.plan.nodes {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := c.makeNode(n.path, c.nodes[i]); err != nil {
			return err
		}
	}
	for _, s := range c.sources {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		if err := c.mount(s); err != nil {
			return fmt.Errorf("%s: %w", s.source, err)
		}
	}
	for _, work := range c.plan.work {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		err := c.asContainer(func() error {
			more, err := hook.Prepare(work, c.root, c.host)
			*warnings = append(*warnings, more...)
			return err
		})
		if err != nil {
			return err
		}
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if err := c.checkAlive(); err != nil {
		return err
	}
	// This hook may have got a signal to end while a call hung, although ctx is not done yet.
	if c.interrupted != nil {
		return c.interrupted()
	}
	return nil
}

// makeNode makes a node. In a user namespace it bind-mounts the host's node instead, since the kernel opens no device
// on the container's own file systems there.
func (c *container) makeNode(name string, n rootfs.Node) error {
	if c.root.HasNode(name, n) {
		return nil
	}
	if !c.hasUsers {
		return c.root.MakeNode(name, n)
	}
	if err := c.asContainer(func() error { return c.root.MakeMountPoint(name, false) }); err != nil {
		return err
	}
	return c.root.MountNode(name, n)
}

func (c *container) mount(s source) error {
	if err := c.asContainer(func() error { return c.root.MakeMountPoint(s.target, s.isDir) }); err != nil {
		return err
	}
	return c.root.Mount(s.tree, s.isDir, s.target)
}

// asContainer runs act as root of the container's user namespace, with setfsuid and setfsgid: users that the namespace
// does not map cannot create files on its tmpfs. If there is no user namespace, it only runs act.
func (c *container) asContainer(act func() error) error {
	if !c.hasUsers {
		return act()
	}
	uid, err := c.uid.Host(0)
	if err != nil {
		return fmt.Errorf("user %w", err)
	}
	gid, err := c.gid.Host(0)
	if err != nil {
		return fmt.Errorf("group %w", err)
	}
	if err := errors.Join(unix.Setfsgid(gid), unix.Setfsuid(uid)); err != nil {
		return fmt.Errorf("act as user %d: %w", uid, err)
	}
	err = act()
	return errors.Join(err, unix.Setfsuid(os.Geteuid()), unix.Setfsgid(os.Getegid()))
}
