// Package sim makes simulated GPU nodes: a directory that looks like the root of a host with an NVIDIA driver, device
// nodes and sysfs included, whose libnvidia-ml.so.1 is a real shared library with NVML's ABI.
//
// The product talks to a simulated node as it talks to a real one, through that library and those files. So there is
// no fake backend in the product, and every test, demo and benchmark runs the code that is shipped.
//
//	m, err := sim.LoadMachine("dgx-h100")
//	node, err := sim.Create(ctx, dir, m, sim.Options{})
//	err = node.Lose(3) // GPU 3 falls off the bus, for every process that has the library open
//
// A machine is a YAML file; those that come with the package are listed by [Machines]. What does not change (the
// machine's description) travels inside the library file, so a node's directory can be moved, and its library can be
// mounted into a container. What does change ([Node]'s fault methods) is in the file run/gpu-sim/state, which the
// library looks at on every call.
//
// Of the product only the demonstration uses the package. It starts no process other than the C compiler.
package sim
