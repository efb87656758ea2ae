// Command gpu-sim makes simulated hosts with GPUs, and changes what their GPUs report while programs use them. It is
// for tests and demonstrations, and for trying gpu-cdi-plugin without a GPU. See package sim.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}
