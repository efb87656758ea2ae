package main

import (
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/sim"
)

// errorTable gives the errors of package sim their exit status and a hint. The first row that matches counts.
var errorTable = []cli.ErrorRow{
	cli.Sentinel(sim.ErrUnknownMachine, cli.Usage,
		"a machine file of your own is given by its path, with a slash or .yaml"),
	cli.Sentinel(sim.ErrMachineFile, cli.Usage,
		"the files in sim/machines of the sources are examples and explain every key"),
	cli.Typed(func(*sim.InvalidError) (cli.Code, string) { return cli.Usage, "" }),
	cli.Sentinel(sim.ErrExists, cli.Failure, "--force replaces it, like an upgrade of the driver in place"),
	cli.Sentinel(sim.ErrNotEmpty, cli.Failure, "name a directory that does not exist yet"),
	cli.Sentinel(sim.ErrNotNode, cli.Failure, "gpu-sim create makes one"),
	cli.Sentinel(sim.ErrNoCompiler, cli.Failure, "install one, for example with: apt-get install gcc libc6-dev"),
	cli.Sentinel(sim.ErrNoCache, cli.Failure, "name a directory that can be written to with XDG_CACHE_HOME"),
	cli.Sentinel(sim.ErrNoDeviceNodes, cli.Failure,
		"run it as root (with CAP_MKNOD), or use --plain-nodes if no container needs the nodes"),
}
