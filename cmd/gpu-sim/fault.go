package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/sim"
)

// results has the values of nvmlReturn_t, by the names that --return accepts.
var results = map[string]int{
	"uninitialized": 1, "invalid-argument": 2, "not-supported": 3, "no-permission": 4, "not-found": 6,
	"insufficient-power": 8, "driver-not-loaded": 9, "timeout": 10, "irq-issue": 11, "library-not-found": 12,
	"function-not-found": 13, "corrupted-inforom": 14, "gpu-is-lost": 15, "reset-required": 16,
	"operating-system": 17, "lib-rm-version-mismatch": 18, "in-use": 19, "memory": 20, "no-data": 21,
	"gpu-not-found": 28, "unknown": 999,
}

func (a *app) faultCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "fault",
		Short: "Add or clear faults of a simulated node",
		Long: `Changes a simulated node while programs use it. They see the fault on their next call of the library, and a
wait for events ends at once. Faults last until they are cleared. A fault of the same kind for the same GPU or function
replaces an earlier one; events add up.`,
		Example: `  gpu-sim fault /tmp/node lost --gpu 3                             # it falls off the bus
  gpu-sim fault /tmp/node gone --gpu 3                             # it is no longer enumerated
  gpu-sim fault /tmp/node unplug --gpu 3                           # and plug: hot-plug
  gpu-sim fault /tmp/node unbind --gpu 3                           # and bind: the driver
  gpu-sim fault /tmp/node xid 3 79                                 # an XID error
  gpu-sim fault /tmp/node event --gpu 3 --type unavailable         # another event
  gpu-sim fault /tmp/node set --gpu 3 recovery-action=reset        # health and settings
  gpu-sim fault /tmp/node process --gpu 3 --pid 4711 --memory 2GiB
  gpu-sim fault /tmp/node reset --gpu 3 --result busy --tries 3    # how resets end
  gpu-sim fault /tmp/node mig --gpu 0 --profiles 3g.40gb,1g.10gb
  gpu-sim fault /tmp/node fail --function nvmlDeviceGetUUID --return unknown --gpu 2
  gpu-sim fault /tmp/node hang --function nvmlDeviceGetTemperature
  gpu-sim fault /tmp/node latency 50us
  gpu-sim fault /tmp/node kernel-version 575.57.08
  gpu-sim fault /tmp/node clear`,
		Args: faultKind,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.Annotations = cli.Statuses(cli.OK, cli.Failure, cli.Usage)
	cmd.Annotations["usage"] = "gpu-sim fault DIR KIND [flags]"
	cmd.AddCommand(lostCommand(), goneCommand(), failCommand(), hangCommand(), latencyCommand(), migCommand(),
		kernelVersionCommand(), xidCommand(), eventCommand(), setCommand(), processCommand(),
		resetCommand(), clearCommand())
	cmd.AddCommand(attachCommands()...)
	return cmd
}

// faultKind is the argument check of `fault` if no kind is given. A single argument is most likely the directory.
func faultKind(cmd *cobra.Command, args []string) error {
	if len(args) == 1 {
		var kinds []string
		for _, c := range cmd.Commands() {
			kinds = append(kinds, c.Name())
		}
		return fmt.Errorf("want gpu-sim fault DIR KIND; kinds are %s", strings.Join(kinds, ", "))
	}
	return cli.UnknownVerb(cmd, args)
}

// faultVerb returns the command for a kind of fault. `rest` is what follows the kind in the usage. The function `do`
// gets the node and the arguments after the directory.
func faultVerb(name, rest, short, long string, args int, do func(n *sim.Node, args []string) error) *cobra.Command {
	cmd := &cobra.Command{
		Use:               name + " DIR",
		Short:             short,
		Long:              long,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage),
		ValidArgsFunction: completeDirs,
		Args: func(_ *cobra.Command, got []string) error {
			if len(got) != 1+args {
				return fmt.Errorf("want gpu-sim fault DIR %s%s", name, rest)
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			n, err := sim.Open(args[0])
			if err != nil {
				return err
			}
			return do(n, args[1:])
		},
	}
	cmd.Annotations["usage"] = "gpu-sim fault DIR " + name + rest
	return cmd
}

// needGPU adds the required flag --gpu.
func needGPU(cmd *cobra.Command, gpu *int) *cobra.Command {
	cmd.Flags().IntVar(gpu, "gpu", 0, "`index` of the GPU when the node was made")
	_ = cmd.MarkFlagRequired("gpu")
	return cmd
}

func lostCommand() *cobra.Command {
	var gpu int
	cmd := needGPU(faultVerb("lost", " --gpu N", "Make a GPU fall off the bus",
		"The GPU is still counted, but every call on it returns NVML_ERROR_GPU_IS_LOST.", 0,
		func(n *sim.Node, _ []string) error { return n.Lose(gpu) }), &gpu)
	cmd.Example = "  gpu-sim fault /tmp/node lost --gpu 3"
	return cmd
}

func goneCommand() *cobra.Command {
	var gpu int
	cmd := needGPU(faultVerb("gone", " --gpu N", "Remove a GPU",
		"The GPU is no longer enumerated, and the indices of those after it change. Its files stay.", 0,
		func(n *sim.Node, _ []string) error { return n.Remove(gpu) }), &gpu)
	cmd.Example = "  gpu-sim fault /tmp/node gone --gpu 3"
	return cmd
}

