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

// The forms. Only create can print nothing but the node's directory.
const (
	table     format = "table"
	asJSON    format = "json"
	names     format = "name"
	directory format = "directory"
)

// formatFlag is a format and the values that a verb takes.
type formatFlag struct {
	*format
	known []string
}

func (f formatFlag) String() string {
	if f.format == nil { // pflag asks a zero value when it looks for defaults
		return ""
	}
	return string(*f.format)
}

// Type is what the help calls the flag's value.
func (f formatFlag) Type() string { return "format" }

// Set refuses what is not known, and says what is.
func (f formatFlag) Set(s string) error {
	if !slices.Contains(f.known, s) {
		return fmt.Errorf("unknown value %q; known are %s", s, strings.Join(f.known, ", "))
	}
	*f.format = format(s)
	return nil
}

// addFlag adds the flag to a verb, for the forms that it has; the first one is the default.
func (f *format) addFlag(cmd *cobra.Command, forms ...format) {
	*f = forms[0]
	var known []string
	for _, form := range forms {
		known = append(known, string(form))
	}
	cmd.Flags().VarP(formatFlag{f, known}, "output", "o", "output `format`: "+strings.Join(known, ", "))
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(known, cobra.ShellCompDirectiveNoFileComp))
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
