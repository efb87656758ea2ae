package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/cli"
)

// output is the options of a verb that prints a result.
type output struct {
	format    string
	noHeaders bool
}

// addFlags adds the options to a verb that has these formats; the first is the default.
func (o *output) addFlags(cmd *cobra.Command, formats ...string) {
	o.format = formats[0]
	f := cmd.Flags()
	f.VarP(&choice{&o.format, formats}, "output", "o", "output `format`: "+strings.Join(formats, ", "))
	if slices.Contains(formats, "table") {
		f.BoolVar(&o.noHeaders, "no-headers", false, "print tables without their first line")
	}
}

// view is the result of a verb in each of the verb's formats.
type view struct {
	data  any // for JSON and YAML, with json tags
	table table
	names []string
	text  string                // printed as it is in place of the table, such as a file
	draw  func(io.Writer) error // writes SVG or JUnit
}

// table is a header, rows of as many cells, and a text below them.
type table struct {
	header []string
	rows   [][]string
	wide   int // index of the first column that only the wide format has; 0: none
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
		for _, name := range v.names {
			_, e := fmt.Fprintln(w, name)
			err = cmp.Or(err, e)
		}
	case "svg", "junit":
		err = v.draw(w)
	default:
		if v.text != "" {
			_, err = io.WriteString(w, v.text)
		} else {
			err = v.table.write(w, o.format == "wide", o.noHeaders)
		}
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
		var line []string
		for _, cell := range row { // an error of several lines must not break the table
			lines := strings.FieldsFunc(cell, func(r rune) bool { return r == '\n' || r == '\r' })
			line = append(line, cli.Visible(strings.Join(lines, " ")))
		}
		// An empty cell at the end would become trailing blanks.
		if _, err := fmt.Fprintln(tw, strings.TrimRight(strings.Join(line, "\t"), "\t")); err != nil {
			return err
		}
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	if noHeaders {
		return nil
	}
	_, err := io.WriteString(w, cli.Visible(t.legend))
	return err
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// printYAML writes v with the keys and the order of its JSON.
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

// plainStyle removes the quotes and braces of JSON. The encoder still quotes strings that YAML would read as another
// type.
func plainStyle(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		plainStyle(c)
	}
}

// orDash is the cell of a value that may be empty.
func orDash(s string) string { return cmp.Or(s, "-") }

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// oneLine is the text of an error in one line, for a log.
func oneLine(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }

// plural is "1 GPU" or "3 GPUs".
func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
