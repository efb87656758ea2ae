// Package cli has what the command lines of the programs share: exit statuses and hints for errors, help that lists
// the statuses, and error reports as text or JSON. It knows no particular verb.
package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpu-cdi-plugin/internal/wording"
)

// statusKey is the annotation with the exit statuses of a verb.
const statusKey = "exit"

// Statuses returns the annotation for a verb that lists these exit statuses in its help.
func Statuses(codes ...Code) map[string]string {
	var list []string
	for _, c := range codes {
		list = append(list, strconv.Itoa(int(c)))
	}
	return map[string]string{statusKey: strings.Join(list, " ")}
}

// helpWidth is the longest line of a help text.
const helpWidth = 120

// Help returns a help function that prints the long text of a verb, its usage, and its exit statuses with their
// meanings. The default statuses are OK, Failure and Usage.
func Help(meanings map[Code]string) func(*cobra.Command, []string) {
	return func(cmd *cobra.Command, _ []string) {
		usage := cmd.UsageString()
		for _, f := range []*pflag.FlagSet{cmd.LocalFlags(), cmd.InheritedFlags()} {
			plain, wrapped := strings.TrimSpace(f.FlagUsages()), strings.TrimSpace(f.FlagUsagesWrapped(helpWidth))
			usage = strings.Replace(usage, plain, wrapped, 1)
		}
		var b strings.Builder
		b.WriteString(strings.TrimSpace(cmd.Long) + "\n\n" + usage + "\nExit Status:\n")
		for s := range strings.FieldsSeq(cmp.Or(cmd.Annotations[statusKey], "0 1 2")) {
			n, _ := strconv.Atoi(s)
			fmt.Fprintf(&b, "  %3d  %s\n", n, meanings[Code(n)])
		}
		cmd.Print(b.String())
	}
}

// HelpCommand returns the verb `help`. Unlike cobra's, it returns an error for an unknown verb.
func HelpCommand() *cobra.Command {
	return &cobra.Command{
		Use:         "help [verb]",
		Short:       "Help about a verb",
		Long:        "Prints what a verb does, its flags and its exit statuses: the same as VERB --help.",
		Annotations: Statuses(OK, Usage),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			var names []string
			if topic, _, err := cmd.Root().Find(args); err == nil {
				for _, verb := range topic.Commands() {
					if verb.IsAvailableCommand() {
						names = append(names, cobra.CompletionWithDesc(verb.Name(), verb.Short))
					}
				}
			}
			return names, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			topic, rest, err := cmd.Root().Find(args)
			if err != nil {
				return With(Usage, UsageHint(cmd.Root()), err)
			}
			if err := UnknownVerb(topic, rest); err != nil {
				return With(Usage, UsageHint(cmd.Root()), err)
			}
			return topic.Help()
		},
	}
}

// UsageHint returns the hint for a usage error of a verb.
func UsageHint(cmd *cobra.Command) string { return "see " + cmd.CommandPath() + " --help" }

// AddVersion adds the flag --version, which prints the name and the version of the program. It keeps cobra's template:
// with another one the linker would keep every method of every type, which adds 3 MB to the program.
func AddVersion(root *cobra.Command, version string) {
	root.Version = version
	root.Flags().Bool("version", false, "print the version of this program")
}

// UnknownVerb is the argument check of a command that has only verbs. Its error suggests verbs with similar names, or
// lists all verbs.
func UnknownVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 || !cmd.HasSubCommands() {
		return nil
	}
	var names, below []string
	for _, c := range cmd.Commands() {
		if !c.IsAvailableCommand() {
			continue
		}
		names = append(names, c.Name())
		for _, sub := range c.Commands() {
			if wording.Near(args[0], []string{sub.Name()}) != nil {
				below = append(below, c.Name()+" "+sub.Name())
			}
		}
	}
	advice := wording.Question(args[0], names)
	switch {
	case advice != "":
	case len(below) > 0:
		advice = "; did you mean " + strings.Join(below, " or ") + "?"
	default:
		advice = "; there are " + strings.Join(names, ", ")
	}
	return fmt.Errorf("unknown verb %q of %s%s", args[0], cmd.CommandPath(), advice)
}

// FlagError improves the error of a flag: for an unknown flag it suggests similar names, and for a wrong value it says
// which values are allowed.
func FlagError(cmd *cobra.Command, err error) error {
	if e, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		name := e.GetFlag().Name
		switch e.GetFlag().Value.Type() { // pflag's own errors contain names of Go functions
		case "int", "uint64":
			return fmt.Errorf("--%s: want a whole number, got %q", name, e.GetValue())
		case "bool":
			return fmt.Errorf("--%s: want true or false, got %q", name, e.GetValue())
		}
		if strings.HasPrefix(e.Unwrap().Error(), "time: ") { // which says "missing unit in duration"
			return fmt.Errorf("--%s: want a time such as 30s, 10m or 2h, got %q", name, e.GetValue())
		}
		return fmt.Errorf("--%s: %w", name, e.Unwrap())
	}
	if e, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		return fmt.Errorf("--%s: want a value", e.GetFlag().Name)
	}
	if e, ok := errors.AsType[*pflag.NotExistError](err); ok {
		if e.GetSpecifiedShortnames() != "" {
			return fmt.Errorf("unknown flag: -%s", e.GetSpecifiedName())
		}
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				names = append(names, "--"+f.Name)
			}
		})
		return fmt.Errorf("%w%s", err, wording.Question("--"+e.GetSpecifiedName(), names))
	}
	return err
}

// Report prints an error with its hint, as text or as one line of JSON. Joined errors have a line each, without those
// that repeat the one before, as when each of several arguments fails for the same reason.
func Report(w io.Writer, err error, asJSON bool) {
	lines := slices.Compact(wording.Problems(wording.Limit(err)))
	report := struct {
		Error string `json:"error"`
		Code  Code   `json:"code"`
		Hint  string `json:"hint,omitempty"`
	}{strings.Join(lines, "\n"), CodeOf(err), wording.Unbroken(HintOf(err))}
	if asJSON {
		e := json.NewEncoder(w)
		e.SetEscapeHTML(false)
		_ = e.Encode(report) // an error on stderr cannot be reported
		return
	}
	fmt.Fprintf(w, "error: %s\n", strings.ReplaceAll(wording.Visible(report.Error), "\n", "\nerror: "))
	if report.Hint != "" {
		fmt.Fprintf(w, "hint: %s\n", wording.Visible(report.Hint))
	}
}
