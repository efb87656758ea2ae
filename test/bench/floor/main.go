// Command floor opens the driver's library and exits, as a lower bound for the time of programs that use the driver.
//
//	floor LIBRARY [wait|events|check UUID]
//
// With wait it exits at the end of its standard input. With events it also prints the time of each XID that it
// receives, in nanoseconds since 1970. With check it reads, for each line of its input, what a check of a GPU needs,
// and prints how long that took, in nanoseconds.
package main

import (
	"bufio"
	"context"
	"errors"
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
	driver := nvml.NewSession(nvml.Options{
		Host: h, Library: args[0], GPUTimeout: 10 * time.Second, Log: slog.Default(),
	})
	events := len(args) > 1 && args[1] == "events"
	if events {
		driver.Notify(func(e gpu.Event) {
			if e.Kind == gpu.EventXID {
				fmt.Println(time.Now().UnixNano())
			}
		}, func() {})
	}
	if err := driver.Open(context.Background()); err != nil {
		return err
	}
	check := len(args) > 2 && args[1] == "check"
	if events || check {
		if _, err := driver.Snapshot(context.Background()); err != nil {
			return err
		}
	}
	switch {
	case check:
		lines := bufio.NewScanner(os.Stdin)
		for lines.Scan() {
			begin := time.Now()
			if err := readForCheck(driver, args[2]); err != nil {
				return err
			}
			fmt.Println(time.Since(begin).Nanoseconds())
		}
	case len(args) > 1:
		if _, err := io.Copy(io.Discard, os.Stdin); err != nil {
			return err
		}
	}
	return driver.Close()
}

// readForCheck reads a GPU's health, its processes, and then its memory, which must be read together with the
// processes.
func readForCheck(driver *nvml.Session, uuid string) error {
	_, probing := driver.Probes(context.Background(), uuid)
	_, processes := driver.Use(context.Background(), uuid)
	_, memory := driver.Use(context.Background(), uuid)
	return errors.Join(probing, processes, memory)
}
