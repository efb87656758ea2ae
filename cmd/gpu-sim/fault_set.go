package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/sim"
)

func setCommand() *cobra.Command {
	var gpu int
	var noEvents bool
	var values map[string]string
	cmd := needGPU(faultVerb(
		"set",
		" --gpu N NAME=VALUE...",
		"Change what a GPU reports of its health and settings",
		`Changes values of a GPU; default restores one. More ECC errors and another recovery action are also reported as
events. The library's functions that change settings change the same values. The values are:
`+valueHelp(),
		0,
		func(n *sim.Node, _ []string) error {
			if noEvents {
				return n.SetSilently(gpu, values)
			}
			return n.Set(gpu, values)
		},
	), &gpu)
	cmd.Example = `  gpu-sim fault /tmp/node set --gpu 3 recovery-action=reset ecc-uncorrected=2
  gpu-sim fault /tmp/node set --gpu 3 remap-pending=1 --no-events
  gpu-sim fault /tmp/node set --gpu 0 links-down=0,4 fabric-state=in-progress
  gpu-sim fault /tmp/node set --gpu 0 temperature=93 compute-mode=exclusive-process
  gpu-sim fault /tmp/node set --gpu 0 temperature=default`
	cmd.Flags().BoolVar(&noEvents, "no-events", false, "change the values without events")
	cmd.Args = func(_ *cobra.Command, got []string) error {
		if len(got) < 2 {
			return fmt.Errorf("want %s", cmd.Annotations["usage"])
		}
		values = map[string]string{}
		for _, arg := range got[1:] {
			name, value, ok := strings.Cut(arg, "=")
			if !ok || value == "" {
				return fmt.Errorf("%q is not NAME=VALUE, such as recovery-action=reset", arg)
			}
			values[name] = value
		}
		return nil
	}
	return cmd
}

func valueHelp() string {
	var b strings.Builder
	for _, v := range sim.Values() {
		fmt.Fprintf(&b, "\n  %-27s %s", v.Name, v.Meaning)
	}
	return b.String()
}

func processCommand() *cobra.Command {
	var gpu int
	var memory, kind string
	var remove bool
	var instance instanceFlag
	var p sim.Process
	cmd := needGPU(faultVerb(
		"process",
		" --gpu N --pid PID [--memory SIZE] [--type TYPE] [--instance GI[:CI]]",
		"Put a process on a GPU",
		`The driver lists the process, which must exist, with the memory that it uses, until it ends. A second call changes
its memory. With the accounting mode on, the process is also in the accounting buffer.`,
		0,
		func(n *sim.Node, _ []string) error {
			if remove {
				return n.RemoveProcess(gpu, p.PID)
			}
			bytes, err := sim.ParseMemory(memory)
			if err != nil {
				return usage("--memory: %w", err)
			}
			p.MemoryBytes, p.Type, p.Instance = bytes, sim.ProcessType(kind), instance.Instance
			return n.AddProcess(gpu, p)
		},
	), &gpu)
	cmd.Example = `  sleep 1000 & gpu-sim fault /tmp/node process --gpu 3 --pid $! --memory 2GiB
  gpu-sim fault /tmp/node process --gpu 0 --pid 4711 --instance 2:0 --type mps
  gpu-sim fault /tmp/node process --gpu 3 --pid 4711 --remove`
	cmd.Flags().IntVar(&p.PID, "pid", 0, "`number` of the process")
	cmd.Flags().StringVar(&memory, "memory", "512MiB", "`size` of the memory that it uses on the GPU")
	cmd.Flags().StringVar(&kind, "type", string(sim.ComputeProcess), "`type` of its use: compute, graphics or mps")
	cmd.Flags().Var(&instance, "instance", "MIG device that it uses: `GI[:CI]`")
	cmd.Flags().BoolVar(&remove, "remove", false, "remove it from the GPU")
	_ = cmd.MarkFlagRequired("pid")
	return cmd
}
