// Command gpu-cdi-plugin tells what GPUs a node has and gives them to containers through CDI.
//
// Each verb has a file. A verb reads its options, asks a library package for the work and prints the result; main
// does nothing, and only main ends the process.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	// A second signal ends the process at once. Not in the first second: one Ctrl-C can arrive more than once.
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, stop) })
	os.Exit(run(ctx, os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}
