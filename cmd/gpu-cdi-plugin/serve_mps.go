package main

import (
	"errors"
	"fmt"
	"path/filepath"

	"gpu-cdi-plugin/agent/mps"
)

// mpsDir returns the directory for the MPS control daemons.
func (a *app) mpsDir() string { return filepath.Join(a.plugin.RuntimeDir, "mps") }

func (s *service) newSupervisor() *mps.Supervisor {
	return mps.New(mps.Options{
		Dir: s.app.mpsDir(),
		// The kubelet serves this socket with either kind of registration.
		KubeletSocket: filepath.Join(s.app.plugin.DevicePluginDir, "kubelet.sock"),
		Helper:        []string{"gpu-cdi-plugin", mpsExec},
		Program:       s.mpsProgram,
		Check:         s.app.check,
		Modes:         s.session,
		Changed:       s.advertise,
		Log:           s.app.log,
	})
}

// mpsProgram finds the MPS control program of the driver that the published snapshot was taken with.
func (s *service) mpsProgram() (mps.Program, error) {
	snapshot := s.node.State().Snapshot
	if snapshot == nil {
		return mps.Program{}, errors.New("the driver has not been read yet")
	}
	d, file, err := s.driverProgram(snapshot.DriverVersion, mps.ControlProgram)
	if err != nil {
		return mps.Program{}, err
	}
	root := s.host.DriverRoot()
	if file == nil {
		return mps.Program{}, fmt.Errorf("the driver in %s has no %s: install its compute utilities, "+
			"or share the GPUs by time-slicing", root, mps.ControlProgram)
	}
	p := mps.Program{Path: file.HostPath, Driver: d.Version}
	if root == "/" {
		return p, nil // the loader finds the libraries
	}
	p.Root, p.Libraries = root, map[string]string{}
	for _, l := range d.Libraries {
		p.Libraries[filepath.Base(l.Path)] = l.HostPath
		if l.SONAME != "" {
			p.Libraries[l.SONAME] = l.HostPath
		}
	}
	return p, nil
}
