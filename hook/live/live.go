// Package live gives devices to a container that a runtime has created but not started: the hook's position in the
// createRuntime stage, and the deprecated prestart stage.
//
// [Give] gets the bundle's config.json, and the same file with the devices that hook/inject added. It gives the
// container the difference, so the result is the same as in the positions that edit config.json. The steps are:
//
//  1. makePlan turns the difference into device rules, device nodes, mounts and our createContainer work. It is a pure
//     function. A difference that a created container cannot get is an error.
//  2. openProcess finds the container's process, and proves that the calling runtime made it (process.go).
//  3. openSources makes detached copies of the trees to mount, in the host's mount namespace, and sets the options of
//     the mounts.
//  4. In the container's mount namespace, check requires that the root is a mount that the host does not have, and
//     checks every path of the plan. Nothing has changed until here. Later steps can still fail, for example if a disk
//     is full.
//  5. The device cgroup gets its rules, before the other changes: the rules leave nothing in the container's root.
//  6. In the container's mount namespace, nodes and mounts are made, and then the createContainer work is done.
//
// An error after step 5 reverts the changes in reverse order. Only the files of the createContainer work stay in the
// root: the next start writes them again.
//
// One thread does the work, the main thread: it enters the container's mount namespace with setns and returns. It must
// be the main thread because hook and hook/rootfs read /proc/self, which shows the namespaces of the main thread.
// Another process would need all open files and a protocol. Only the mount namespace is entered: the process keeps the
// host's credentials, so nothing in the container can trace it. It executes only its own program, which is static.
package live

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook"
	"gpu-cdi-plugin/hook/live/devcgroup"
	"gpu-cdi-plugin/hook/rootfs"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
)

// Request has a container and the devices to give.
type Request struct {
	State *hook.State
	// Runtime must have created the container's process.
	Runtime *proc.Process
	// Before is the bundle's config.json, and After is the same with the devices.
	Before, After []byte
	// Interrupted returns an error if the process got a signal to end, although ctx may not be done yet. It is called
	// once, when everything is given and can still be reverted. Nil means never interrupted.
	Interrupted func() error
}

// Give gives a container what After has in addition to Before. The calling goroutine must be locked to the main
// thread, and the process must be in the host's mount namespace. No step begins after ctx is done.
// Warnings are problems with which the container can start. On an error nothing was changed, or the changes were
// reverted; if reverting failed, the error says that too.
func Give(ctx context.Context, r Request, h host.Host) (warnings []error, err error) {
	warnings, err = give(ctx, r, h)
	if errors.Is(err, unix.ENOSYS) {
		err = fmt.Errorf("%w: Linux 5.12 or newer is needed", err)
	}
	return warnings, err
}

func give(ctx context.Context, r Request, h host.Host) (warnings []error, err error) {
	p, err := makePlan(r.Before, r.After)
	if err != nil {
		return nil, err
	}
	path, err := rootPath(p.root, r.State.Bundle)
	if err != nil {
		return nil, err
	}
	process, err := openProcess(r.State.PID, r.Runtime, h)
	if err != nil {
		return nil, err
	}
	defer process.close()
	if p.users != process.hasUsers { // the policy's decision may depend on it
		return nil, fmt.Errorf("config.json is not that of process %d: one of them has a user namespace", process.PID)
	}
	if p.users && !p.mapsRoot && (process.uid.HasRoot() || process.gid.HasRoot()) {
		return nil, fmt.Errorf("config.json is not that of process %d: the host's root is a user or group of its user "+
			"namespace, and not in uidMappings and gidMappings", process.PID)
	}
	sources, err := openSources(p.mounts)
	if err != nil {
		return nil, err
	}
	defer closeSources(sources)
	c := &container{process: process, plan: p, sources: sources, host: h, path: path, interrupted: r.Interrupted}
	defer c.close()
	if warnings, err = c.give(ctx); err != nil {
		return nil, err
	}
	if len(p.variables) > 0 {
		warnings = append(warnings, fmt.Errorf("variables of the CDI specs are not set, since the container has its "+
			"environment already: %s", strings.Join(p.variables, ", ")))
	}
	return warnings, nil
}

// rootPath returns the absolute path of a container's root from the path in config.json.
func rootPath(path, bundle string) (string, error) {
	if !filepath.IsAbs(path) {
		if !filepath.IsAbs(bundle) || !filepath.IsLocal(path) {
			return "", fmt.Errorf("the root %q is not inside the bundle %q", path, bundle)
		}
		path = filepath.Join(bundle, path)
	}
	return path, nil
}

// container is a container to which a plan is applied.
type container struct {
	*process
	plan    *plan
	sources []source
	host    host.Host
	// path is the root's path in the container's mount namespace before the runtime pivots. root is nil before check.
	path string
	root *rootfs.Root
	// nodes are the plan's nodes, with owners as on the host.
	nodes []rootfs.Node
	// interrupted is Request.Interrupted.
	interrupted func() error
}

func (c *container) close() {
	if c.root != nil {
		_ = c.root.Close()
	}
}

func (c *container) give(ctx context.Context) (warnings []error, err error) {
	if err := c.mapOwners(); err != nil {
		return nil, err
	}
	self, err := proc.Self(c.host.Proc())
	if err != nil {
		return nil, err
	}
	defer self.Close()
	mounts, err := self.Mounts()
	if err != nil {
		return nil, fmt.Errorf("read the mounts of the host: %w", err)
	}
	if err := c.inside(func() error { return c.check(mounts) }); err != nil {
		return nil, err
	}
	if err := c.allow(ctx); err != nil {
		return nil, fmt.Errorf("allow the container its devices: %w", err)
	}
	err = c.inside(func() error {
		c.root.Record()
		if err := c.apply(ctx, &warnings); err != nil {
			return errors.Join(err, c.root.Undo())
		}
		if err := c.root.Keep(); err != nil {
			warnings = append(warnings, err)
		}
		return nil
	})
	return warnings, err
}

// allow adds the device rules. First it opens the cgroups, then it checks that the process still runs: so they were
// that process's, and not those of a later process with its ID.
func (c *container) allow(ctx context.Context) error {
	if len(c.plan.rules) == 0 {
		return nil
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	paths := devcgroup.Host{
		Proc: c.host.Proc(), Cgroups: c.host.Sys("fs", "cgroup"), Systemd: "/run/systemd/private",
	}
	cgroups, err := devcgroup.Find(paths, c.Process)
	if err != nil {
		return err
	}
	defer cgroups.Close()
	if err := c.checkAlive(); err != nil {
		return err
	}
	return cgroups.Allow(ctx, c.plan.rules)
}

// inside runs act in the container's mount namespace, and returns to this one. The working directory is then "/".
func (c *container) inside(act func() error) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := unix.Setns(int(c.mounts.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("enter the mount namespace of process %d: %w", c.PID, err)
	}
	err := act()
	if e := unix.Setns(int(c.own.Fd()), unix.CLONE_NEWNS); e != nil {
		err = errors.Join(err, fmt.Errorf("return to the host's mount namespace: %w", e))
	}
	return err
}
