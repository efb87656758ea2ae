package main

import (
	"bytes"
	"errors"
	"testing"

	"gpu-cdi-plugin/manager/model"
)

// What a plugin sends is one argument, or none.
func TestArgumentsForAShell(t *testing.T) {
	for name, c := range map[string]struct {
		value  string
		plain  string // empty: an error
		quoted string
	}{
		"a plain value":  {value: "1,2;$x", plain: "--env=A=1,2;$x\n", quoted: "'--env=A=1,2;$x'\n"},
		"another option": {value: "b -v /:/host --privileged", quoted: "'--env=A=b -v /:/host --privileged'\n"},
		"a pattern":      {value: "/*", quoted: "'--env=A=/*'\n"},
		"a line break":   {value: "a\nb", quoted: "'--env=A=a\nb'\n"},
	} {
		t.Run(name, func(t *testing.T) {
			run := model.RunOptions{Envs: map[string]string{"A": c.value}}
			for quote, want := range map[bool]string{false: c.plain, true: c.quoted} {
				var out bytes.Buffer
				a := newApp()
				a.Stdout = &out
				err := a.printArguments("podman", run, quote)
				if errors.Is(err, errNeedsQuotes) != (want == "") || out.String() != want {
					t.Errorf("quoted %t: printed %q, error %v, want %q", quote, out.String(), err, want)
				}
			}
		})
	}
}
