package main

import (
	"bytes"
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"

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

// Scripts that any machine can run.
func TestScripts(t *testing.T) { runScripts(t, "testdata/script") }

// Scripts that need a driver, which is simulated.
func TestScriptsOnSimulatedNodes(t *testing.T) {
	testenv.Root(t)
	testenv.Command(t, "cc")
	testenv.Command(t, "setpriv")
	runScripts(t, "testdata/node", "SAFE="+safeDir(t), "PATH="+programs(t, "gpu-sim")+":"+os.Getenv("PATH"))
}

// insecure allows the files of tests, which are under /tmp, where every user can write.
const insecure = "GPU_CDI_INSECURE_PATHS=true"

// safeDir is a new directory in one that only root can write to, which /tmp is not.
func safeDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/run", "gpu-cdi-test-") //nolint:usetesting // t.TempDir is under /tmp
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// programs builds other programs of the project and returns their directory, which every user can read.
func programs(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range names {
		cmd := exec.Command("go", "build", "-o", dir, "../"+name)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	return dir
}

func runScripts(t *testing.T, dir string, vars ...string) {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	const scriptTimeout = 5 * time.Minute
	testscript.Run(t, testscript.Params{
		Dir:                 dir,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       *update,
		Cmds:                scriptCommands(t),
		Deadline:            time.Now().Add(scriptTimeout), // a program that hangs fails its script
		Setup: func(env *testscript.Env) error {
			env.Setenv("XDG_CACHE_HOME", cache) // gpu-sim compiles the simulated library only once
			env.Vars = append(env.Vars, insecure, "GORACE="+os.Getenv("GORACE"))
			env.Vars = append(env.Vars, vars...)
			return nil
		},
	})
}

// result runs the program in this process.
func result(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(context.Background(), args, nil, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

// The help of a verb is part of its interface: each change of it is a diff to review.
func TestHelpIsWhatItWas(t *testing.T) {
	walk(newApp().rootCommand(), func(cmd *cobra.Command) {
		path := strings.Fields(cmd.CommandPath())[1:]
		t.Run(cmd.CommandPath(), func(t *testing.T) {
			code, got, stderr := result(t, append(path, "--help")...)
			if code != 0 || stderr != "" {
				t.Fatalf("exit %d, stderr %q", code, stderr)
			}
			if !strings.Contains(got, "\nExit Status:\n    0  done\n") {
				t.Errorf("the help has no exit statuses:\n%s", got)
			}
			for line := range strings.SplitSeq(got, "\n") {
				if len([]rune(line)) > 120 {
					t.Errorf("the help has a line of %d characters: %s", len(line), line)
				}
			}
			golden(t, filepath.Join("testdata", "help", strings.Join(append(path, "help"), "-")+".txt"), got)
		})
	})
}

func TestEveryVerbHasExamples(t *testing.T) {
	walk(newApp().rootCommand(), func(cmd *cobra.Command) {
		if !cmd.HasSubCommands() && cmd.Name() != "help" && cmd.Example == "" {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
	})
}

// walk does something for each of our verbs; completion is cobra's.
func walk(cmd *cobra.Command, do func(*cobra.Command)) {
	do(cmd)
	for _, c := range cmd.Commands() {
		if c.Name() != "completion" {
			walk(c, do)
		}
	}
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; -update writes the file):\n%s", path, diff)
	}
}
