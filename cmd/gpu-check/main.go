// Command gpu-check tries everything on this machine's real driver and appends the results to a report: the GPUs, a
// spec, its validation, and containers of runc that list and use their GPUs.
//
// It needs the built programs and runc: the root file system is made of this machine's files.
// Exit status: 0 no check failed, 1 a check failed, 2 usage error, 10 no driver, 11 no GPU.
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
