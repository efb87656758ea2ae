// Command floor opens the driver's library and exits. No program that uses the driver can take less.
//
//	floor LIBRARY [wait]
//
// With wait it exits at the end of its standard input.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/nvml"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	h, err := host.New("", "", "")
	if err != nil {
		return err
	}
	driver := nvml.NewSession(nvml.Options{Host: h, Library: args[0]})
	if err := driver.Open(context.Background()); err != nil {
		return err
	}
	if len(args) > 1 {
		if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
			return err
		}
	}
	return driver.Close()
}
