// Command floor opens the driver's library and exits. No program that uses the driver can take less.
//
//	floor LIBRARY [wait|events]
//
// With wait it exits at the end of its standard input. With events it also prints when it receives an XID, in
// nanoseconds since 1970.
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"gpu-cdi-plugin/gpu"
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
	options := nvml.Options{Host: h, Library: args[0], Log: slog.Default()}
	events := len(args) > 1 && args[1] == "events"
	if events {
		options.Events = func(e gpu.Event) {
			if e.Kind == gpu.EventXID {
				fmt.Println(time.Now().UnixNano())
			}
		}
	}
	driver := nvml.NewSession(options)
	if err := driver.Open(context.Background()); err != nil {
		return err
	}
	if events {
		if _, err := driver.Snapshot(context.Background()); err != nil {
			return err
		}
	}
	if len(args) > 1 {
		if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
			return err
		}
	}
	return driver.Close()
}
