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
	testscript.Main(m, map[string]func(){
		"gpu-cdi-plugin": main,
		// Specs need the path of a hook, and by default it is beside the running program.
		"prestart-hook": func() {},
	})
}

// insecure allows the files of tests, which are under /tmp, where every user can write.
const insecure = "GPU_CDI_INSECURE_PATHS=true"

// Scripts that any machine can run.
func TestScripts(t *testing.T) { runScripts(t, "testdata/script") }

// Scripts that need a driver, which is simulated.
func TestScriptsOnSimulatedNodes(t *testing.T) {
	testenv.Root(t)
	testenv.Command(t, "cc")
	testenv.Command(t, "setpriv")
	runScripts(t, "testdata/node", "SAFE="+clitest.SafeDir(t),
		"PATH="+clitest.Programs(t, "gpu-sim")+":"+os.Getenv("PATH"))
}

func runScripts(t *testing.T, dir string, env ...string) {
	t.Helper()
	clitest.Scripts(t, dir, *update, map[string]clitest.Command{"holders": serveHolders}, env...)
}

// The help of a verb is part of its interface: each change of it is a diff to review.
func TestHelpIsWhatItWas(t *testing.T) { clitest.Help(t, run, newApp().rootCommand(), *update) }
