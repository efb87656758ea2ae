// Package cdi describes a host's GPUs to container engines. It generates a CDI spec from a snapshot of the GPUs and
// the driver's files; writes, reads, validates and compares specs; and injects their devices into an OCI bundle.
//
//	d, err := driver.Discover(h, snapshot.DriverVersion)
//	spec, findings, err := cdi.Generate(snapshot, d, cdi.Options{HookPath: "/usr/bin/prestart-hook"})
//	path := filepath.Join("/var/run/cdi", cdi.FileName(spec.Kind))
//	err = cdi.WriteFile(path, spec)
//
// Generate is a pure function: the same snapshot, files and options give the same spec, byte for byte. Only WriteFile,
// which replaces one spec, and EditBundle, which replaces one config.json, change files. Both leave either the old
// file or the complete new one. The package does not call the driver and runs no programs.
package cdi
