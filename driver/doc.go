// Package driver finds the files of the NVIDIA driver on a host: libraries, programs, configuration, firmware, sockets
// and device nodes. It also finds the files of the extras that a node can have besides GPUs. It only reads.
//
//	d, err := driver.Discover(h, "580.126.09")
//	err = d.Check(driver.Compute)
//
// table.go has everything that is specific to NVIDIA: which files make a driver, where they are and what they are for.
// Paths are resolved below the driver's root, so that a link in a driver container stays in the container. The package
// does not call the driver, runs no programs and does not depend on CDI.
package driver
