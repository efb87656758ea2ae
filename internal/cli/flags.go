package cli

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Choice is a flag with a fixed set of values.
type Choice struct {
	Value *string
	Known []string
}

var _ pflag.Value = (*Choice)(nil)

// String implements pflag.Value.
func (c *Choice) String() string { return *c.Value }

// Type implements pflag.Value.
func (c *Choice) Type() string { return "string" }

// Values returns the accepted values.
func (c *Choice) Values() []string { return c.Known }

// Set sets the value. For an unknown value it returns an error with the known ones.
func (c *Choice) Set(s string) error {
	if !slices.Contains(c.Known, s) {
		return fmt.Errorf("unknown value %q; known are %s", s, strings.Join(c.Known, ", "))
	}
	*c.Value = s
	return nil
}

// CompleteFiles returns a completion of file names with these extensions.
func CompleteFiles(extensions ...string) cobra.CompletionFunc {
	return cobra.FixedCompletions(extensions, cobra.ShellCompDirectiveFilterFileExt)
}

// CompleteFile returns a completion of one file name.
func CompleteFile(extensions ...string) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return CompleteFiles(extensions...)(cmd, args, prefix)
	}
}

// complete makes cmd and the verbs below it refuse arguments and complete no file names, unless they have their own
// rules.
func complete(cmd *cobra.Command) {
	if cmd.Args == nil {
		cmd.Args = noArgs
	}
	if cmd.ValidArgsFunction == nil {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	for _, verb := range cmd.Commands() {
		complete(verb)
	}
}

// completeFlags gives cmd and the verbs below it shell completion for flags with a fixed set of values and for flags
// whose usage calls the value a directory.
func completeFlags(cmd *cobra.Command) {
	completeFlag := func(f *pflag.Flag) {
		word, _ := pflag.UnquoteUsage(f)
		v, ok := f.Value.(interface{ Values() []string })
		// If several verbs share a flag, it has a completion already; that error is harmless.
		switch {
		case ok && len(v.Values()) > 0:
			values := cobra.FixedCompletions(v.Values(), cobra.ShellCompDirectiveNoFileComp)
			_ = cmd.RegisterFlagCompletionFunc(f.Name, values)
		case word == "directory":
			_ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(nil, cobra.ShellCompDirectiveFilterDirs))
		}
	}
	cmd.PersistentFlags().VisitAll(completeFlag)
	cmd.Flags().VisitAll(completeFlag)
	for _, verb := range cmd.Commands() {
		completeFlags(verb)
	}
}

// Annotations of cobra at flags, and what they say.
const (
	required     = cobra.BashCompOneRequiredFlag         // "true"
	oneRequired  = "cobra_annotation_one_required"       // the names of flags, of which one is required
	onlyOneAtAll = "cobra_annotation_mutually_exclusive" // the names of flags, of which only one can be used
)

// CheckFlags returns an error for flags that are missing, and for those that cannot be used together. Cobra's own
// errors for that are not for users.
func CheckFlags(cmd *cobra.Command) error {
	var missing []string
	groups := map[[2]string]bool{}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if slices.Equal(f.Annotations[required], []string{"true"}) && !f.Changed {
			missing = append(missing, "--"+f.Name)
		}
		for _, kind := range []string{oneRequired, onlyOneAtAll} {
			for _, names := range f.Annotations[kind] {
				groups[[2]string{kind, names}] = true
			}
		}
	})
	if len(missing) > 0 {
		return fmt.Errorf("%s: want %s", cmd.CommandPath(), strings.Join(missing, " and "))
	}
	for group := range groups {
		var all, set []string
		for name := range strings.FieldsSeq(group[1]) {
			all = append(all, "--"+name)
			if cmd.Flags().Changed(name) {
				set = append(set, "--"+name)
			}
		}
		switch {
		case group[0] == oneRequired && len(set) == 0:
			return fmt.Errorf("%s: want %s", cmd.CommandPath(), strings.Join(all, " or "))
		case group[0] == onlyOneAtAll && len(set) > 1:
			return fmt.Errorf("%s: %s cannot be used together", cmd.CommandPath(), strings.Join(set, " and "))
		}
	}
	return nil
}

// Arguments returns the argument check of a verb that takes `least` to `most` arguments, which `what` names.
func Arguments(what string, least, most int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case least <= len(args) && len(args) <= most:
			return nil
		case len(args) == 0:
			return fmt.Errorf("%s: want %s", cmd.CommandPath(), what)
		}
		return fmt.Errorf("%s: want %s, got %q", cmd.CommandPath(), what, args)
	}
}

// noArgs is the argument check of a verb without arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("%s takes no arguments, got %q", cmd.CommandPath(), args)
}
