//go:build reference

package main

import (
	"fmt"
	"os"

	"gpu-cdi-plugin/internal/cli"
)

// main writes the manual pages and completions of the program into a directory.
func main() {
	a := newApp()
	if err := cli.WriteReference(a.Program, a.rootCommand(), os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
