// Package nvml reads a node's GPUs, their health and their events through NVIDIA's management library (NVML), and
// changes their settings. It is the only importer of go-nvml and the only package with cgo. It decides nothing: what a
// container gets, and which GPU is preferred, follows elsewhere from the [gpu.Snapshot].
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
// error, but another file is an [ErrLibraryConflict]. When the driver is upgraded, the process must restart.
//
// # A GPU that does not answer
//
// Every call into the driver is bounded; see calls.go. Each GPU is read in its own call. A GPU that fails or does not
// answer in time is in the snapshot with its error and its known properties; if it did not return its UUID, the UUID
// is read from /proc/driver/nvidia/gpus.
//
// The number of goroutines and threads that a hung driver holds is bounded too, however many snapshots are taken: one
// for each subject of a call, such as the driver, a GPU's properties, its NVLinks or its health, or a pair of GPUs.
//
// # Number of driver calls
//
// On a real node a call is an ioctl, so no reading repeats a call. For eight H100 [ReadDevices] makes 67 calls and
// [ReadTopology], mostly for NVLinks, 423.
package nvml
