package main

import (
	"fmt"
	"strings"
	"testing"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/nvml"
)

func TestDriverErrorsHaveStatusAndHint(t *testing.T) {
	for err, c := range map[error]struct {
		code exit.Code
		hint string
	}{
		nvml.ErrLibraryNotFound: {exit.NoDriver, "--driver-root"},
		nvml.ErrLibraryUnusable: {exit.NoDriver, "damaged"},
		nvml.ErrLibraryConflict: {exit.NoDriver, "start the process again"},
		nvml.ErrDriverNotLoaded: {exit.NoDriver, "modprobe nvidia"},
		nvml.ErrVersionMismatch: {exit.NoDriver, "reboot"},
		nvml.ErrNoPermission:    {exit.NoDriver, "run as root"},
		nvml.ErrDriverFailed:    {exit.NoDriver, "dmesg"},
		gpu.ErrNotAnswering:     {exit.NoDriver, "dmesg"},
		errNoGPU:                {exit.NoGPU, "lspci"},
	} {
		got := classify(fmt.Errorf("read the driver: %w", err))
		if exit.CodeOf(got) != c.code || !strings.Contains(exit.HintOf(got), c.hint) {
			t.Errorf("%v: status %d, hint %q; want %d and %q", err, exit.CodeOf(got), exit.HintOf(got), c.code, c.hint)
		}
	}
}
