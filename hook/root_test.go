package hook

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestReadState(t *testing.T) {
	s, err := ReadState(strings.NewReader(
		`{"ociVersion":"1.2.0","id":"x","status":"creating","pid":1,"bundle":"/b","root":"/r",` +
			`"annotations":{"a":"b"}} and more`))
	if err != nil {
		t.Fatal(err)
	}
	want := State{ID: "x", PID: 1, Bundle: "/b", Root: "/r", Annotations: map[string]string{"a": "b"}}
	if !reflect.DeepEqual(*s, want) {
		t.Errorf("got %+v, want %+v", *s, want)
	}
	for name, text := range map[string]string{
		"nothing":           "",
		"not JSON":          "hello",
		"a cut-off state":   `{"id":"x","bundle":"/b"`,
		"a list":            `[]`,
		"no id":             `{"bundle":"/b"}`,
		"an id of a number": `{"id":1}`,
		"too large":         `{"id":"` + strings.Repeat("x", maxState),
	} {
		t.Run(name, func(t *testing.T) {
			if s, err := ReadState(strings.NewReader(text)); err == nil || s != nil {
				t.Errorf("got %+v, %v, want an error only", s, err)
			}
		})
	}
}

// Some runtimes do not close the pipe.
func TestReadStateStopsAtTheEndOfTheState(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close(); _ = w.Close() }()
	if _, err := io.WriteString(w, `{"id":"x"}`); err != nil {
		t.Fatal(err)
	}
	if s, err := ReadState(r); err != nil || s.ID != "x" {
		t.Errorf("got %+v, %v", s, err)
	}
}

// A user who can write to the bundle must not make the hook block, or open a device.
func TestConfigMustBeARegularFile(t *testing.T) {
	regular := filepath.Join(t.TempDir(), "regular")
	if err := os.WriteFile(regular, []byte(`{"root":{"path":"rootfs"}}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		make func(path string) error
		want string
	}{
		"a FIFO":       {func(path string) error { return unix.Mkfifo(path, 0o644) }, "a FIFO"},
		"a link":       {func(path string) error { return os.Symlink(regular, path) }, "a symbolic link"},
		"a directory":  {func(path string) error { return os.Mkdir(path, 0o755) }, "a directory"},
		"a large file": {func(path string) error { return sparse(path, maxConfig+1) }, "bytes, the limit is"},
	} {
		t.Run(name, func(t *testing.T) {
			bundle := t.TempDir()
			config := filepath.Join(bundle, "config.json")
			if err := tc.make(config); err != nil {
				t.Fatal(err)
			}
			_, err := (&State{Bundle: bundle}).findRoot()
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), config) {
				t.Errorf("%v, want an error with %q and the file's path", err, tc.want)
			}
		})
	}
}

func sparse(path string, size int64) error {
	return errors.Join(os.WriteFile(path, nil, 0o644), os.Truncate(path, size))
}

func TestFindRoot(t *testing.T) {
	bundle := t.TempDir()
	config := func(text string) string {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	relative := config(`{"root":{"path":"rootfs","readonly":true}}`)
	for name, tc := range map[string]struct {
		state State
		want  string // empty for an error
	}{
		"the state's root": {
			State{Root: "/run/root", Bundle: "/missing"}, "/run/root",
		},
		"a root relative to the bundle": {State{Bundle: relative}, relative + "/rootfs"},
		"an absolute root": {
			State{Bundle: config(`{"root":{"path":"/run/root"}}`)}, "/run/root",
		},
		"the state's root is /":                 {State{Root: "/"}, ""},
		"the state's root is another path of /": {State{Root: "//run/.."}, ""},
		"the state's root is relative":          {State{Root: "rootfs"}, ""},
		"the configured root is /":              {State{Bundle: config(`{"root":{"path":"/"}}`)}, ""},
		"the configured root leads out": {
			State{Bundle: config(`{"root":{"path":"../../x"}}`)}, "",
		},
		"no configured root":      {State{Bundle: config(`{}`)}, ""},
		"a damaged configuration": {State{Bundle: config(`{"root":`)}, ""},
		"no bundle":               {State{}, ""},
		"a relative bundle":       {State{Bundle: "."}, ""},
		"no configuration, and the working directory is no root": {State{Bundle: bundle}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := tc.state.findRoot()
			if got != tc.want || (err == nil) != (tc.want != "") {
				t.Errorf("got %q, %v, want %q", got, err, tc.want)
			}
		})
	}
}

func FuzzReadState(f *testing.F) {
	f.Add(`{"id":"x","pid":1,"bundle":"/b","root":"/r"}`)
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ReadState(strings.NewReader(text))
		if (s == nil) == (err == nil) {
			t.Fatalf("got %v and error %v, want exactly one", s, err)
		}
		if s != nil && s.Root != "" {
			if root, err := s.findRoot(); err == nil && (!filepath.IsAbs(root) || filepath.Clean(root) == "/") {
				t.Errorf("%q is accepted as a root", root)
			}
		}
	})
}

func FuzzParseRoot(f *testing.F) {
	f.Add([]byte(`{"root":{"path":"rootfs"}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		path, err := parseRoot(data)
		if (path == "") == (err == nil) {
			t.Errorf("got %q and error %v, want exactly one", path, err)
		}
	})
}
