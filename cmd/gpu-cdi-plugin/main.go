//go:build !reference

// Command gpu-cdi-plugin gives containers the GPUs of a host through CDI.
//
// Each verb has a file: it reads its options, calls the libraries and prints the result. main only calls run and ends
// the process.
package main

import (
	"context"
	"os"
)

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}
