package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"gpu-cdi-plugin/hook/check"
	"gpu-cdi-plugin/internal/wording"
)

// statusDiffers means that the container does not have what it was given or needs.
const statusDiffers = 4

// isCheck reports whether these arguments, without the program's name, run the check in a container.
func isCheck(args []string) bool { return len(args) > 0 && args[0] == "check" }

// runCheck checks the container in which this process runs.
func runCheck(args []string, root string, stdout, stderr io.Writer) int {
	format, err := checkFormat(args[1:])
	if err != nil {
		fmt.Fprintf(stderr, "prestart-hook: check: %v; see \"prestart-hook --help\"\n", err)
		return statusUsage
	}
	r, err := check.Read(root)
	if err == nil {
		err = printReport(stdout, r, format)
	}
	switch {
	case err != nil:
		fmt.Fprintf(stderr, "prestart-hook: check: %s\n", visible(err.Error()))
		return statusFailure
	case len(r.Problems) > 0:
		return statusDiffers
	}
	return statusOK
}

// checkFormat returns the output format that the options of check select.
func checkFormat(args []string) (string, error) {
	format := "table"
	switch {
	case len(args) == 2 && slices.Contains([]string{"-o", "--output"}, args[0]):
		format = args[1]
	case len(args) == 1 && strings.HasPrefix(args[0], "--output="):
		format = strings.TrimPrefix(args[0], "--output=")
	case len(args) > 0:
		return "", fmt.Errorf("unknown arguments %q", args)
	}
	if format != "table" && format != "json" {
		return "", errors.New("the output format is table or json")
	}
	return format, nil
}

func printReport(w io.Writer, r *check.Report, format string) error {
	if format == "json" {
		e := json.NewEncoder(w)
		e.SetEscapeHTML(false)
		e.SetIndent("", "  ")
		return e.Encode(r)
	}
	t := tabwriter.NewWriter(w, 0, 8, 3, ' ', 0)
	fmt.Fprintln(t, "WHAT\tRESULT")
	for _, n := range r.Nodes {
		result := "can be opened"
		if n.Error != "" {
			result = n.Error
		}
		fmt.Fprintf(t, "%s\t%s\n", visible(n.Path), visible(result))
	}
	for _, l := range r.Libraries {
		result := l.Found
		if result == "" {
			result = "not found by the loader"
		}
		fmt.Fprintf(t, "%s\t%s\n", visible(l.Name), visible(result))
	}
	if r.Driver != "" {
		fmt.Fprintf(t, "driver of the kernel\t%s\n", visible(r.Driver))
	}
	if r.CUDA != "" {
		fmt.Fprintf(t, "driver of libcuda\t%s\n", visible(r.CUDA))
	}
	for _, d := range r.Devices {
		fmt.Fprintf(t, "given\t%s\n", visible(d.UUID))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, p := range r.Problems {
		_, err := fmt.Fprintf(w, "\n%s: %s\n  mend: %s\n", visible(p.Subject), visible(p.Problem), visible(p.Fix))
		if err != nil {
			return err
		}
	}
	return nil
}

// visible makes a text one line without control characters: the names come from an image.
func visible(text string) string { return wording.Visible(strings.ReplaceAll(text, "\n", `\n`)) }
