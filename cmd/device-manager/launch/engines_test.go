package launch

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"gpu-cdi-plugin/test/lib/testenv"
)

// TestTablesAreThoseOfTheEngines compares the tables with the help texts of the engines. Hidden options are in none.
func TestTablesAreThoseOfTheEngines(t *testing.T) {
	t.Parallel()
	const peers = "../../../bin/peers/"
	for program, table := range map[string]*engine{
		"podman": engines["podman"], peers + "podman5": engines["podman"], peers + "docker": engines["docker"],
	} {
		for verb, table := range map[string]options{"": table.global, "run": table.run, "create": table.run} {
			t.Run(strings.TrimSpace(filepath.Base(program)+" "+verb), func(t *testing.T) {
				t.Parallel()
				if program == "podman" {
					testenv.Command(t, program)
				} else if _, err := os.Stat(program); err != nil {
					t.Skip("needs the program that make peers builds")
				}
				out, err := exec.CommandContext(t.Context(), program, strings.Fields(verb+" --help")...).Output()
				testenv.Must(t, err)
				checkTable(t, table, string(out))
			})
		}
	}
}

// helpLine matches a line of an option in a help text: its names, and the type of its value, which switches lack.
var helpLine = regexp.MustCompile(`(?m)^ +(?:-([a-zA-Z]), )? *--([a-z-]+)(?: ([^ ]+))?(?:   *|$)`)

func checkTable(t *testing.T, table options, help string) {
	t.Helper()
	matches := helpLine.FindAllStringSubmatch(help, -1)
	if len(matches) < 5 {
		t.Fatalf("the help text has %d options: %s", len(matches), help)
	}
	for _, m := range matches {
		for _, name := range slices.DeleteFunc(m[1:3], func(n string) bool { return n == "" }) {
			isSwitch := slices.Contains(table.switches, name)
			if isSwitch != (m[3] == "") {
				t.Errorf("%s: the table says that it is a switch: %v; the help: %s", name, isSwitch, m[0])
			}
			if table.values != nil && !isSwitch && !slices.Contains(table.values, name) {
				t.Errorf("%s is not in the table", name)
			}
		}
	}
}

// recorder is a pflag.Value that records an option.
type recorder struct {
	name string
	all  *[]option
}

func (r *recorder) Set(value string) error {
	*r.all = append(*r.all, option{r.name, value})
	return nil
}
func (*recorder) String() string { return "" }
func (*recorder) Type() string   { return "string" }

// FuzzRead compares the options of podman that are read before a subcommand with those that pflag reads, podman's own
// library.
func FuzzRead(f *testing.F) {
	for _, seed := range []string{
		"--root\n/x\n-r\nrun", "-rc\nx\nrun", "-c=x\nrun", "-cr=x", "-r=true\nx", "--root=\n-r\n--\nx", "-rr\n-\nx",
		"--log-level", "-c", "--root\n--root", "-c=", "-r=\nx", "-=", "--=", "---", "-rcx=y\nz",
	} {
		f.Add(seed)
	}
	table := engines["podman"].global
	f.Fuzz(func(t *testing.T, line string) {
		var want, got []option
		flags := pflag.NewFlagSet("podman", pflag.ContinueOnError)
		flags.SetInterspersed(false)
		define := func(name, ifAlone string) {
			long, short := name, ""
			if len(name) == 1 {
				long, short = "short-"+name, name
			}
			flags.VarPF(&recorder{name, &want}, long, short, "").NoOptDefVal = ifAlone
		}
		for _, name := range table.switches {
			define(name, "true")
		}
		for _, name := range table.values {
			define(name, "")
		}
		args := strings.Split(line, "\n")
		if strings.Contains(line, "--short-") || flags.Parse(args) != nil {
			t.Skip()
		}
		for len(args) > 0 && args[0] != "--" && isOption(args[0]) {
			found, width, err := table.read(args)
			if err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			got, args = append(got, found...), args[width:]
		}
		if len(args) > 0 && args[0] == "--" {
			args = args[1:]
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(option{})); diff != "" {
			t.Errorf("%q, -pflag +ours:\n%s", line, diff)
		}
		if !slices.Equal(flags.Args(), args) {
			t.Errorf("%q: %q is left, for pflag %q", line, args, flags.Args())
		}
	})
}

func FuzzFor(f *testing.F) {
	for _, seed := range []string{
		"podman\nrun\n--rm\nimage\n--gpus", "docker\n-Hx\ncontainer\ncreate\nimage", "nerdctl\n-n\nrun\nrun\n-it\nx",
		"apptainer\nexec\nx.sif", "podman\nrun\n{podman}\nx", "sudo\ndocker\nrun\n{docker}\n{uuids}", "sh\n-c\n${count}",
		"{cdi}", "a\n{cdi}{count}{{uuids}}", "docker\n--", "podman\n-", "runc\nrun", "\n", "podman\nrun\n--device",
		"singularity\ninstance\nrun\n-B", "docker\nrun\n-e", "docker\nrun\n--mount=src=/dev",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, line string) {
		args := strings.Split(line, "\n")
		given := slices.Clone(args)
		p, err := For(args, leasedGPUs)
		if !slices.Equal(args, given) {
			t.Fatalf("%q became %q", given, args)
		}
		if (err == nil) == (p.Args == nil) {
			t.Fatalf("%q and %v", p.Args, err)
		}
		if err != nil {
			return
		}
		checkPlan(t, args, p)
	})
}

// checkPlan checks that the plan's arguments are those of the user, except that placeholders have values and engines
// have their own options directly behind the subcommand.
func checkPlan(t *testing.T, args []string, p Plan) {
	t.Helper()
	own := strings.Fields(cdi)
	name := filepath.Base(args[0])
	e, inserts := engines[name]
	inserts = inserts && !e.bundles
	if inserts && e.placeholder == "" {
		own = []string{"--nv"}
	}
	inserts = inserts && !strings.Contains(line(args), "{cdi}") && !strings.Contains(line(args), "{uuids}") &&
		!slices.ContainsFunc(args[1:], isOwn)
	var want []string
	for i, arg := range args {
		switch {
		case i > 0 && isOwn(arg):
			want = append(want, strings.Fields(cdi)...)
		default:
			want = append(want, arg)
		}
	}
	at := slices.IndexFunc(p.Args, func(arg string) bool { return arg == own[0] })
	if inserts {
		verb := p.Args[max(at-1, 0)]
		if !slices.ContainsFunc(e.verbs, func(v string) bool { return strings.HasSuffix(v, verb) }) {
			t.Fatalf("%q: the options do not follow the subcommand: %q", args, p.Args)
		}
		if !slices.Equal(p.Args[at:at+len(own)], own) {
			t.Fatalf("%q: the options are not complete: %q", args, p.Args)
		}
		p.Args = slices.Delete(slices.Clone(p.Args), at, at+len(own))
	}
	if len(p.Args) != len(want) {
		t.Fatalf("%q has become %q", args, p.Args)
	}
	for i := range want {
		if want[i] != p.Args[i] && !strings.ContainsAny(want[i], "{") {
			t.Fatalf("%q has become %q", args, p.Args)
		}
	}
}

func line(args []string) string { return strings.Join(args[1:], "\n") }

func isOwn(arg string) bool { return arg == "{podman}" || arg == "{docker}" || arg == "{nerdctl}" }
