package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/sim"
)

// meanings are the exit statuses in the words of the help.
var meanings = map[exit.Code]string{
	exit.OK:          "done",
	exit.Failure:     "an error; nothing was made or changed",
	exit.Usage:       "wrong use: an unknown machine, a malformed machine file, a GPU or profile that is not there",
	exit.Interrupted: "interrupted",
}

// unknownVerb is the argument check of a command that only holds verbs.
func unknownVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("unknown verb %q of %s; there are %s", args[0], cmd.CommandPath(), verbNames(cmd))
}

func verbNames(cmd *cobra.Command) string {
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() && c.Name() != "completion" {
			names = append(names, c.Name())
		}
	}
	return strings.Join(names, ", ")
}

// noMore is the argument check of a verb that takes a directory and nothing else.
func noMore(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s wants one directory, got %q", cmd.CommandPath(), args)
	}
	return nil
}

// format is a flag for the form of what is printed.
type format string

func (f *format) String() string { return string(*f) }

// Type is what the help calls the flag's value.
func (f *format) Type() string { return "format" }

// Set refuses what is not known, and says what is.
func (f *format) Set(s string) error {
	if s != "table" && s != "json" {
		return fmt.Errorf("unknown value %q; known are table, json", s)
	}
	*f = format(s)
	return nil
}

func (f *format) addFlag(cmd *cobra.Command) {
	*f = "table"
	cmd.Flags().VarP(f, "output", "o", "output `format`: table, json")
	_ = cmd.RegisterFlagCompletionFunc("output",
		cobra.FixedCompletions([]string{"table", "json"}, cobra.ShellCompDirectiveNoFileComp))
}

func completeMachines(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return sim.Machines(), cobra.ShellCompDirectiveDefault
}

func completeDirs(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return nil, cobra.ShellCompDirectiveFilterDirs
}

func sortedKeys(m map[string]int) []string { return slices.Sorted(maps.Keys(m)) }
