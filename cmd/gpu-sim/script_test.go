package main

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"

	"gpu-cdi-plugin/test/lib/clitest"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "rewrite the expected output in the scripts")

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"gpu-sim": func() {
			os.Exit(run(context.Background(), os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr))
		},
	})
}

func TestEveryVerbHasAnExample(t *testing.T) {
	verbs := []*cobra.Command{(&app{}).rootCommand()}
	for len(verbs) > 0 {
		cmd := verbs[0]
		verbs = append(verbs[1:], cmd.Commands()...)
		if cmd.Example == "" {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
	}
}

func TestErrorsOfFlags(t *testing.T) { clitest.FlagErrors(t, run, (&app{}).rootCommand()) }

func TestScripts(t *testing.T) {
	testenv.Command(t, "cc")
	cache, err := os.UserCacheDir() // the library is compiled once, not once for each script
	testenv.Must(t, err)
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		UpdateScripts:       *update,
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("XDG_CACHE_HOME", cache)
			e.Setenv("GORACE", os.Getenv("GORACE"))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"status":    status,
			"unchanged": unchanged,
			"remember":  remember,
		},
	})
}

// status N gpu-sim ARGS... runs the command, whose exit status must be N.
func status(ts *testscript.TestScript, _ bool, args []string) {
	err := ts.Exec(args[1], args[2:]...)
	want, convErr := strconv.Atoi(args[0])
	ts.Check(convErr)
	got := 0
	if exitErr, ok := err.(interface{ ExitCode() int }); ok {
		got = exitErr.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit status %d, want %d", got, want)
	}
}

// remember DIR records the names in a directory, for unchanged.
func remember(ts *testscript.TestScript, _ bool, args []string) {
	ts.Setenv("REMEMBERED", listing(ts, args[0]))
}

// unchanged DIR fails if a directory has other names than remember recorded.
func unchanged(ts *testscript.TestScript, _ bool, args []string) {
	if got, want := listing(ts, args[0]), ts.Getenv("REMEMBERED"); got != want {
		ts.Fatalf("%s has %s, had %s", args[0], got, want)
	}
}

func listing(ts *testscript.TestScript, dir string) string {
	entries, err := os.ReadDir(ts.MkAbs(dir))
	ts.Check(err)
	var names string
	for _, e := range entries {
		names += filepath.Base(e.Name()) + " "
	}
	return names
}
