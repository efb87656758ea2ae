package main

import (
	"fmt"
	"strings"
	"testing"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/nvml"
)

func TestDriverErrorsHaveStatusAndHint(t *testing.T) {
	for err, c := range map[error]struct {
		code cli.Code
		hint string
	}{
		nvml.ErrLibraryNotFound: {cli.NoDriver, "--driver-root"},
		nvml.ErrLibraryUnusable: {cli.NoDriver, "damaged"},
		nvml.ErrLibraryConflict: {cli.NoDriver, "start the process again"},
		nvml.ErrDriverNotLoaded: {cli.NoDriver, "modprobe nvidia"},
		nvml.ErrNoControlNode:   {cli.NoDriver, "device make-nodes"},
		nvml.ErrVersionMismatch: {cli.NoDriver, "reboot"},
		nvml.ErrNoPermission:    {cli.NoDriver, "run as root"},
		nvml.ErrDriverFailed:    {cli.NoDriver, "dmesg"},
		gpu.ErrNotAnswering:     {cli.NoDriver, "dmesg"},
		errNoGPU:                {cli.NoGPU, "lspci"},
	} {
		got := newApp().Classify(fmt.Errorf("read the driver: %w", err))
		if cli.CodeOf(got) != c.code || !strings.Contains(cli.HintOf(got), c.hint) {
			t.Errorf("%v: status %d, hint %q; want %d and %q", err, cli.CodeOf(got), cli.HintOf(got), c.code, c.hint)
		}
	}
}
