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
// first, and keeps that library until the process ends. So the same file can be opened again, also after an error, but
// another one is an [ErrLibraryConflict]. When the driver is upgraded, the process must start again.
//
// # A GPU that does not answer
//
// Every call into the driver is bounded: calls.go describes how. Each GPU is read in a call of its own. A GPU that
// fails, or that does not answer in time, is in the snapshot with its error and with what is known of it; where it did
// not return its UUID, that is read from /proc/driver/nvidia/gpus.
//
// The number of goroutines and threads that a hung driver holds is bounded too, however often snapshots are taken: one
// for each subject of a call, such as the driver, a GPU's properties, its NVLinks or its health, or a pair of GPUs.
//
// # Number of driver calls
//
// On a real node a call is an ioctl, so a reading makes none twice. For eight H100 [ReadDevices] makes 67 and
// [ReadTopology], mostly for NVLinks, 423.
package nvml
