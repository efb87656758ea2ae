package conformance

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/test/lib/testenv"
)

// timeout is that of the checks here. A check for what never comes takes as long.
const timeout = 3 * time.Second

// runFake checks a fake plugin in this process, or in one of its own.
func runFake(t *testing.T, b func(*fake), o Options) *Report {
	t.Helper()
	if o.KubeletDir == "" && len(o.Command) == 0 {
		dir, err := os.MkdirTemp("", "fake") //nolint:usetesting // t.TempDir may be too long for the path of a socket
		testenv.Must(t, err)
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		f := newFake(dir)
		b(f)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- f.run(ctx) }()
		t.Cleanup(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		<-f.ready
		o.KubeletDir = dir
	}
	if o.Timeout == 0 {
		o.Timeout = timeout
	}
	o.PreStart, o.Output = true, t.Output()
	report, err := Run(t.Context(), o)
	testenv.Must(t, err)
	return report
}

func (r *Report) broken() []string {
	var list []string
	for _, result := range r.Results {
		if result.Outcome == Fail {
			list = append(list, result.ID)
		}
	}
	return list
}

func (r *Report) result(id string) Result {
	i := slices.IndexFunc(r.Results, func(r Result) bool { return r.ID == id })
	return r.Results[i]
}

func fakeCommand(t *testing.T, name string, args ...string) []string {
	t.Helper()
	exe, err := os.Executable()
	testenv.Must(t, err)
	return append([]string{"/usr/bin/env", fakeVariable + "=" + name, exe}, args...)
}

// A rule that never fails is no rule: each has a plugin that breaks it, and no other.
func TestEachRuleIsBrokenByItsBreach(t *testing.T) {
	broken := map[string]bool{"list-flip": true} // TestAHealthThatDoesNotChangeIsReported
	for name, b := range breaches {
		broken[b.rule] = true
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var o Options
			if _, ok := endings[name]; ok {
				o.Command = fakeCommand(t, name, "{dir}")
			}
			if _, ok := introductions[name]; ok {
				o.Command = fakeCommand(t, name, "{registry}", "registry")
			}
			switch b.rule {
			case "list-size": // 110,000 devices, sometimes on a loaded machine
				o.Timeout = 20 * time.Second
			case "restart-later":
				o.Timeout = impatience
			}
			report := runFake(t, b.breach, o)
			want := append([]string{b.rule}, follows[name]...)
			if diff := cmp.Diff(inOrder(want), report.broken()); diff != "" {
				t.Errorf("broken rules (-want +got):\n%s", diff)
				for _, r := range report.Results {
					t.Logf("%s: %s: %s", r.ID, r.Outcome, r.Seen)
				}
			}
			if seen := report.result(b.rule).Seen; !strings.Contains(seen, b.seen) {
				t.Errorf("the report says %q, not %q", seen, b.seen)
			}
		})
	}
	for _, r := range rules {
		if !broken[r.ID] {
			t.Errorf("no plugin breaks %s", r.ID)
		}
	}
}

// What a plugin sends is quoted, but not at any length.
func TestLongTextsOfAPluginAreShortened(t *testing.T) {
	long := strings.Repeat("x", 100_000)
	broken := errors.New(long)
	for name, change := range map[string]func(*fake){
		"errors of the plugin": func(f *fake) {
			f.does.GetOptions = func(context.Context) error { return broken }
			f.does.Allocate = func(context.Context, []string) (*allocated, error) { return nil, broken }
			f.does.Preferred = func(context.Context, *wanted) ([]string, error) { return nil, broken }
			f.does.PreStart = func(context.Context, []string) error { return broken }
		},
		"answers": func(f *fake) {
			edits(f, func(r *allocated) {
				r.Envs[long+"="] = long
				r.Mounts[0].HostPath = long
				r.Devices = append(r.Devices,
					&v1beta1.DeviceSpec{HostPath: long, ContainerPath: long, Permissions: long},
					&v1beta1.DeviceSpec{HostPath: "/" + long, ContainerPath: "/" + long, Permissions: long})
				r.CdiDevices = append(r.CdiDevices, &v1beta1.CDIDevice{Name: long})
			})
		},
		"devices": func(f *fake) {
			for i := range f.devices {
				device(f, i, func(d *v1beta1.Device) { d.ID, d.Health = long+strconv.Itoa(i), long })
			}
		},
		"an endpoint, a resource and a version": func(f *fake) {
			f.request.Endpoint, f.request.ResourceName, f.request.Version = "./"+long+"/fake.sock", long, long
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			report := runFake(t, change, Options{})
			if report.Failed == 0 {
				t.Error("nothing is reported")
			}
			for _, r := range report.Results {
				if len(r.Seen) > 1000 {
					t.Errorf("%s: %s in %d bytes: %.100s...", r.ID, r.Outcome, len(r.Seen), r.Seen)
				}
			}
			if names := fmt.Sprint(report.Resources); len(names) > 1000 {
				t.Errorf("the names of resources have %d bytes", len(names))
			}
		})
	}
}

