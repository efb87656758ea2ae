// Package nvml reads a node's GPUs through NVIDIA's management library. It is the only importer of go-nvml and the
// only part of the project with cgo. It makes a [gpu.Snapshot], and sets a GPU's compute mode when it is told to
// ([Library.SetExclusive]): what a container gets, and which GPU is preferred, is decided elsewhere.
//
//	path, err := nvml.Find(h, "")
//	lib, err := nvml.Open(path, nvml.WithHost(h))
//	defer lib.Close()
//	snapshot, err := lib.Snapshot(ctx, h)
//
// # One library in a process
//
// go-nvml calls NVML's functions by name. The dynamic linker binds each name once, to the library that was loaded
// first, and keeps that library until the process ends. So a process has one NVML library: opening the same file
// again is fine, also after an error; opening another one is [ErrLibraryConflict], and after the driver was upgraded
// the process has to be started again.
//
// # A GPU that does not answer
//
// Each GPU is read in a goroutine of its own. One that fails is in the snapshot with its error, and so is one that has
// not answered when the time is up (see [WithTimeout] and [WithTolerance]). Who it is, is then read from
// /proc/driver/nvidia/gpus. A call into a hung driver cannot be cancelled: its goroutine and its thread are abandoned.
// When the call returns they go on, and the next snapshot finds the GPU answering.
//
// The number of abandoned calls is bounded. While a call about a GPU (its NVLinks, its compute mode, a pair of GPUs, the
// driver) has not returned, later snapshots make no other call about it. With N GPUs at most 2+4N+N(N-1)/2 calls can be
// abandoned, however often snapshots are taken. The driver is not shut down before they have returned.
//
// # Number of driver calls
//
// Calls are ioctls on a real node, so a snapshot makes none twice. [Library.Devices] makes 3 calls and 8 for each GPU (index to
// handle, UUID, minor, PCI address, name, memory, compute capability, MIG mode), and on a GPU in MIG mode one more and
// one for each possible MIG device, and 5 for each MIG device that is there. [Library.Snapshot] also makes one call
// for each pair of GPUs, and for each GPU one for each NVLink that it could have and the one that says that there are
// no more, one for each active NVLink, and one for each device that its NVLinks lead to. For eight H100 that is 67 and
// 423.
package nvml
