package cdi

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestWriteFileAndReadFile(t *testing.T) {
	want := mustGenerate(t, twoGPUs(2), testDriver(), Options{})
	for _, name := range []string{"x.json", "x.yaml"} {
		path := filepath.Join(t.TempDir(), name)
		testenv.Must(t, WriteFile(path, want))
		got, err := ReadFile(path)
		testenv.Must(t, err)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		info, err := os.Stat(path)
		if err != nil || info.Mode() != 0o644 {
			t.Errorf("%s: mode %v, %v; engines of other users must read it", name, info.Mode(), err)
		}
		if lib, err := cdilib.ReadSpec(path, 0); err != nil || cmp.Diff(want, lib.Spec) != "" {
			t.Errorf("%s: the CDI library reads %v, %v", name, lib, err)
		}
	}
}

func TestMarshalIsDeterministic(t *testing.T) {
	for _, f := range []Format{JSON, YAML} {
		first, err := Marshal(mustGenerate(t, twoGPUs(2), testDriver(), Options{}), f)
		testenv.Must(t, err)
		for range 20 {
			again, err := Marshal(mustGenerate(t, twoGPUs(2), testDriver(), Options{}), f)
			if err != nil || !bytes.Equal(first, again) {
				t.Fatalf("%s: two encodings of one spec, %v", f, err)
			}
		}
	}
	if _, err := Marshal(&specs.Spec{}, "toml"); err == nil {
		t.Error("no error for an unknown format")
	}
}

func TestFileName(t *testing.T) {
	if got := FileName("nvidia.com/gpu"); got != "nvidia.com-gpu.json" {
		t.Errorf("got %q", got)
	}
}

func TestWriteFileRefuses(t *testing.T) {
	good := mustGenerate(t, twoGPUs(0), testDriver(), Options{})
	for name, c := range map[string]struct {
		file   string
		change func(*specs.Spec)
		want   string
	}{
		"an extension that engines ignore": {"spec.yml", nil, "only .json and .yaml"},
		"a directory that is missing":      {"nowhere/spec.json", nil, "no such file"},
		"a version that is too low": {
			"spec.json", func(s *specs.Spec) { s.Version = "0.3.0" }, "at least v0.5.0",
		},
		"a spec without devices": {"spec.json", func(s *specs.Spec) { s.Devices = nil }, "no devices"},
		"a name twice": {
			"spec.json", func(s *specs.Spec) { s.Devices[1].Name = "0" }, `the name "0"`,
		},
		"a malformed name": {"spec.json", func(s *specs.Spec) { s.Devices[1].Name = "a b" }, `"a b"`},
		"a malformed kind": {"spec.json", func(s *specs.Spec) { s.Kind = "gpu" }, "VENDOR/CLASS"},
		"a device without edits": {"spec.json", func(s *specs.Spec) {
			s.Devices[1].ContainerEdits = specs.ContainerEdits{}
		}, "no edits"},
		"edits that are not valid": {"spec.json", func(s *specs.Spec) {
			s.ContainerEdits.Env = []string{"x"}
		}, "invalid"},
		"a hook that is not valid": {"spec.json", func(s *specs.Spec) {
			s.Devices[0].ContainerEdits.Hooks = []*specs.Hook{{HookName: "sometime", Path: "/x"}}
		}, "sometime"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			spec := clone(t, good)
			if c.change != nil {
				c.change(spec)
			}
			checkError(t, WriteFile(filepath.Join(dir, c.file), spec), c.want, c.file)
			if names, _ := os.ReadDir(dir); len(names) > 0 {
				t.Errorf("files after the error: %q", names)
			}
		})
	}
}

func clone(t testing.TB, spec *specs.Spec) *specs.Spec {
	t.Helper()
	data, err := Marshal(spec, JSON)
	testenv.Must(t, err)
	again, err := cdilib.ParseSpec(data)
	testenv.Must(t, err)
	return again
}

func TestReadFileRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		make func(*tree)
		want string
	}{
		"an empty file": {func(r *tree) { r.file("/x.json", "", 0o644) }, "empty"},
		"text": {func(r *tree) {
			r.file("/x.json", "hello", 0o644)
		}, "cannot unmarshal !!str `hello`"},
		"an unknown key": {func(r *tree) {
			r.file("/x.json", `{"cdiVersion": "0.5.0", "kinds": 1}`, 0o644)
		}, "unknown key kinds"},
		"a spec without a kind":     {func(r *tree) { r.file("/x.json", `{"cdiVersion": "0.5.0"}`, 0o644) }, "vendor"},
		"a FIFO":                    {func(r *tree) { r.fifo("/x.json") }, "a FIFO, not a regular file"},
		"a directory":               {func(r *tree) { testenv.Must(r.t, os.Mkdir(r.dir+"/x.json", 0o755)) }, "a directory"},
		"a link that leads nowhere": {func(r *tree) { r.link("/x.json", "y.json") }, "no such file"},
		"a file of 4 GB": {func(r *tree) {
			r.file("/x.json", "", 0o644)
			testenv.Must(r.t, os.Truncate(r.dir+"/x.json", 4<<30))
		}, "the limit is"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			c.make(r)
			spec, err := ReadFile(r.dir + "/x.json")
			checkError(t, err, "x.json", c.want)
			if spec != nil || strings.Contains(err.Error(), "failed to") {
				t.Errorf("spec %v, error %v", spec, err)
			}
		})
	}
	if _, err := ReadFile(filepath.Join(t.TempDir(), "no.json")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that does not exist: %v", err)
	}
}

func FuzzReadFile(f *testing.F) {
	good, err := Marshal(mustGenerate(f, twoGPUs(0), testDriver(), Options{Capabilities: driver.Utility}), YAML)
	testenv.Must(f, err)
	f.Add(good)
	f.Add([]byte("cdiVersion: 0.6.0\nkind: a.b/c\nannotations: {x: y}\n" +
		"devices: [{name: d, containerEdits: {env: [A=b]}}]\n"))
	f.Add([]byte("a: &a [*a]"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(dir, "x.json")
		testenv.Must(t, os.WriteFile(path, data, 0o644))
		spec, err := ReadFile(path)
		if (spec == nil) == (err == nil) {
			t.Fatalf("spec %v and error %v, want exactly one", spec, err)
		}
		if err != nil {
			return
		}
		// Diff and validate accept what engines read.
		if diff := Diff(spec, spec); len(diff) > 0 {
			t.Errorf("a spec differs from itself: %v", diff)
		}
		validate(spec)
		if err := checkSpec(spec); err != nil {
			t.Errorf("the library takes the spec, checkSpec does not: %v", err)
		}
	})
}

func TestWriteFileRefusesAnExtensionThatEnginesDoNotRead(t *testing.T) {
	err := WriteFile(filepath.Join(t.TempDir(), "x.yml"), mustGenerate(t, twoGPUs(0), testDriver(), Options{}))
	if !errors.Is(err, ErrExtension) {
		t.Errorf("error %v", err)
	}
}

// The errors of the decoders have the names of Go types.
func TestErrorsAboutFilesNameNoGoTypes(t *testing.T) {
	for spec, want := range map[string]string{
		`{"cdiVersion": "0.5.0", "kindd": "a.com/b"}`: "line 1: unknown key kindd",
		`[]`:                     "line 1: cannot unmarshal !!seq",
		"kindd: x\ndevices: 5\n": "line 1: unknown key kindd\nline 2: cannot unmarshal !!int `5`",
	} {
		path := filepath.Join(t.TempDir(), "spec.yaml")
		testenv.Must(t, os.WriteFile(path, []byte(spec), 0o600))
		_, err := ReadFile(path)
		if want = "read CDI spec " + path + ": " + want; err == nil || err.Error() != want {
			t.Errorf("error %v\nwant  %s", err, want)
		}
	}
	for config, want := range map[string]string{
		`{"process": []}`:                     `unexpected array in "process"`,
		`{"process": {"user": {"uid": "x"}}}`: `unexpected string in "process.user.uid"`,
	} {
		_, err := parseConfig([]byte(config))
		if err == nil || !strings.HasSuffix(err.Error(), "not an OCI configuration: "+want) {
			t.Errorf("%s: %v, want %s", config, err, want)
		}
	}
}
