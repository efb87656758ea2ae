package main

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"gpu-cdi-plugin/test/lib/proc"
)

//go:embed vectoradd.cu
var vectorAdd []byte

const cudaPath = "/usr/bin/vector-add"

// buildCUDA compiles the CUDA program with this machine's nvcc, and links the runtime statically.
func (c *checker) buildCUDA(ctx context.Context) (string, error) {
	nvcc, err := findNVCC()
	if err != nil {
		return "", err
	}
	source := filepath.Join(c.dir, "vectoradd.cu")
	if err := os.WriteFile(source, vectorAdd, 0o644); err != nil {
		return "", err
	}
	program := filepath.Join(c.dir, "vector-add")
	if _, err := proc.Output(ctx, nvcc, "-arch=native", "-cudart=static", "-o", program, source); err != nil {
		return "", err
	}
	c.built = program
	out, err := proc.Output(ctx, nvcc, "--version")
	if err != nil {
		return "", err
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	return fmt.Sprintf("%s: %s", nvcc, lines[len(lines)-1]), nil
}

func findNVCC() (string, error) {
	if nvcc, err := proc.Look("nvcc"); err == nil {
		return nvcc, nil
	}
	found, err := filepath.Glob("/usr/local/cuda*/bin/nvcc")
	if err != nil {
		return "", err
	}
	if len(found) == 0 {
		return "", &unavailable{"there is no nvcc"}
	}
	return found[0], nil
}

// runCUDA runs the program in a container with one GPU.
func (c *checker) runCUDA(ctx context.Context) (string, error) {
	if c.built == "" {
		return "", &unavailable{"there is no CUDA program"}
	}
	all := c.requests()
	if len(all) == 0 {
		return "", &unavailable{"there is no GPU that a container can get"}
	}
	out, err := c.in(ctx, []string{cudaPath}, false, all[len(all)-1].names[0])
	return strings.TrimSpace(out), err
}
