package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// format is the value of the flag --output.
type format string

const (
	table     format = "table"
	asJSON    format = "json"
	names     format = "name"
	directory format = "directory" // the path of the node alone
)

// formatFlag is a format and the values that a verb accepts.
type formatFlag struct {
	*format
	known []string
}

func (f formatFlag) String() string {
	if f.format == nil { // pflag calls it on a zero value
		return ""
	}
	return string(*f.format)
}

// Type is the name of the flag's value in the help.
func (f formatFlag) Type() string { return "format" }

// Set accepts the known values.
func (f formatFlag) Set(s string) error {
	if !slices.Contains(f.known, s) {
		return fmt.Errorf("unknown value %q; known are %s", s, strings.Join(f.known, ", "))
	}
	*f.format = format(s)
	return nil
}

// addFlag adds the flag --output to a verb, with the formats that it has; the first one is the default.
func (f *format) addFlag(cmd *cobra.Command, formats ...format) {
	*f = formats[0]
	var known []string
	for _, value := range formats {
		known = append(known, string(value))
	}
	cmd.Flags().VarP(formatFlag{f, known}, "output", "o", "output `format`: "+strings.Join(known, ", "))
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(known, cobra.ShellCompDirectiveNoFileComp))
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func printTable(w io.Writer, rows func(io.Writer)) error {
	tw := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	rows(tw)
	return tw.Flush()
}
