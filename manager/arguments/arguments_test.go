package arguments

import (
	"encoding/csv"
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

// everything has each kind of option, and values that engines and shells could take for something else.
var everything = model.RunOptions{
	Envs: map[string]string{"B": "", "A": "--x=1 $(id) 'q' \"d\"\n\\, é", "C": "a=b"},
	Mounts: []model.Mount{
		{ContainerPath: "/a b", HostPath: "/h:1", ReadOnly: true}, {ContainerPath: "/c=d", HostPath: "/$(id)'"},
	},
	Devices: []model.DeviceNode{
		{ContainerPath: "/dev/c d", HostPath: "/dev/x", Permissions: "mrw"},
		{ContainerPath: "/dev/e", HostPath: "/dev/y", Permissions: "r"},
	},
	Annotations: map[string]string{"a.b/json": `{"a": ["b", 'c']}` + "\n", "plain": "x=y", "empty": ""},
	CDIDevices:  []string{"nvidia.com/gpu=0:1", "nvidia.com/gpu=GPU-0"},
	Conflicts:   []string{"ignored"},
}

func TestFor(t *testing.T) {
	first := []string{
		"--device=nvidia.com/gpu=0:1",
		"--device=nvidia.com/gpu=GPU-0",
		"--device=/dev/x:/dev/c d:mrw",
		"--device=/dev/y:/dev/e:r",
		"--mount=type=bind,source=/h:1,target=/a b,readonly",
		"--mount=type=bind,source=/$(id)',target=/c=d",
		"--env=A=--x=1 $(id) 'q' \"d\"\n\\, é",
		"--env=B=",
		"--env=C=a=b",
	}
	for engine, json := range map[string]string{
		"docker":  "--annotation=a.b/json={\"a\": [\"b\", 'c']}\n",
		"nerdctl": "--annotation=a.b/json={\"a\": [\"b\", 'c']}\n",
		"podman":  "--annotation=\"a.b/json={\"\"a\"\": [\"\"b\"\", 'c']}\n\"",
	} {
		want := append(append([]string{}, first...), json, "--annotation=empty=", "--annotation=plain=x=y")
		got, err := For(engine, everything)
		testenv.Must(t, err)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s, -want +got:\n%s", engine, diff)
		}
	}
}

func TestForNothing(t *testing.T) {
	for _, engine := range Engines() {
		if got, err := For(engine, model.RunOptions{}); err != nil || len(got) != 0 {
			t.Errorf("%s: %q (%v)", engine, got, err)
		}
	}
}

