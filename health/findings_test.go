package health

import (
	"testing"

	"gpu-cdi-plugin/gpu"
)

func TestFindingsOfAProbe(t *testing.T) {
	first := gpu.Probe{UUID: gpuB, NVLinks: 0b1111, UncorrectedECC: 7, ShutdownTemperature: 92, Temperature: 60}
	for name, c := range map[string]struct {
		change func(*gpu.Probe)
		text   string
		action Action
	}{
		"nothing has changed": {func(*gpu.Probe) {}, "", ""},
		"the GPU is lost": {
			func(p *gpu.Probe) { p.Error, p.Lost = "GPU is lost", true },
			"the driver has lost the GPU, for example because it fell off the bus", Reboot,
		},
		"the GPU needs a reset": {
			func(p *gpu.Probe) { p.Error, p.NeedsReset = "GPU requires reset", true },
			"the driver cannot use the GPU before a reset", Reset,
		},
		"a row remapping is pending": {
			func(p *gpu.Probe) { p.RemapPending = true }, "a row of its memory is remapped at the next reset", Reset,
		},
		"a row remapping has failed": {
			func(p *gpu.Probe) { p.RemapPending, p.RemapFailed = true, true },
			"a row of its memory could not be remapped", Service,
		},
		"a page retirement is pending": {
			func(p *gpu.Probe) { p.RetirementPending = true }, "a page of its memory is retired at the next reset", Reset,
		},
		"uncorrected errors rise": {
			func(p *gpu.Probe) { p.UncorrectedECC = 9 }, "its memory had uncorrected errors since the last probe", Probe,
		},
		"the driver has started to count again": {func(p *gpu.Probe) { p.UncorrectedECC = 1 }, "", ""},
		"an NVLink that was up is down": {
			func(p *gpu.Probe) { p.NVLinks = 0b1101 }, "1 of its 4 NVLinks are down", None,
		},
		"MIG takes the NVLinks down": {func(p *gpu.Probe) { p.NVLinks, p.MIGEnabled = 0, true }, "", ""},
		"the GPU has an error":       {func(p *gpu.Probe) { p.Error = "unknown error" }, "it does not answer", None},
		"an NVLink comes up":         {func(p *gpu.Probe) { p.NVLinks = 0b11111 }, "", ""},
		"the fabric manager is still busy": {
			func(p *gpu.Probe) { p.Fabric = gpu.FabricStarting }, "the fabric manager has not configured it yet", None,
		},
		"the GPU cannot join the fabric": {
			func(p *gpu.Probe) { p.Fabric = gpu.FabricFailed }, "it could not join the NVLink fabric", Reset,
		},
		"the GPU's fabric is unhealthy": {
			func(p *gpu.Probe) { p.Fabric = gpu.FabricUnhealthy }, "the driver reports its NVLink fabric as unhealthy", None,
		},
		"the GPU is part of the fabric": {func(p *gpu.Probe) { p.Fabric = gpu.FabricCompleted }, "", ""},
		"the GPU is about to shut down": {
			func(p *gpu.Probe) { p.Temperature = 90 }, "it is about to overheat: it shuts down at 92 °C", None,
		},
		"the GPU is hot": {func(p *gpu.Probe) { p.Temperature = 89 }, "", ""},
		"the driver requires a reset": {
			func(p *gpu.Probe) { p.RecoveryAction = 1 }, "the driver requires a reset of the GPU", Reset,
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, Rules{})
			now := first
			n.Probe(n.now, &now)
			if s := n.Statuses()[gpuB]; s.State != Healthy {
				t.Fatalf("the device is %s (%s) after the first probe", s.State, s.Reason)
			}
			c.change(&now)
			n.Probe(n.now, &now)
			got := n.Statuses()[gpuB]
			if got.Reason != c.text || (got.State == Healthy) != (c.text == "") || c.text != "" && got.Remedy != c.action {
				t.Errorf("the device is %s (%q, %s), want %q, %s", got.State, got.Reason, got.Remedy, c.text, c.action)
			}
		})
	}
}