func inOrder(names []string) []string {
	var list []string
	for _, r := range rules {
		if slices.Contains(names, r.ID) {
			list = append(list, r.ID)
		}
	}
	return list
}

// The healthy fake keeps all rules, as a process too, also one that expects the kubelet in its usual directory, or that
// has a socket in the registry.
func TestAllRulesAreKept(t *testing.T) {
	for name, test := range map[string]struct {
		args    []string
		skipped int
	}{
		// There is no second list, no --flip, and no registry.
		"as a command": {[]string{"{dir}"}, 2 + 9},
		"as a command with the kubelet's usual directory": {nil, 2 + 9},
		// There are no calls of Register.
		"in the registry": {[]string{"{registry}", "registry"}, 2 + 11},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if test.args == nil {
				testenv.Root(t)
			}
			report := runFake(t, nil, Options{Command: fakeCommand(t, "", test.args...)})
			if report.Failed+report.Warned != 0 || report.Skipped != test.skipped {
				t.Errorf("broken: %q; %d skipped, want %d", report.broken(), report.Skipped, test.skipped)
			}
			if diff := cmp.Diff([]string{"example.com/gpu"}, report.Resources); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
		})
	}
}

// A plugin may serve anew for each start of the kubelet, and take a while: of two starts it registers for both, and its
// first list ends with its first server.
func TestAPluginMayServeAnewForEachKubelet(t *testing.T) {
	t.Parallel()
	report := runFake(t, func(f *fake) { f.renews = timeout / 10 }, Options{})
	if broken := report.broken(); len(broken) > 0 {
		t.Errorf("broken: %q: %s", broken, report.result(broken[0]).Seen)
	}
}

func TestRunRefuses(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, socketName))
	testenv.Must(t, err)
	defer l.Close()
	for name, tt := range map[string]struct {
		opts Options
		want error
	}{
		"nothing to check":              {Options{}, ErrOptions},
		"a socket and a command":        {Options{Socket: "x", Command: []string{"x"}}, ErrOptions},
		"a registry and a directory":    {Options{Command: []string{"x", "{dir}", "{registry}"}}, ErrOptions},
		"a directory of a kubelet":      {Options{KubeletDir: dir}, ErrInUse},
		"a socket that does not exist":  {Options{Socket: filepath.Join(dir, "none")}, fs.ErrNotExist},
		"a program that does not exist": {Options{Command: []string{"/none", "{dir}"}}, ErrNotStarted},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := Run(t.Context(), tt.opts); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
		})
	}
}

// A report is printed at a terminal, and the plugin chooses names and errors.
func TestAPluginCannotControlTheTerminal(t *testing.T) {
	t.Parallel()
	const escape = "\x1b]0;x\a\n"
	report := runFake(t, func(f *fake) {
		f.request.ResourceName = "example.com/" + escape
		f.does.PreStart = func(context.Context, []string) error { return errors.New(escape) }
		edits(f, func(r *allocated) { r.GetDevices()[0].HostPath = "/dev/" + escape })
	}, Options{})
	for _, r := range report.Results {
		if strings.ContainsFunc(r.Seen, unicode.IsControl) {
			t.Errorf("%s: %q", r.ID, r.Seen)
		}
	}
	for _, id := range []string{"register-name", "allocate-nodes-exist", "prestart-answered"} {
		if !slices.Contains(report.broken(), id) {
			t.Errorf("%s is not broken", id)
		}
	}
}

// docs/conformance.md has a row for each rule.
func TestDocsListTheRules(t *testing.T) {
	const path = "../../docs/conformance.md"
	const begin, end = "| Rule | | What it says | Why it matters | Source |\n|---|---|---|---|---|\n", "\n\n"
	data, err := os.ReadFile(path)
	testenv.Must(t, err)
	var rows strings.Builder
	for _, r := range rules {
		fmt.Fprintf(&rows, "| `%s` | %s | %s | %s | %s |\n", r.ID, r.Severity, r.Says, r.Why, r.Source)
	}
	before, rest, found := strings.Cut(string(data), begin)
	_, after, _ := strings.Cut(rest, end)
	if !found {
		t.Fatalf("%s has no table of rules", path)
	}
	want := before + begin + strings.TrimSuffix(rows.String(), "\n") + end + after
	if *update {
		testenv.Must(t, os.WriteFile(path, []byte(want), 0o644))
	} else if diff := cmp.Diff(want, string(data)); diff != "" {
		t.Errorf("%s (-want +got; -update writes the file):\n%s", path, diff)
	}
}

var update = flag.Bool("update", false, "write docs/conformance.md")

// A health that does change is in cmd/gpu-cdi-plugin's scripts.
func TestAHealthThatDoesNotChangeIsReported(t *testing.T) {
	t.Parallel()
	report := runFake(t, func(*fake) {}, Options{Flip: []string{"true"}})
	if diff := cmp.Diff([]string{"list-flip"}, report.broken()); diff != "" {
		t.Errorf("broken rules (-want +got):\n%s", diff)
	}
	if seen := report.result("list-flip").Seen; !strings.Contains(seen, "none within") {
		t.Errorf("the report says %q", seen)
	}
}
