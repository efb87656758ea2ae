package main

import (
	"fmt"
	"strconv"
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

// statuses keeps the exit statuses of a verb with the verb, for its help.
func statuses(codes ...exit.Code) map[string]string {
	var list []string
	for _, c := range codes {
		list = append(list, strconv.Itoa(int(c)))
	}
	return map[string]string{"exit": strings.Join(list, " ")}
}

// help prints what a verb does, its flags and its exit statuses.
func help(cmd *cobra.Command, _ []string) {
	var b strings.Builder
	b.WriteString(strings.TrimSpace(cmd.Long) + "\n\n" + cmd.UsageString())
	if list := strings.Fields(cmd.Annotations["exit"]); len(list) > 0 {
		b.WriteString("\nExit Status:\n")
		for _, s := range list {
			n, _ := strconv.Atoi(s)
			fmt.Fprintf(&b, "  %3d  %s\n", n, meanings[exit.Code(n)])
		}
	}
	cmd.Print(b.String())
}

func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:               "help [verb]",
		Short:             "Help about a verb",
		Long:              "Prints what a verb does, its flags and its exit statuses: the same as VERB --help.",
		Annotations:       statuses(exit.OK, exit.Usage),
		DisableAutoGenTag: true,
		ValidArgsFunction: completeVerbs,
		RunE: func(cmd *cobra.Command, args []string) error {
			topic, rest, err := cmd.Root().Find(args)
			if err == nil {
				err = unknownVerb(topic, rest)
			}
			if err != nil {
				return exit.With(exit.Usage, usageHint(cmd.Root()), err)
			}
			return topic.Help()
		},
	}
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

// unknownVerb is the argument check of a command that only holds verbs.
func unknownVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 || !cmd.HasSubCommands() {
		return nil
	}
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		return fmt.Errorf("unknown verb %q of %s; did you mean %s?", args[0], cmd.CommandPath(), strings.Join(near, " or "))
	}
	return fmt.Errorf("unknown verb %q of %s", args[0], cmd.CommandPath())
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
