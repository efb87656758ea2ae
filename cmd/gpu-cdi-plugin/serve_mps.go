package main

import (
	"path/filepath"

	"gpu-cdi-plugin/agent/mps"
)

// mpsDir returns the directory for the MPS control daemons.
func (a *app) mpsDir() string { return filepath.Join(a.plugin.RuntimeDir, "mps") }

// newMonitor returns what checks the MPS control daemons.
func (s *service) newMonitor() *mps.Monitor {
	return mps.New(mps.MonitorOptions{
		Dir: s.app.mpsDir(), Modes: s.session, Changed: s.advertise, Log: s.app.Log,
	})
}
