package cli

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

	"gpu-cdi-plugin/internal/wording"
)

// Output has the output options of a verb that prints a result.
type Output struct {
	Format    string
	NoHeaders bool
}

// AddFlags adds the output options to a verb with these formats. The first format is the default.
func (o *Output) AddFlags(cmd *cobra.Command, formats ...string) {
	o.Format = formats[0]
	f := cmd.Flags()
	f.VarP(&Choice{&o.Format, formats}, "output", "o", "output `format`: "+strings.Join(formats, ", "))
	if slices.Contains(formats, "table") {
		f.BoolVar(&o.NoHeaders, "no-headers", false, "print tables without their first line")
	}
}

// View is the result of a verb in each of the verb's formats.
type View struct {
	Data  any // for JSON and YAML, with json tags
	Table Table
	Names []string
	Text  string                // printed unchanged instead of the table, such as a file
	Draw  func(io.Writer) error // writes SVG or JUnit
}

// Table is a header, rows of as many cells, and a legend below them.
type Table struct {
	Header []string
	Rows   [][]string
	Wide   int // index of the first column that is only in the wide format; 0 if there is none
	Legend string
}

// Print prints a result in the format that the flags select.
func (o *Output) Print(w io.Writer, v View) error {
	var err error
	switch o.Format {
	case "json":
		err = printJSON(w, v.Data)
	case "yaml":
		err = printYAML(w, v.Data)
	case "name":
		err = printLines(w, v.Names)
	case "svg", "junit":
		err = v.Draw(w)
	default:
		if v.Text != "" {
			_, err = io.WriteString(w, v.Text)
		} else {
			err = v.Table.Write(w, o.Format == "wide", o.NoHeaders)
		}
	}
	if err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

func printLines(w io.Writer, lines []string) error {
	for _, line := range lines {
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	return nil
}

// Write prints the table as aligned columns, and its legend below them.
func (t *Table) Write(w io.Writer, wide, noHeaders bool) error {
	if len(t.Rows) == 0 && len(t.Header) > 0 && !noHeaders && t.Legend == "" {
		_, err := io.WriteString(w, "nothing to list\n") // a header without rows looks like a failure
		return err
	}
	tw := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	rows := t.Rows
	if !noHeaders && len(t.Header) > 0 {
		rows = slices.Insert(slices.Clone(rows), 0, t.Header)
	}
	for _, row := range rows {
		if t.Wide > 0 && !wide {
			row = row[:t.Wide]
		}
		var line []string
		for _, cell := range row { // an error of several lines must not break the table
			line = append(line, wording.Visible(strings.TrimSpace(wording.Unbroken(cell))))
		}
		// An empty last cell would become trailing blanks.
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
	_, err := io.WriteString(w, wording.Visible(t.Legend))
	return err
}

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// printYAML writes v as YAML, with the keys of its JSON in the same order.
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

// plainStyle removes the quotes and braces of JSON. The encoder still quotes strings that YAML would parse as another
// type.
func plainStyle(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		plainStyle(c)
	}
}

// OrDash returns a cell for a value that may be empty.
func OrDash(s string) string { return cmp.Or(s, "-") }

// YesNo returns "yes" or "no".
func YesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
