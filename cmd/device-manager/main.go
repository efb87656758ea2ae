//go:build !reference

// Command device-manager is the kubelet's side of the device plugin API, for hosts without a kubelet and for authors of
// plugins. It knows nothing about GPUs.
//
// Each verb has a file, which reads its options, calls the libraries and prints the result. Only main ends the process.
package main

import (
	"context"
	"os"
	"path/filepath"
)

func main() {
	program := run
	if filepath.Base(os.Args[0]) == leaseProgram {
		program = runAsLeaseProgram
	}
	os.Exit(program(context.Background(), os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}
