// Command gpu-check runs the whole way of a GPU into a container on this machine's real driver, and appends what it saw
// to a report: what GPUs there are, a spec, its validation, containers through runc that list and use their GPUs.
//
// It needs the built programs, a runc and nothing else: the root file system is made of this machine's own files.
// Exit status: 0 all that could be checked is right, 1 something is wrong, 2 usage, 10 no driver, 11 no GPU.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	os.Exit(int(run(ctx, os.Args[1:], os.Stdout, os.Stderr)))
}
