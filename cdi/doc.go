// Package cdi describes a node's GPUs to container engines: it finds the driver's files, makes a CDI spec of them and a
// snapshot of the GPUs, writes, reads, checks and compares such specs, and puts their devices into an OCI bundle.
//
//	driver, err := cdi.Discover(h, snapshot.DriverVersion)
//	spec, left, err := cdi.Generate(snapshot, driver, cdi.Options{HookPath: "/usr/bin/prestart-hook"})
//	path := filepath.Join("/var/run/cdi", cdi.FileName(spec.Kind))
//	err = cdi.WriteFile(path, spec)
//
// Generate is a pure function: the same snapshot, files and options give the same spec, byte for byte. Discover only
// reads. What changes the node is WriteFile, which replaces one spec, and Inject, which replaces one config.json; both
// leave the old file or the new one, whole.
//
// The package never asks the driver and never runs anything. What is NVIDIA's alone stands in driverfiles.go.
package cdi
