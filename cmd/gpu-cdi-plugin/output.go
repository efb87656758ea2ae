package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/exit"
)

// output are the options of a verb that prints things.
type output struct {
	format    string
	noHeaders bool
}

// addFlags adds the options, for the formats that the verb has; the first one is the default.
func (o *output) addFlags(cmd *cobra.Command, formats ...string) {
	o.format = formats[0]
	f := cmd.Flags()
	f.VarP(&choice{&o.format, formats}, "output", "o", "output `format`: "+strings.Join(formats, ", "))
	completeChoices(cmd, f, "output")
	if formats[0] == "table" {
		f.BoolVar(&o.noHeaders, "no-headers", false, "print tables without their first line")
	}
}

// view is what a verb has to show, in each of the forms that it has.
type view struct {
	data  any // for JSON and YAML, with json tags
	table table
	names []string
	draw  func(io.Writer) error
}

// table has cells in columns. The columns from wide on are shown only in the wide format; 0 means that there are none.
type table struct {
	header []string
	rows   [][]string
	wide   int
	legend string
}

func (o *output) print(w io.Writer, v view) error {
	var err error
	switch o.format {
	case "json":
		err = printJSON(w, v.data)
	case "yaml":
		err = printYAML(w, v.data)
	case "name":
		_, err = io.WriteString(w, lines(v.names))
	case "svg":
		err = v.draw(w)
	default:
		err = v.table.write(w, o.format == "wide", o.noHeaders)
	}
	if err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

func (t *table) write(w io.Writer, wide, noHeaders bool) error {
	tw := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	rows := t.rows
	if !noHeaders && len(t.header) > 0 {
		rows = slices.Insert(slices.Clone(rows), 0, t.header)
	}
	for _, row := range rows {
		if t.wide > 0 && !wide {
			row = row[:t.wide]
		}
		for len(row) > 0 && row[len(row)-1] == "" { // the last cell has no tab behind it: no line ends in blanks
			row = row[:len(row)-1]
		}
		if _, err := fmt.Fprintln(tw, strings.Join(cells(row), "\t")); err != nil {
			return err
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if noHeaders {
		return nil
	}
	_, err := io.WriteString(w, t.legend)
	return err
}

// cells keeps a row in its line: an error of several lines, or a file's name, would break the table.
func cells(row []string) []string {
	row = slices.Clone(row)
	for i, cell := range row {
		row[i] = strings.Join(strings.FieldsFunc(cell, unicode.IsControl), " ")
	}
	return row
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// printYAML writes v with the names and the order that it has in JSON.
func printYAML(w io.Writer, v any) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return err
	}
	plainStyle(&doc)
	var b bytes.Buffer
	e := yaml.NewEncoder(&b)
	e.SetIndent(2)
	if err := e.Encode(&doc); err != nil {
		return err
	}
	_, err = w.Write(b.Bytes())
	return err
}

// plainStyle undoes JSON's quotes and braces. Strings that would read as something else keep their quotes.
func plainStyle(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		plainStyle(c)
	}
}

func lines(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return strings.Join(list, "\n") + "\n"
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// orDash is a table's cell for a value that may be empty.
func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// inLine is an error in one line, for a log.
func inLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// plural is "1 GPU" or "3 GPUs".
func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// partly is the error of a verb that did a part of its work.
func partly(hint, format string, args ...any) error {
	return exit.With(exit.Partial, hint, fmt.Errorf(format, args...))
}
