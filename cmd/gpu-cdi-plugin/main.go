// Command gpu-cdi-plugin tells what GPUs a node has and gives them to containers through CDI.
//
// Each verb has a file. A verb reads its options, asks a library package for the work and prints the result; main
// does nothing, and only main ends the process.
package main

import (
	"context"
	"os"
)

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
}
