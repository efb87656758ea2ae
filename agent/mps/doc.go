// Package mps runs the control daemons of NVIDIA's Multi-Process Service (MPS), one for each GPU that is shared by it.
//
//	s := mps.New(mps.Options{Dir: "/run/gpu-cdi-plugin/mps", ...})
//	s.Set(mps.Daemons(resources)) // now, and whenever they change
//	err = s.Run(ctx)
//
// A worker for each GPU reconciles its daemon (worker.go), step by step. No worker waits for another.
//
// The daemons outlive the plugin, since containers continue without it: each runs in a session of its own, and a record
// of its process is on disk before it starts to run. The next plugin adopts the recorded process if it is still the
// same.
//
// The containers of a GPU can write to its shared memory, so everything there is hostile: no PID is read from there,
// the programs on the host follow no link there, and each check of a daemon has one deadline and bounded answers. The
// directory is a tmpfs of its own (shm.go), so that containers cannot fill the node's file system. The daemon itself
// reads what containers send, so it is confined (confine.go). Containers of the same GPU can disturb each other, as is
// usual with MPS.
//
// The package does not know the driver's library or gRPC.
package mps
