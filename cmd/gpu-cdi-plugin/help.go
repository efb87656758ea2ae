package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/exit"
)

// meanings are the exit statuses in the words of the help.
var meanings = map[exit.Code]string{
	exit.OK:          "done",
	exit.Failure:     "an error",
	exit.Usage:       "wrong use, or a wrong value in the environment or the configuration file",
	exit.Partial:     "partly done: some of the GPUs, or some of the files, are missing from the result",
	exit.Differs:     "the check found differences",
	exit.NoDriver:    "there is no NVIDIA driver, or it cannot be used",
	exit.NoGPU:       "there is a driver, but no GPU",
	exit.Locked:      "another instance is running",
	exit.Unreachable: "there is no kubelet, or it cannot be reached",
	exit.Interrupted: "interrupted",
}

func completeVerbs(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	topic, _, err := cmd.Root().Find(args)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, c := range topic.Commands() {
		if c.IsAvailableCommand() && strings.HasPrefix(c.Name(), prefix) {
			names = append(names, c.Name()+"\t"+c.Short)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// showHelp is what a command that only holds verbs does.
func showHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// noArgs is the argument check of a verb that takes none.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("%s takes no arguments, got %q", cmd.CommandPath(), args)
}
