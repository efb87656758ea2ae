package clitest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"gpu-cdi-plugin/sim"
)

// Command implements a command of scripts.
type Command = func(ts *testscript.TestScript, neg bool, args []string)

// commands are the commands of scripts besides testscript's own.
func commands(t *testing.T) map[string]Command {
	return map[string]Command{
		"exits":   runForStatus,
		"no-dev":  RunWithoutDev,
		"node":    func(ts *testscript.TestScript, _ bool, args []string) { createNode(t, ts, args) },
		"fault":   injectFault,
		"appears": awaitFile,
		"awaits":  awaitOutput,
		"silent":  checkSilent,
	}
}

// appears FILE waits for a file of that name.
func awaitFile(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: appears FILE")
	}
	await(ts, args[0], func() bool {
		_, err := os.Lstat(ts.MkAbs(args[0]))
		return err == nil
	})
}

// await waits until a condition holds, and ends the script if it never does.
func await(ts *testscript.TestScript, what string, holds func() bool) {
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			ts.Fatalf("never: %s", what)
		}
	}
}

// awaits [-count=N] PATTERN PROGRAM ARGS... runs a program repeatedly until its output has N lines that match; N is 1
// by default.
func awaitOutput(ts *testscript.TestScript, neg bool, args []string) {
	want := 1
	if len(args) > 0 {
		if count, ok := strings.CutPrefix(args[0], "-count="); ok {
			n, err := strconv.Atoi(count)
			ts.Check(err)
			want, args = n, args[1:]
		}
	}
	if neg || len(args) < 2 {
		ts.Fatalf("usage: awaits [-count=N] PATTERN PROGRAM ARGS...")
	}
	pattern, err := regexp.Compile("(?m)" + args[0])
	ts.Check(err)
	await(ts, fmt.Sprintf("%d matches of %s in the output", want, args[0]), func() bool {
		return ts.Exec(args[1], args[2:]...) == nil && len(pattern.FindAllString(ts.ReadFile("stdout"), -1)) == want
	})
}

// silent fails if the last program printed anything to stderr besides the warning of --insecure-paths.
func checkSilent(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) > 0 {
		ts.Fatalf("usage: silent")
	}
	for line := range strings.Lines(ts.ReadFile("stderr")) {
		if !strings.Contains(line, "--insecure-paths is given: ") {
			ts.Fatalf("unexpected on stderr: %s", line)
		}
	}
}

// exits CODE PROGRAM ARGS... runs a program that must end with that status. The commands stdout and stderr then check
// its output.
func runForStatus(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE PROGRAM ARGS...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	if exitErr, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exitErr.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit status %d, want %d", got, want)
	}
}

// RunWithoutDev implements this command of scripts, which needs root: [!] no-dev PROGRAM ARGS... runs a program with an
// empty /dev, so that the result does not depend on this machine's GPUs. Other paths are those of this machine.
func RunWithoutDev(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) == 0 {
		ts.Fatalf("usage: [!] no-dev PROGRAM ARGS...")
	}
	err := ts.Exec("unshare", append([]string{
		"--mount", "--propagation", "private", "sh", "-c", `mount -t tmpfs none /dev && exec "$@"`, "sh",
	}, args...)...)
	if failed := err != nil; failed != neg {
		ts.Fatalf("%s: %v", args[0], err)
	}
}

// node DIR MACHINE [DRIVER [EXTRA,...]] creates a simulated node. It replaces an existing one, like a new driver would.
func createNode(t *testing.T, ts *testscript.TestScript, args []string) {
	if len(args) < 2 || len(args) > 4 {
		ts.Fatalf("usage: node DIR MACHINE [DRIVER [EXTRA,...]]")
	}
	m, err := sim.LoadMachine(args[1])
	ts.Check(err)
	opts := sim.Options{Force: true}
	if len(args) > 2 {
		opts.Driver = args[2]
	}
	if len(args) > 3 {
		opts.Extras = strings.Split(args[3], ",")
	}
	_, err = sim.Create(t.Context(), ts.MkAbs(args[0]), m, opts)
	ts.Check(err)
}

// fault DIR lose GPU | remove GPU | fail FUNCTION | hang FUNCTION | kernel VERSION | mig GPU PROFILE,... | unload |
// clear
func injectFault(ts *testscript.TestScript, _ bool, args []string) {
	n, err := sim.Open(ts.MkAbs(args[0]))
	ts.Check(err)
	gpuArg := func() int {
		i, err := strconv.Atoi(args[2])
		ts.Check(err)
		return i
	}
	switch args[1] {
	case "lose":
		err = n.Lose(gpuArg())
	case "remove":
		err = n.Remove(gpuArg())
	case "hang":
		index := sim.AnyGPU
		if len(args) > 3 {
			index, err = strconv.Atoi(args[3])
			ts.Check(err)
		}
		err = n.Hang(args[2], index)
	case "fail":
		err = n.Fail(args[2], sim.AnyGPU, 999)
	case "kernel":
		err = n.SetKernelVersion(args[2])
	case "mig":
		err = n.SetMIG(gpuArg(), strings.Split(args[3], ","))
	case "unload":
		err = os.Remove(filepath.Join(n.Root(), "dev/nvidiactl"))
	case "clear":
		err = n.Clear()
	default:
		ts.Fatalf("unknown fault %q", args[1])
	}
	ts.Check(err)
}
