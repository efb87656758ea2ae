package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/exit"
)

// failure is an error in JSON mode.
type failure struct {
	Error string    `json:"error"`
	Code  exit.Code `json:"code"`
	Hint  string    `json:"hint,omitempty"`
}

// report prints an error to stderr, with its hint.
func (a *app) report(err error, asJSON bool) {
	f := failure{Error: err.Error(), Code: exit.CodeOf(err), Hint: exit.HintOf(err)}
	if asJSON {
		e := json.NewEncoder(a.stderr)
		e.SetEscapeHTML(false)
		_ = e.Encode(f) // there is nobody left to tell
		return
	}
	fmt.Fprintf(a.stderr, "error: %s\n", strings.ReplaceAll(f.Error, "\n", "\nerror: "))
	if f.Hint != "" {
		fmt.Fprintf(a.stderr, "hint: %s\n", f.Hint)
	}
}

// wantsJSON tells whether JSON was asked for. Where the flags could not be read, the arguments are looked at as they
// are: a program that asked for JSON wants to read the error too.
func wantsJSON(cmd *cobra.Command, args []string) bool {
	if f := cmd.Flags().Lookup("output"); f != nil && f.Changed {
		return f.Value.String() == "json"
	}
	for i, arg := range args {
		switch arg {
		case "-ojson", "-o=json", "--output=json":
			return true
		case "-o", "--output":
			return slices.Equal(args[i+1:min(i+2, len(args))], []string{"json"})
		}
	}
	return false
}
