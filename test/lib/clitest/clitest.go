// Package clitest tests command lines with scripts, and compares their output with golden files.
package clitest

import (
	"bytes"
	"context"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"gpu-cdi-plugin/test/lib/testenv"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
)

// Run is a program's main without the process. It returns the exit status.
type Run func(ctx context.Context, args, env []string, stdin io.Reader, stdout, stderr io.Writer) int

// Result runs a program in this process.
func (r Run) Result(args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = r(context.Background(), args, nil, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

// Scripts runs the scripts of a directory, with more commands and environment variables. Programs may use paths that
// other users can change, since the tests' paths are under /tmp.
func Scripts(t *testing.T, dir string, update bool, more map[string]Command, env ...string) {
	t.Helper()
	cache, err := os.UserCacheDir()
	testenv.Must(t, err)
	known := commands(t)
	maps.Copy(known, more)
	const scriptTimeout = 5 * time.Minute
	testscript.Run(t, testscript.Params{
		Dir:                 dir,
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		UpdateScripts:       update,
		Cmds:                known,
		Deadline:            time.Now().Add(scriptTimeout), // a program that hangs fails its script
		Setup: func(e *testscript.Env) error {
			e.Setenv("XDG_CACHE_HOME", cache) // gpu-sim compiles the simulated library only once
			e.Vars = append(e.Vars, "GPU_CDI_INSECURE_PATHS=true", "DEVICE_MANAGER_INSECURE_PATHS=true",
				"DEVICE_MANAGER_CONFIG=", // this host may have one
				"GORACE="+os.Getenv("GORACE"))
			e.Vars = append(e.Vars, env...)
			return nil
		},
	})
}

// SafeDir returns a new directory in a directory that only root can write to, unlike /tmp.
func SafeDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/run", "gpu-cdi-test-") //nolint:usetesting // t.TempDir is under /tmp
	testenv.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// Programs builds other programs of the project for a test. It returns their directory, which every user can read.
func Programs(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} {
		testenv.Must(t, os.Chmod(d, 0o755))
	}
	for _, name := range names {
		cmd := exec.Command("go", "build", "-o", dir, "../"+name)
		if name != "gpu-cdi-plugin" {
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	return dir
}

// inSourceTree matches a file of the source tree and where else it is.
var inSourceTree = regexp.MustCompile(`\b(docs|specs)/[a-z.-]+[a-z](, in \S+)?`)

// wordsOfLibraries matches errors of cobra, pflag and Go's parsers.
var wordsOfLibraries = regexp.MustCompile(
	`flag needs|shorthand|invalid (argument|syntax|duration)|missing unit|strconv|time: `)

// Help tests each verb of a program, except hidden ones and cobra's completion: its help equals the golden file in
// testdata/help, lists the exit statuses and fits the width of a terminal, and it has an example. Where it names a
// guide or a schema, it says where the package has it. Errors of its flags are in our words.
func Help(t *testing.T, run Run, root *cobra.Command, update bool) {
	t.Helper()
	for _, cmd := range verbs(root) {
		path := strings.Fields(cmd.CommandPath())[1:]
		t.Run(cmd.CommandPath(), func(t *testing.T) {
			code, got, stderr := run.Result(append(path, "--help")...)
			if code != 0 || stderr != "" {
				t.Fatalf("exit %d, stderr %q", code, stderr)
			}
			if !strings.Contains(got, "\nExit Status:\n    0  done\n") {
				t.Errorf("the help has no exit statuses:\n%s", got)
			}
			for line := range strings.SplitSeq(got, "\n") {
				if len([]rune(line)) > 120 {
					t.Errorf("the help has a line of %d characters: %s", len([]rune(line)), line)
				}
			}
			if cmd.Name() != "help" && cmd.Example == "" {
				t.Error("it has no example")
			}
			for _, file := range inSourceTree.FindAllString(strings.Join(strings.Fields(got), " "), -1) {
				if !strings.HasSuffix(file, ", in /usr/share/doc/"+root.Name()) {
					t.Errorf("it does not say where packages have %s", file)
				}
			}
			if strings.HasPrefix(got, "\n") {
				t.Errorf("it does not say what it is for:\n%s", got)
			}
			flagErrors(t, run, path, cmd)
			Golden(t, filepath.Join("testdata", "help", strings.Join(append(path, "help"), "-")+".txt"), got, update)
		})
	}
}

// FlagErrors tests that wrong flags of each verb have errors in our words.
func FlagErrors(t *testing.T, run Run, root *cobra.Command) {
	t.Helper()
	for _, cmd := range verbs(root) {
		flagErrors(t, run, strings.Fields(cmd.CommandPath())[1:], cmd)
	}
}

func flagErrors(t *testing.T, run Run, path []string, cmd *cobra.Command) {
	t.Helper()
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		wrong := []string{"--" + f.Name + "=?", "--no-such-flag"} // nothing runs, whatever the flag takes
		if f.NoOptDefVal == "" {
			wrong = append(wrong, "--"+f.Name) // without its value
		}
		for i := range wrong {
			if _, _, stderr := run.Result(append(path, wrong[i:]...)...); wordsOfLibraries.MatchString(stderr) {
				t.Errorf("%q: %s", wrong[i:], stderr)
			}
		}
	})
}

// verbs returns a command and all commands below it.
func verbs(cmd *cobra.Command) []*cobra.Command {
	list := []*cobra.Command{cmd}
	for _, c := range cmd.Commands() {
		if c.Name() != "completion" && !c.Hidden {
			list = append(list, verbs(c)...)
		}
	}
	return list
}

// Golden compares a text with a golden file, or writes the file.
func Golden(t *testing.T, path, got string, update bool) {
	t.Helper()
	if update {
		testenv.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		testenv.Must(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	testenv.Must(t, err)
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; -update writes the file):\n%s", path, diff)
	}
}
