// Package mps shares GPUs by NVIDIA's Multi-Process Service (MPS). Each GPU has one control daemon, the driver's
// nvidia-cuda-mps-control. `gpu-cdi-plugin mps` runs it:
//
//	err = mps.Run(ctx, mps.Options{...}, uuid) // the process: gpu-cdi-plugin mps
//
// The service does not start daemons. It checks them, and withholds a device from containers as long as its daemon is
// not ready:
//
//	m := mps.New(mps.MonitorOptions{...})
//	m.Set(resources) // now, and whenever they change
//	err = m.Run(ctx)
//
// The process that runs a daemon reads the GPU's limits from the descriptor that the service writes for containers.
// The service asks this process for the limits that the daemon actually has, over a socket in the GPU's directory that
// only root can use (status.go).
//
// The unit or pod in which a daemon runs confines it: see deploy/units/gpu-cdi-mps@.service and the chart in
// deploy/chart. The package does not trust files in the GPU's /dev/shm, to which containers can write.
//
// The package does not depend on the driver's library or gRPC, and does not search for the driver's files.
package mps
