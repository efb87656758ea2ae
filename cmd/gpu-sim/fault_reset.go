package main

import (
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/sim"
)

func resetCommand() *cobra.Command {
	var gpu int
	var result string
	var f sim.ResetFault
	results := sim.ResetResults()
	cmd := needGPU(
		faultVerb(
			"reset",
			" --gpu N --result RESULT [--tries N] [--delay DURATION]",
			"Set how resets of a GPU end",
			`Sets how 'nvidia-smi --gpu-reset' ends; it does not reset the GPU. Without a fault a reset works as soon as nothing
uses the GPU and its persistence mode is off. The results are:

  works          after --delay; clears what resets clear, and leaves the UUID
  busy           refused: in use by another client
  not-supported  refused, as in virtual machines; the reset file of the PCI device is missing
  needs-peers    refused, as on NVSwitch machines before Hopper
  hangs          never returns; opening the reset file of the PCI device for writing blocks`,
			0,
			func(n *sim.Node, _ []string) error {
				f.Result = sim.ResetResult(result)
				return n.SetReset(gpu, f)
			},
		),
		&gpu,
	)
	cmd.Example = `  gpu-sim fault /tmp/node reset --gpu 3 --result busy --tries 3
  gpu-sim fault /tmp/node reset --gpu 3 --result works --delay 20s
  gpu-sim fault /tmp/node reset --gpu 3 --result not-supported`
	cmd.Flags().StringVar(&result, "result", "", "`result` of resets: "+strings.Join(results, ", "))
	cmd.Flags().IntVar(&f.Tries, "tries", 0, "after how `many` resets they work again; 0 is never")
	cmd.Flags().DurationVar(&f.Delay, "delay", 0, "how `long` a reset takes")
	_ = cmd.MarkFlagRequired("result")
	_ = cmd.RegisterFlagCompletionFunc("result", cobra.FixedCompletions(results, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// attachCommands returns the verbs that take a GPU away from the driver or the machine, and those that give it back.
func attachCommands() []*cobra.Command {
	var verbs []*cobra.Command
	for _, v := range []struct {
		name, short, long string
		do                func(n *sim.Node, gpu int) error
	}{
		{
			"unbind", "Unbind the driver from a GPU",
			`The GPU is no longer enumerated, calls on it return NVML_ERROR_GPU_IS_LOST, and system event sets return the event.
When no program has the GPU open, or after 10 s, sysfs shows it without a driver.`, (*sim.Node).Unbind,
		},
		{"bind", "Bind the driver to a GPU again", "Undoes unbind.", (*sim.Node).Bind},
		{
			"unplug", "Remove a GPU from the PCI bus",
			"Like unbind, and the GPU's PCI device is also no longer in sysfs. Its /dev/nvidiaN stays.", (*sim.Node).Unplug,
		},
		{"plug", "Put a GPU on the PCI bus again", "Undoes unplug.", (*sim.Node).Plug},
	} {
		var gpu int
		cmd := needGPU(faultVerb(v.name, " --gpu N", v.short, v.long, 0,
			func(n *sim.Node, _ []string) error { return v.do(n, gpu) }), &gpu)
		cmd.Example = "  gpu-sim fault /tmp/node " + v.name + " --gpu 3"
		verbs = append(verbs, cmd)
	}
	return verbs
}
