package inject

import (
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestParseCommand(t *testing.T) {
	for line, want := range map[string]Command{
		"":                     {Bundle: "."},
		"--version":            {Bundle: "."},
		"state x":              {Verb: "state", Bundle: "."},
		"create x":             {Verb: "create", Bundle: "."},
		"create --bundle /b x": {Verb: "create", Bundle: "/b"},
		"create --bundle=/b x": {Verb: "create", Bundle: "/b"},
		"create -bundle /b x":  {Verb: "create", Bundle: "/b"},
		"create -bundle=/b x":  {Verb: "create", Bundle: "/b"},
		"create -b /b x":       {Verb: "create", Bundle: "/b"},
		"create -b=/b x":       {Verb: "create", Bundle: "/b"},
		"create -b/b x":        {Verb: "create", Bundle: "/b"},
		"create --bun /b x":    {Verb: "create", Bundle: "/b"},
		"create x --bundle /b": {Verb: "create", Bundle: "/b"},
		"create -b /a x -b /b": {Verb: "create", Bundle: "/b"},
		"create -- --bundle":   {Verb: "create", Bundle: ".", ID: "--bundle"},
		"create x -- --bundle": {Verb: "create", Bundle: "."},
		"create -b":            {Verb: "create", Bundle: "."},
		"create --config=config.json -f config.json -b /b x": {Verb: "create", Bundle: "/b"},
		"run -d --keep --no-pivot -b /b x":                   {Verb: "run", Bundle: "/b"},
		"run --new -b /b x":                                  {Verb: "run", Bundle: "/b"},
		"run --new=value -b /b x":                            {Verb: "run", Bundle: "/b"},
		"run --help":                                         {Verb: "help", Bundle: "."},
		"--root create run -b /b x":                          {Verb: "run", Bundle: "/b"},
		"--new=value run -b /b x":                            {Verb: "run", Bundle: "/b"},
		// What follows another verb is the container's.
		"exec x create --bundle /b": {Verb: "exec", Bundle: "."},
		"delete --config f x":       {Verb: "delete", Bundle: "."},
		// containerd's shim, and conmon for podman.
		"--root /run/containerd/runc/k8s.io --log /b/log.json --log-format json --systemd-cgroup create " +
			"--bundle /b --pid-file /b/init.pid --console-socket /tmp/pty.sock x": {
			Verb: "create", Bundle: "/b", Log: "/b/log.json", LogFormat: "json",
		},
		"--cgroup-manager=cgroupfs --debug --log=/b/oci-log --log-format=json create --preserve-fds 2 --bundle /b " +
			"--pid-file /b/pidfile x": {Verb: "create", Bundle: "/b", Log: "/b/oci-log", LogFormat: "json"},
	} {
		t.Run(line, func(t *testing.T) {
			if args := strings.Fields(line); want.Creates() && slices.Contains(args, "x") {
				want.ID = "x"
			}
			got, err := ParseCommand(strings.Fields(line))
			if err != nil || got != want {
				t.Errorf("got %+v, %v, want %+v", got, err, want)
			}
		})
	}
}

// Where the bundle is not certain, the container must not start without its devices.
func TestCommandsThatAreNotClear(t *testing.T) {
	for line, want := range map[string]string{
		"--new value create -b /b x": `option "--new" before the verb is unknown`,
		"-x create -b /b x":          `option "-x" before the verb is unknown`,
		"create -db /b x":            `option "-db" is unknown: write each option by itself`,
		"create --config other x":    `option --config "other"`,
		"create --conf=other x":      `option --config "other"`,
		"run -f ../config.json x":    `option --config "../config.json"`,
		"run -fother x":              `option --config "other"`,
	} {
		t.Run(line, func(t *testing.T) {
			_, err := ParseCommand(strings.Fields(line))
			checkError(t, err, want)
		})
	}
}

func TestRuntime(t *testing.T) {
	testenv.Root(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, []byte(text), 0o644), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	good, bad := write("good", "", 0o755), write("bad", "", 0o777)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(self, link); err != nil {
		t.Fatal(err)
	}
	create, remove := Command{Verb: "create"}, Command{Verb: "delete"}
	for name, tc := range map[string]struct {
		policy    string
		command   Command
		want, err string
	}{
		"a runtime":                        {"runtime: " + good, create, good, ""},
		"one that others can change":       {"runtime: " + bad, create, bad, "every user can write to " + bad},
		"one that others can change, kill": {"runtime: " + bad, remove, bad, "every user can write to " + bad},
		"one that does not exist":          {"runtime: /none", create, "/none", "/none: no such file"},
		"this program":                     {"runtime: " + link, create, link, "it is this program"},
		"a policy with a mistake":          {"runtme: x\nruntime: " + good, create, "", "unknown key runtme"},
		"a policy with a mistake, delete":  {"runtme: x\nruntime: " + good, remove, good, ""},
		"no YAML, delete":                  {"runtime: [", remove, "", "not YAML"},
	} {
		t.Run(name, func(t *testing.T) {
			i := Injector{PolicyFile: write("hook.yaml", tc.policy, 0o644)}
			got, err := i.Runtime(tc.command)
			checkError(t, err, tc.err)
			if got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// Without a runtime in the policy it is the engine's default, which hook install wrote.
func TestRuntimeOfAnEngine(t *testing.T) {
	testenv.Root(t)
	dir := t.TempDir()
	testenv.Must(t, os.Mkdir(dir+"/path", 0o755))
	testenv.Must(t, touch(dir+"/crun", dir+"/path/runc-site", dir+"/other"))
	t.Setenv("PATH", "relative:"+dir+"/path")
	for name, tc := range map[string]struct{ engine, policy, want, err string }{
		"a path":                      {"runtime: " + dir + "/crun", "", "crun", ""},
		"a name":                      {"runtime: runc-site", "", "path/runc-site", ""},
		"the policy names another":    {"runtime: runc-site", "runtime: " + dir + "/other", "other", ""},
		"a path that is gone":         {"runtime: " + dir + "/gone", "", "gone", "run gpu-cdi-plugin hook install again"},
		"a name that is nowhere":      {"runtime: none", "", "", "there is no none in PATH and /usr/local/sbin, "},
		"a relative path":             {"runtime: ./crun", "", "", `runtime: "./crun": want an absolute path`},
		"not what hook install wrote": {"runtme: crun", "", "", "engine.yaml: line 1: unknown key runtme"},
	} {
		t.Run(name, func(t *testing.T) {
			i := Injector{PolicyFile: dir + "/hook.yaml", EngineFile: dir + "/engine.yaml"}
			testenv.Must(t, os.WriteFile(i.PolicyFile, []byte(tc.policy), 0o644))
			testenv.Must(t, os.WriteFile(i.EngineFile, []byte(tc.engine), 0o644))
			got, err := i.Runtime(Command{Verb: "create"})
			checkError(t, err, tc.err)
			if strings.TrimPrefix(got, dir+"/") != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

// Without an engine's default the first runtime is taken that is not this program.
func TestFindRuntime(t *testing.T) {
	testenv.Root(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		make      func(top string) error // in its directories p, which is in PATH, a and b
		want, err string
	}{
		"none":             {func(string) error { return nil }, "", ""},
		"runc":             {func(top string) error { return touch(top + "/b/runc") }, "b/runc", ""},
		"two":              {func(top string) error { return touch(top+"/a/runc", top+"/b/runc") }, "a/runc", ""},
		"runc behind crun": {func(top string) error { return touch(top+"/a/crun", top+"/b/runc") }, "b/runc", ""},
		"crun behind this program": {func(top string) error {
			return errors.Join(os.Symlink(self, top+"/a/runc"), touch(top+"/b/crun"))
		}, "b/crun", ""},
		"behind a directory of others": {func(top string) error {
			return errors.Join(os.Chmod(top+"/a", 0o777), touch(top+"/b/runc"))
		}, "b/runc", ""},
		"in a directory of others": {func(top string) error {
			return errors.Join(os.Chmod(top+"/a", 0o777), touch(top+"/a/runc", top+"/b/runc"))
		}, "a/runc", "every user can write"},
		"in PATH":      {func(top string) error { return touch(top+"/p/runc", top+"/a/runc") }, "p/runc", ""},
		"crun in PATH": {func(top string) error { return touch(top+"/p/crun", top+"/a/runc") }, "a/runc", ""},
		"of others in PATH": {func(top string) error {
			return errors.Join(os.Chmod(top+"/p", 0o777), touch(top+"/p/runc", top+"/a/runc"))
		}, "a/runc", ""},
		"this program in PATH": {func(top string) error {
			return errors.Join(os.Symlink(self, top+"/p/runc"), touch(top+"/a/runc"))
		}, "a/runc", ""},
	} {
		t.Run(name, func(t *testing.T) {
			top := t.TempDir()
			if err := errors.Join(os.Mkdir(top+"/a", 0o755), os.Mkdir(top+"/b", 0o755),
				os.Mkdir(top+"/p", 0o755), tc.make(top)); err != nil {
				t.Fatal(err)
			}
			got, err := findRuntime(runtimeNames, []string{"", "relative", top + "/p"}, []string{top + "/a", top + "/b"})
			checkError(t, err, tc.err)
			if strings.TrimPrefix(got, top+"/") != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func touch(paths ...string) error {
	var errs []error
	for _, path := range paths {
		errs = append(errs, os.WriteFile(path, nil, 0o755))
	}
	return errors.Join(errs...)
}

// What runc starts must be what ParseCommand has read.
func FuzzParseCommand(f *testing.F) {
	f.Add("--root\x00/r\x00create\x00--bundle\x00/b\x00x")
	f.Add("--log=x\x00-debug\x00run\x00-b\x00--\x00--bundle=/b\x00--keep\x00x")
	f.Add("-log-format\x00json\x00create\x00-\x00")
	f.Fuzz(func(t *testing.T, line string) {
		args := strings.Split(line, "\x00")
		want, ok := parseAsRunc(args)
		got, err := ParseCommand(args)
		if ok && err == nil && got != want {
			t.Errorf("%q: got %+v, want %+v", args, got, want)
		}
	})
}

// parseAsRunc parses the command line of a container's creation with the package that runc's parser uses. It is not ok
// if runc would not create a container.
func parseAsRunc(args []string) (c Command, ok bool) {
	flags := func(values, switches string) *flag.FlagSet {
		set := flag.NewFlagSet("", flag.ContinueOnError)
		set.SetOutput(io.Discard)
		for name := range strings.FieldsSeq(values) {
			set.String(name, "", "")
		}
		for name := range strings.FieldsSeq(switches) {
			set.Bool(name, false, "")
		}
		return set
	}
	global := flags("root criu rootless", "debug systemd-cgroup version v")
	global.StringVar(&c.Log, "log", "", "")
	global.StringVar(&c.LogFormat, "log-format", "", "")
	if global.Parse(args) != nil || global.NArg() == 0 {
		return c, false
	}
	c.Verb = global.Arg(0)
	verb := flags(
		"console-socket pid-file pidfd-socket preserve-fds",
		"detach d keep no-pivot no-new-keyring no-subreaper",
	)
	verb.StringVar(&c.Bundle, "bundle", ".", "")
	verb.StringVar(&c.Bundle, "b", ".", "")
	ok = c.Creates() && verb.Parse(global.Args()[1:]) == nil && verb.NArg() == 1
	c.ID = verb.Arg(0)
	return c, ok
}
