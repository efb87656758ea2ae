//go:build reference

package main

import (
	"errors"
	"fmt"
	"os"

	"gpu-cdi-plugin/internal/cli"
)

// main writes the manual pages and completions of the program into a directory.
func main() {
	a, leases, dir := newApp(), newApp(), os.Args[1]
	err := errors.Join(
		cli.WriteReference(a.Program, a.rootCommand(), dir),
		cli.WriteReference(leases.Program, leases.leaseProgramCommand(), dir),
		cli.WriteConfigPage(a.Program, dir),
	)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
