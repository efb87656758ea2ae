package main

import (
	"flag"
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"gpu-cdi-plugin/test/lib/clitest"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"device-manager": main, "gpu-run": main, "fake-plugin": fakePlugin})
}

// Scripts that any machine can run.
func TestScripts(t *testing.T) { clitest.Scripts(t, "testdata/script", *update, nil) }

// Scripts with gpu-cdi-plugin serve on a simulated node.
func TestScriptsOnSimulatedNodes(t *testing.T) {
	testenv.Root(t)
	testenv.Command(t, "cc")
	clitest.Scripts(t, "testdata/node", *update, nil, "SAFE="+clitest.SafeDir(t),
		"PATH="+clitest.Programs(t, "gpu-sim", "gpu-cdi-plugin")+":"+os.Getenv("PATH"))
}

// The help of a verb is part of its interface: each change of it is a diff to review.
func TestHelpIsWhatItWas(t *testing.T) { clitest.Help(t, run, newApp().rootCommand(), *update) }
