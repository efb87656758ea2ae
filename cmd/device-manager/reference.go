//go:build reference

package main

import (
	"fmt"
	"os"

	"gpu-cdi-plugin/internal/cli"
)

// main writes the manual pages and completions of the program into a directory.
func main() {
	a, dir := newApp(), os.Args[1]
	err := cli.WriteReference(a.Program, a.rootCommand(), dir)
	if err == nil {
		err = cli.WriteLink(a.Program, leaseProgram, leaseVerb, dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