func failCommand() *cobra.Command {
	var function, result string
	gpu := sim.AnyGPU
	cmd := faultVerb("fail", " --function NAME --return RESULT [--gpu N]", "Make a function of the library fail",
		"The function returns an nvmlReturn_t: a number, or one of\n"+wrapNames(resultNames())+".", 0,
		func(n *sim.Node, _ []string) error {
			value, err := parseResult(result)
			if err != nil {
				return err
			}
			return n.Fail(function, gpu, value)
		})
	cmd.Example = "  gpu-sim fault /tmp/node fail --function nvmlDeviceGetUUID --return unknown --gpu 2"
	cmd.Flags().StringVar(&result, "return", "unknown", "`result` of the function")
	_ = cmd.RegisterFlagCompletionFunc("return",
		cobra.FixedCompletions(resultNames(), cobra.ShellCompDirectiveNoFileComp))
	addCall(cmd, &function, &gpu)
	return cmd
}

func hangCommand() *cobra.Command {
	var function string
	gpu := sim.AnyGPU
	cmd := faultVerb("hang", " --function NAME [--gpu N]", "Make a function of the library block",
		"Calls of the function block until the fault is cleared.", 0,
		func(n *sim.Node, _ []string) error { return n.Hang(function, gpu) })
	cmd.Example = "  gpu-sim fault /tmp/node hang --function nvmlDeviceGetTemperature"
	addCall(cmd, &function, &gpu)
	return cmd
}

func addCall(cmd *cobra.Command, function *string, gpu *int) {
	cmd.Flags().StringVar(function, "function", "", "`name` of the function, such as nvmlDeviceGetUUID, or * for all")
	cmd.Flags().IntVar(gpu, "gpu", sim.AnyGPU, "`index` of the GPU whose calls are affected; -1 is any call")
	_ = cmd.MarkFlagRequired("function")
}

// wrapNames joins names with commas, in lines of at most six.
func wrapNames(names []string) string {
	var lines []string
	for line := range slices.Chunk(names, 6) {
		lines = append(lines, strings.Join(line, ", "))
	}
	return strings.Join(lines, ",\n")
}

func resultNames() []string { return slices.Sorted(maps.Keys(results)) }

func parseResult(s string) (int, error) {
	if n, ok := results[s]; ok {
		return n, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		return 0, cli.With(cli.Usage, "", fmt.Errorf("--return %q: want a number or one of %s",
			s, strings.Join(resultNames(), ", ")))
	}
	return n, nil
}

func latencyCommand() *cobra.Command {
	cmd := faultVerb("latency", " DURATION", "Make every call take longer",
		"Every call to the driver takes this long, such as 50us; 0 clears the fault.", 1,
		func(n *sim.Node, args []string) error {
			d, err := time.ParseDuration(args[0])
			if err != nil {
				return cli.With(cli.Usage, "", fmt.Errorf("want a time such as 50us, or 0, got %q", args[0]))
			}
			return n.SetLatency(d)
		})
	cmd.Example = "  gpu-sim fault /tmp/node latency 50us"
	return cmd
}

func migCommand() *cobra.Command {
	var profiles []string
	var gpu int
	var off bool
	cmd := needGPU(faultVerb("mig", " --gpu N (--profiles LIST | --off)", "Change the MIG devices of a GPU",
		`Turns MIG mode on and makes the instances of the profiles, in the library, /dev and /proc; an empty list makes
none. A profile is a GPU instance profile ("3g.40gb"), or a compute instance profile ("1c.3g.40gb", which share a
GPU instance while it has room), and may name the memory slice where the instance begins ("3g.40gb@4"). If the
profiles do not fit on the GPU together, nothing changes.`, 0,
		func(n *sim.Node, _ []string) error {
			if off {
				return n.DisableMIG(gpu)
			}
			return n.SetMIG(gpu, profiles)
		}), &gpu)
	cmd.Example = `  gpu-sim fault /tmp/node mig --gpu 0 --profiles 3g.40gb,1g.10gb
  gpu-sim fault /tmp/node mig --gpu 0 --off`
	cmd.Flags().StringSliceVar(&profiles, "profiles", nil, "comma-separated `names` of the profiles")
	cmd.Flags().BoolVar(&off, "off", false, "turn MIG mode off")
	cmd.MarkFlagsOneRequired("profiles", "off")
	cmd.MarkFlagsMutuallyExclusive("profiles", "off")
	return cmd
}

func kernelVersionCommand() *cobra.Command {
	cmd := faultVerb("kernel-version", " VERSION", "Change the version of the kernel module",
		"The library then reports that the versions do not match, like after an upgrade of the driver without a reboot.", 1,
		func(n *sim.Node, args []string) error { return n.SetKernelVersion(args[0]) })
	cmd.Example = "  gpu-sim fault /tmp/node kernel-version 575.57.08"
	return cmd
}

func clearCommand() *cobra.Command {
	gpu := sim.AnyGPU
	cmd := faultVerb("clear", " [--gpu N]", "Clear faults",
		"Clears all faults, or those of one GPU, and restores the MIG devices that the node was made with.", 0,
		func(n *sim.Node, _ []string) error {
			switch {
			case gpu == sim.AnyGPU:
				return n.Clear()
			case gpu < 0:
				return cli.With(cli.Usage, "", errors.New("--gpu: want an index of 0 or more, or -1"))
			}
			return n.ClearGPU(gpu)
		})
	cmd.Example = `  gpu-sim fault /tmp/node clear
  gpu-sim fault /tmp/node clear --gpu 3`
	cmd.Flags().IntVar(&gpu, "gpu", sim.AnyGPU, "`index` of the GPU whose faults are cleared; -1 is all")
	return cmd
}
