// Package mps shares GPUs by NVIDIA's Multi-Process Service (MPS). A GPU has one control daemon, which is the driver's
// nvidia-cuda-mps-control, and a process of this program that runs it:
//
//	err = mps.Run(ctx, mps.Options{...}, uuid) // the process: gpu-cdi-plugin mps
//
// The service does not start daemons. It checks them, and keeps devices from containers while they are not ready:
//
//	m := mps.New(mps.MonitorOptions{...})
//	m.Set(resources) // now, and whenever they change
//	err = m.Run(ctx)
//
// The process reads its GPU's limits from the descriptor that the service writes for containers. The service asks it
// for the limits that the daemon has, at a socket in the GPU's directory that only root can use (status.go).
//
// What confines the daemon is its unit or its pod: see deploy/gpu-cdi-mps@.service and deploy/mps-daemonset.yaml. The
// package trusts nothing in the GPU's /dev/shm, where containers can write.
//
// The package does not know the driver's library, gRPC or how the driver's files are found.
package mps
