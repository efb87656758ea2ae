package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// choice is a flag with a fixed set of values.
type choice struct {
	value *string
	known []string
}

var _ pflag.Value = (*choice)(nil)

func (c *choice) String() string { return *c.value }

// Type implements pflag.Value.
func (c *choice) Type() string { return "string" }

// Set returns an error with the known values if the value is unknown.
func (c *choice) Set(s string) error {
	if !slices.Contains(c.known, s) {
		return fmt.Errorf("unknown value %q; known are %s", s, strings.Join(c.known, ", "))
	}
	*c.value = s
	return nil
}

// completeChoices adds shell completion for the values of flags.
func completeChoices(cmd *cobra.Command, flags *pflag.FlagSet, names ...string) {
	for _, name := range names {
		if c, ok := flags.Lookup(name).Value.(*choice); ok {
			values := cobra.FixedCompletions(c.known, cobra.ShellCompDirectiveNoFileComp)
			_ = cmd.RegisterFlagCompletionFunc(name, values)
		}
	}
}

func completeDirs(cmd *cobra.Command, names ...string) {
	dirs := cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs)
	for _, name := range names {
		_ = cmd.RegisterFlagCompletionFunc(name, dirs)
	}
}
