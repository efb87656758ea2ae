// Package sim creates simulated GPU nodes: directories that look like the root of a host with an NVIDIA driver, with
// device nodes and sysfs, whose libnvidia-ml.so.1 is a real shared library with NVML's ABI.
//
// Programs use a simulated node like a real one, through that library and those files. So no program needs a fake
// backend, and every test and benchmark runs the code that is shipped.
//
//	m, err := sim.LoadMachine("dgx-h100")
//	node, err := sim.Create(ctx, dir, m, sim.Options{})
//	err = node.Lose(3) // GPU 3 falls off the bus, for every process that has the library open
//
// A machine is a YAML file; [Machines] returns those in the package. The library file contains the description of the
// machine, so a node's directory can be moved, and its library can be mounted into a container. Faults, events,
// settings and MIG changes are in the file run/gpu-sim/state, which the library checks on every call:
//
//	err = node.XID(3, 79, nil) // ends the waits of event sets at once
//	err = node.Set(3, map[string]string{"recovery-action": "reset", "remap-pending": "1"})
//	err = node.SetReset(3, sim.ResetFault{Result: sim.ResetBusy, Tries: 2}) // by nvidia-smi
//	err = node.Unplug(3)
//
// lib/README.md says what behaves like the real driver, and what is an approximation.
//
// No shipped program except gpu-sim imports the package. It starts no process except the C compiler.
package sim
