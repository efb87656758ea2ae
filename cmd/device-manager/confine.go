package main

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/systemd"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/scope"
)

// confiner confines the processes of leases by scopes of systemd.
type confiner struct{ *app }

// confiner returns what confines the processes of leases, or nil where systemd does not run.
func (a *app) confiner() lease.Confiner {
	if _, err := os.Lstat(systemd.Socket); err != nil {
		return nil
	}
	return confiner{a}
}

func scopeName(id string) string { return "lease-" + id + ".scope" }

// Confine implements lease.Confiner.
func (c confiner) Confine(
	ctx context.Context, id string, by model.Caller, pidfd *os.File, o model.RunOptions,
) error {
	allowed, err := c.nodesOf(o)
	if err != nil {
		return err
	}
	return scope.Start(ctx, systemd.Socket, scope.Scope{
		Name: scopeName(id), Description: "Command of the lease " + id, PID: by.PID, PIDFD: pidfd, UID: by.UID,
		Devices: allowed,
	})
}

// Revoke implements lease.Confiner.
func (c confiner) Revoke(ctx context.Context, id string) {
	if err := scope.Revoke(ctx, systemd.Socket, scopeName(id)); err != nil {
		c.Log.Warn("what is left of lease " + id + " can open its devices still: " + wording.OneLine(err))
	}
}

// nodesOf returns the device nodes of run options.
func (a *app) nodesOf(o model.RunOptions) ([]systemd.DeviceAllow, error) {
	paths, err := cdi.Load(cdi.Dirs(a.Root, a.CDIDir)...).DeviceNodes(o.CDIDevices)
	if err != nil {
		return nil, err
	}
	for _, d := range o.Devices {
		paths = append(paths, d.HostPath)
	}
	var list []systemd.DeviceAllow
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("read the device node: %w", err)
		}
		stat, known := info.Sys().(*syscall.Stat_t)
		if !known || info.Mode()&fs.ModeDevice == 0 {
			return nil, fmt.Errorf("%s is no device node", path)
		}
		kind := byte('b')
		if info.Mode()&fs.ModeCharDevice != 0 {
			kind = 'c'
		}
		list = append(list, systemd.DeviceAllow{
			Path: systemd.DevicePath(kind, unix.Major(stat.Rdev), unix.Minor(stat.Rdev)), Access: "rwm",
		})
	}
	return list, nil
}
