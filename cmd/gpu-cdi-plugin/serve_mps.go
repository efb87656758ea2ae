package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/mps"
)

// mpsDir returns the directory for the MPS control daemons.
func (a *app) mpsDir() string { return filepath.Join(a.plugin.RuntimeDir, "mps") }

func (s *service) newSupervisor(h host.Host) *mps.Supervisor {
	return mps.New(mps.Options{
		Dir:      s.app.mpsDir(),
		Insecure: s.app.InsecurePaths,
		// The kubelet serves this socket with either kind of registration.
		KubeletSocket: filepath.Join(s.app.plugin.DevicePluginDir, "kubelet.sock"),
		Helper:        mps.Helper{Path: "/proc/self/exe", Args: []string{"gpu-cdi-plugin", mpsExec}},
		Program:       func(context.Context) (mps.Program, error) { return s.mpsProgram(h) },
		Modes:         s.session,
		Changed:       s.advertise,
		Log:           s.app.log,
	})
}

const (
	mpsControl = "nvidia-cuda-mps-control"
	mpsServer  = "nvidia-cuda-mps-server"
)

// mpsProgram finds the MPS control program of the driver that the published snapshot was taken with.
func (s *service) mpsProgram(h host.Host) (mps.Program, error) {
	snapshot := s.node.State().Snapshot
	if snapshot == nil {
		return mps.Program{}, errors.New("the driver has not been read yet")
	}
	d, err := driver.Discover(h, snapshot.DriverVersion)
	if err != nil {
		return mps.Program{}, fmt.Errorf("find %s: %w", mpsControl, err)
	}
	at := slices.IndexFunc(d.Files, func(f driver.File) bool { return filepath.Base(f.Path) == mpsControl })
	if at < 0 {
		return mps.Program{}, fmt.Errorf("the driver in %s has no %s: install its compute utilities, "+
			"or share the GPUs by time-slicing", h.DriverRoot(), mpsControl)
	}
	p := mps.Program{Path: d.Files[at].HostPath, Driver: d.Version}
	dirs := []string{filepath.Dir(p.Path)}
	for _, dir := range []string{"/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"} {
		dirs = append(dirs, h.Driver(dir))
	}
	for _, dir := range dirs {
		if s.app.check(trust.Dir, dir) == nil { // other users could put a server of their own into the rest
			p.SearchPath = append(p.SearchPath, dir)
		}
	}
	if h.DriverRoot() != "/" {
		p.Root = h.DriverRoot()
		p.Libraries = librariesByName(d)
	}
	return p, s.app.checkMPS(p)
}

// librariesByName returns the driver's libraries by file name and SONAME.
func librariesByName(d *driver.Driver) map[string]string {
	byName := map[string]string{}
	for _, l := range d.Libraries {
		byName[filepath.Base(l.Path)] = l.HostPath
		if l.SONAME != "" {
			byName[l.SONAME] = l.HostPath
		}
	}
	return byName
}
