// Package driver finds the files of the NVIDIA driver on a host: libraries, programs, configuration, firmware, sockets
// and device nodes, and the same of what a node can have besides GPUs. It only reads.
//
//	d, err := driver.Discover(h, "580.126.09")
//	err = d.Check(driver.Compute)
//
// What is NVIDIA's alone is in table.go: which files make a driver, where they are and what they are for. Paths are
// resolved below the driver's root, so that a link in a driver container stays in it. The package does not call the
// driver, runs nothing, and knows nothing of CDI.
package driver