func TestForAnUnknownEngine(t *testing.T) {
	_, err := For("dokcer", model.RunOptions{})
	want := `unknown container engine "dokcer": want one of podman, docker, nerdctl; did you mean docker?`
	if !errors.Is(err, ErrUnknownEngine) || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

// What no engine can take, and what only engines cannot take: a bundle can have any path.
func TestInexpressible(t *testing.T) {
	device := func(host, container, permissions string) model.RunOptions {
		return model.RunOptions{
			Devices: []model.DeviceNode{{ContainerPath: container, HostPath: host, Permissions: permissions}},
		}
	}
	mount := func(host, container string) model.RunOptions {
		return model.RunOptions{Mounts: []model.Mount{{ContainerPath: container, HostPath: host}}}
	}
	env := func(name, value string) model.RunOptions {
		return model.RunOptions{Envs: map[string]string{name: value}}
	}
	annotation := func(key, value string) model.RunOptions {
		return model.RunOptions{Annotations: map[string]string{key: value}}
	}
	for name, c := range map[string]struct {
		options model.RunOptions
		problem string
		// engines are those that cannot take it; bundles can, unless it is empty.
		engines string
	}{
		"a path as a CDI device": {
			model.RunOptions{CDIDevices: []string{"/dev/sda"}},
			`cannot be passed to a container engine: CDI name "/dev/sda": want a qualified name, such as nvidia.com/gpu=0`, "",
		},
		"an option as a CDI device": {
			model.RunOptions{CDIDevices: []string{"--privileged"}},
			`cannot be passed to a container engine: CDI name "--privileged"`, "",
		},
		"a relative device": {
			device("dev/x", "/dev/x", "r"), `host path of a device node "dev/x": want an absolute path`, "",
		},
		"a mount without a target": {mount("/x", ""), `container path of a mount "": want an absolute path`, ""},
		"no permissions":           {device("/x", "/y", ""), `permissions of a device node "": want some of r, w and m`, ""},
		"other permissions": {
			device("/x", "/y", "rx"), `permissions of a device node "rx": want some of r, w and m`, "",
		},
		"a NUL in a path":             {mount("/x\x00", "/y"), `it has a '\x00'`, ""},
		"a NUL in a variable":         {env("A", "\x00"), `it has a '\x00'`, ""},
		"a variable without a name":   {env("", "x"), "want a name without =", ""},
		"a name with an equals sign":  {env("a=b", "x"), "want a name without =", ""},
		"an annotation without a key": {annotation("", "x"), "want a name without =", ""},
		"a colon in a device":         {device("/dev/x:rwm", "/dev/x", "r"), "it has a ':'", "podman docker nerdctl"},
		"a comma in a device":         {device("/dev/x", "/dev/x,y", "r"), "it has a ','", "podman docker nerdctl"},
		"a comma in a mount":          {mount("/x,readonly", "/y"), "it has a ','", "podman docker nerdctl"},
		"a quote in a mount":          {mount("/x", `/"y"`), "it has a '\"'", "podman docker nerdctl"},
		"a line break in a mount":     {mount("/x", "/y\n"), `it has a '\n'`, "podman docker nerdctl"},
		"a space in a variable":       {env("a b", "x"), "it has a ' '", "podman docker nerdctl"},
		"a carriage return":           {annotation("a", "b\r\nc"), `it has a '\r'`, "podman"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, engine := range Engines() {
				args, err := For(engine, c.options)
				if c.engines != "" && !strings.Contains(c.engines, engine) {
					if err != nil {
						t.Errorf("%s: %v", engine, err)
					}
					continue
				}
				if !errors.Is(err, ErrInexpressible) || !strings.Contains(err.Error(), c.problem) || args != nil {
					t.Errorf("%s: %q, and %v, want %s", engine, args, err, c.problem)
				}
			}
			if _, err := Edits(c.options); errors.Is(err, ErrInexpressible) != (c.engines == "") {
				t.Errorf("edits of a bundle: %v", err)
			}
		})
	}
}

func TestEdits(t *testing.T) {
	got, err := Edits(everything)
	testenv.Must(t, err)
	want := &specs.ContainerEdits{
		Env: []string{"A=--x=1 $(id) 'q' \"d\"\n\\, é", "B=", "C=a=b"},
		DeviceNodes: []*specs.DeviceNode{
			{Path: "/dev/c d", HostPath: "/dev/x", Permissions: "mrw"},
			{Path: "/dev/e", HostPath: "/dev/y", Permissions: "r"},
		},
		Mounts: []*specs.Mount{
			{HostPath: "/h:1", ContainerPath: "/a b", Options: []string{"rbind", "rprivate", "ro"}},
			{HostPath: "/$(id)'", ContainerPath: "/c=d", Options: []string{"rbind", "rprivate", "rw"}},
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// A shell that reads the arguments as a line passes them on as they are.
func TestArgumentsInAShell(t *testing.T) {
	args, err := For("podman", everything)
	testenv.Must(t, err)
	out, err := exec.Command("sh", "-c", `printf '%s\0' `+wording.Line(args)).Output()
	testenv.Must(t, err)
	if diff := cmp.Diff(args, strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// The library of podman's flags, pflag, reads an annotation with encoding/csv.
func FuzzCSVField(f *testing.F) {
	for _, seed := range []string{"a=b", `a="`, "a=,\n", "\"\n\",", " a=b ", "#"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if text == "" || strings.Contains(text, "\r") {
			t.Skip()
		}
		got, err := csv.NewReader(strings.NewReader(csvField(text))).Read()
		if err != nil || !cmp.Equal(got, []string{text}) {
			t.Errorf("%q is read as %q (%v)", text, got, err)
		}
	})
}
