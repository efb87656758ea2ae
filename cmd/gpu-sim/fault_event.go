package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/sim"
)

// eventTypes has the types of events, by the names that --type accepts.
var eventTypes = map[string]sim.EventType{
	"ecc-single-bit": sim.EventSingleBitECC, "ecc-double-bit": sim.EventDoubleBitECC,
	"mig-change": sim.EventMIGChange, "unavailable": sim.EventUnavailable,
	"recovery-action": sim.EventRecoveryAction,
}

func xidCommand() *cobra.Command {
	var instance instanceFlag
	var count int
	cmd := faultVerb(
		"xid",
		" GPU CODE [--instance GI[:CI]] [--count N]",
		"Report an XID error",
		`Event sets in which the GPU is registered return the event at once; sets that are made later do not. The GPU itself
does not change: 'gpu-sim fault DIR set' changes what it reports, 'lost' makes it fall off the bus.`,
		2,
		func(n *sim.Node, args []string) error {
			gpu, err := parseIndex("GPU", args[0])
			if err != nil {
				return err
			}
			code, err := parseIndex("CODE", args[1])
			if err != nil {
				return err
			}
			if count < 1 {
				return usage("--count %d: want 1 or more", count)
			}
			event := sim.Event{GPU: gpu, Type: sim.EventXID, Data: uint64(code), Instance: instance.Instance}
			return n.Report(slices.Repeat([]sim.Event{event}, count)...)
		},
	)
	cmd.Example = `  gpu-sim fault /tmp/node xid 3 79
  gpu-sim fault /tmp/node xid 0 31 --instance 2:0   # of the MIG device in GPU instance 2, compute instance 0
  gpu-sim fault /tmp/node xid 1 45 --count 100`
	cmd.Flags().Var(&instance, "instance", "MIG device that the error is about: `GI[:CI]`")
	cmd.Flags().IntVar(&count, "count", 1, "`number` of events, at most 200")
	return cmd
}

func eventCommand() *cobra.Command {
	var gpu int
	var kind string
	var data uint64
	names := slices.Sorted(maps.Keys(eventTypes))
	cmd := needGPU(faultVerb(
		"event",
		" --gpu N --type TYPE [--data N]",
		"Report an event other than an XID",
		`Event sets in which the GPU is registered return the event at once. 'gpu-sim fault DIR set' reports the event of what
it changes by itself, so this is for events without a change.`,
		0,
		func(n *sim.Node, _ []string) error {
			t, ok := eventTypes[kind]
			if !ok {
				return usage("--type %q: want one of %s", kind, strings.Join(names, ", "))
			}
			return n.Report(sim.Event{GPU: gpu, Type: t, Data: data})
		},
	), &gpu)
	cmd.Example = `  gpu-sim fault /tmp/node event --gpu 3 --type unavailable
  gpu-sim fault /tmp/node event --gpu 3 --type recovery-action --data 1`
	cmd.Flags().StringVar(&kind, "type", "", "`type` of the event: "+strings.Join(names, ", "))
	cmd.Flags().Uint64Var(&data, "data", 0, "`value` that comes with the event")
	_ = cmd.MarkFlagRequired("type")
	_ = cmd.RegisterFlagCompletionFunc("type", cobra.FixedCompletions(names, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func usage(format string, args ...any) error {
	return cli.With(cli.Usage, "", fmt.Errorf(format, args...))
}

// parseIndex parses a number of at least 0. `name` is the name that the number has in the usage.
func parseIndex(name, text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 0 {
		return 0, usage("%s: want a whole number of 0 or more, got %q", name, text)
	}
	return n, nil
}

// instanceFlag is a flag for a MIG device, written as GI:CI, or for a GPU instance, written as GI.
type instanceFlag struct{ *sim.Instance }

func (f *instanceFlag) String() string {
	if f.Instance == nil {
		return ""
	}
	return f.Instance.String()
}

// Type returns the name of the flag's value in the help.
func (f *instanceFlag) Type() string { return "instance" }

// Set parses GI or GI:CI.
func (f *instanceFlag) Set(text string) error {
	gi, ci, both := strings.Cut(text, ":")
	instance := sim.Instance{Compute: -1}
	var err error
	if instance.GPU, err = parseIndex("GI", gi); err != nil {
		return err
	}
	if both {
		if instance.Compute, err = parseIndex("CI", ci); err != nil {
			return err
		}
	}
	f.Instance = &instance
	return nil
}
