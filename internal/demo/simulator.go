package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/exit"
)

// Simulator is gpu-sim, a program of its own, so that the product has no simulation in it.
type Simulator struct {
	// Path is the program, empty if it is not there.
	Path string
}

// simulatorName is the file name of the program.
const simulatorName = "gpu-sim"

// FindSimulator looks for gpu-sim beside the running program, where a build puts it, and then in PATH.
func FindSimulator() Simulator {
	if own, err := os.Executable(); err == nil {
		if path, err := exec.LookPath(filepath.Join(filepath.Dir(own), simulatorName)); err == nil {
			return Simulator{path}
		}
	}
	return Simulator{Find(simulatorName)}
}

// Machines are the names of these machines, given by name or file; without any, of all that gpu-sim comes with.
func (s Simulator) Machines(ctx context.Context, namesOrFiles ...string) (names []string, err error) {
	var list struct {
		Machines []struct {
			Name string `json:"name"`
		} `json:"machines"`
	}
	err = s.run(ctx, &list, "list-machines", append([]string{"--"}, namesOrFiles...)...)
	for _, m := range list.Machines {
		names = append(names, m.Name)
	}
	return names, err
}

// Node is a simulated node.
type Node struct {
	Machine string     `json:"machine"`
	Devices []struct{} `json:"devices"`
}

// Create makes a simulated node in a new directory. Without root its device nodes are plain files.
func (s Simulator) Create(ctx context.Context, dir, nameOrFile string) (n Node, err error) {
	plain := fmt.Sprintf("--plain-nodes=%t", os.Geteuid() != 0)
	err = s.run(ctx, &n, "create", plain, "--machine="+nameOrFile, dir)
	return n, err
}

// Show is the simulated node in a directory. It is an error if there is none.
func (s Simulator) Show(ctx context.Context, dir string) (n Node, err error) {
	err = s.run(ctx, &n, "show", dir)
	return n, err
}

// run reads what gpu-sim prints as JSON. Its environment is ours, since it finds the C compiler and its cache by that, and
// its errors are told as ours.
func (s Simulator) run(ctx context.Context, to any, verb string, args ...string) error {
	if s.Path == "" {
		return exit.With(exit.Failure, "make build puts gpu-sim beside this program, where it is looked for first, and then in PATH",
			errors.New("no GPU can be simulated: gpu-sim is not there"))
	}
	stdout, stderr, err := start(ctx, os.Environ(), s.Path, append([]string{verb, "--output=json"}, args...)...)
	if err != nil {
		if reported, unreadable := cli.ReadReport([]byte(stderr)); unreadable == nil {
			return reported
		}
		return err
	}
	if err := json.Unmarshal([]byte(stdout), to); err != nil {
		return fmt.Errorf("read what %s %s prints: %w", s.Path, verb, err)
	}
	return nil
}
