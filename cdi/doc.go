// Package cdi describes a node's GPUs to container engines: it makes a CDI spec of a snapshot of the GPUs and the
// driver's files, writes, reads, checks and compares such specs, and puts their devices into an OCI bundle.
//
//	d, err := driver.Discover(h, snapshot.DriverVersion)
//	spec, findings, err := cdi.Generate(snapshot, d, cdi.Options{HookPath: "/usr/bin/prestart-hook"})
//	path := filepath.Join("/var/run/cdi", cdi.FileName(spec.Kind))
//	err = cdi.WriteFile(path, spec)
//
// Generate is a pure function: the same snapshot, files and options give the same spec, byte for byte. WriteFile, which
// replaces one spec, and EditBundle, which replaces one config.json, change the node. Both leave the old file or the
// new one, whole. The package does not call the driver and runs nothing.
package cdi
