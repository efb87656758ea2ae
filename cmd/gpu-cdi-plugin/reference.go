//go:build reference

package main

import (
	"errors"
	"fmt"
	"os"

	"gpu-cdi-plugin/internal/cli"
)

// main writes the manual pages and completions of the program into a directory, and that of prestart-hook, whose help
// is the second argument.
func main() {
	a, dir := newApp(), os.Args[1]
	err := errors.Join(
		cli.WriteReference(a.Program, a.rootCommand(), dir),
		cli.WriteConfigPage(a.Program, dir),
		cli.WritePage(dir, "prestart-hook", 8, "prepares containers for their GPUs", os.Args[2]),
	)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
