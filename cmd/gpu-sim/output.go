package main

import (
	"encoding/json"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
)

// format is the value of the flag --output.
type format string

const (
	table     format = "table"
	asJSON    format = "json"
	names     format = "name"
	directory format = "directory" // only the path of the node
)

// addFlag adds the flag --output with these formats to a verb. The first format is the default.
func (f *format) addFlag(cmd *cobra.Command, formats ...format) {
	*f = formats[0]
	var known []string
	for _, value := range formats {
		known = append(known, string(value))
	}
	choice := &cli.Choice{Value: (*string)(f), Known: known}
	cmd.Flags().VarP(choice, "output", "o", "output `format`: "+strings.Join(known, ", "))
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
