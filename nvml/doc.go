// Package nvml reads a host's GPUs, their health and their events through NVIDIA's management library (NVML), and
// changes their settings. It is the only package that imports go-nvml, and the only one with cgo. It decides nothing:
// other packages decide from the [gpu.Snapshot] what a container gets.
//
// [ReadDevices] and [ReadTopology] read the GPUs once. A [Session] reads them again and again:
//
//	session := nvml.NewSession(nvml.Options{Host: h, GPUTimeout: 10 * time.Second, Log: log})
//	defer session.Close()
//	snapshot, err := session.Snapshot(ctx)
//
// # One library in a process
//
// go-nvml calls NVML's functions by name. The dynamic linker binds each name once, to the library that was loaded
// first, and keeps that library until the process ends. So a process can open the same file again, even after an
// error, but another file is an [ErrLibraryConflict]. After an upgrade of the driver, the process must restart.
//
// # A GPU that does not answer
//
// Every call into the driver is bounded; see calls.go. Each GPU is read in its own call. A GPU that fails or does not
// answer in time is in the snapshot, with its error and the properties that are known. If it did not return its UUID,
// that is read from /proc/driver/nvidia/gpus.
//
// A driver that hangs holds goroutines and threads, but not more with each snapshot: at most one for each subject of a
// call, such as the driver, a GPU's properties, NVLinks or health, or a pair of GPUs.
//
// # Number of driver calls
//
// On a real host a call is an ioctl, so nothing is read twice for one snapshot. For eight H100 [ReadDevices] makes 75
// calls. [ReadTopology] makes 431, mostly for NVLinks.
package nvml
