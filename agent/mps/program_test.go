package mps

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// The control program, its server and their libraries run as root.
func TestMPSRunsOnlyFilesOfRoot(t *testing.T) {
	testenv.Root(t)
	//nolint:usetesting // t.TempDir is in /tmp, where every user can write
	safe, err := os.MkdirTemp("/run", "mps-test-")
	testenv.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(safe) })
	dir := filepath.Join(safe, "driver")
	control, server := filepath.Join(dir, ControlProgram), filepath.Join(dir, serverProgram)
	library := filepath.Join(dir, "libcuda.so.1")
	for name, c := range map[string]struct {
		change func() error
		want   string
	}{
		"of root":             {func() error { return nil }, ""},
		"the group can write": {func() error { return os.Chmod(control, 0o775) }, "group 0 can write to " + control},
		"all can write":       {func() error { return os.Chmod(control, 0o757) }, "every user can write to " + control},
		"of another user": {
			func() error { return os.Chown(control, 1000, 0) }, control + " belongs to user 1000",
		},
		"in another user's directory": {func() error { return os.Chown(dir, 1000, 0) }, dir + " belongs to user 1000"},
		"gone":                        {func() error { return os.Remove(control) }, "no such file"},
		"a directory": {
			func() error { return errors.Join(os.Remove(control), os.Mkdir(control, 0o755)) }, "not a regular file",
		},
		"a server of another user":  {func() error { return os.Chown(server, 1000, 0) }, server + " belongs to user 1000"},
		"without a server":          {func() error { return os.Remove(server) }, ""},
		"a library that all change": {func() error { return os.Chmod(library, 0o666) }, "every user can write to " + library},
	} {
		testenv.Must(t, errors.Join(os.RemoveAll(dir), os.Mkdir(dir, 0o755)))
		for _, path := range []string{control, server, library} {
			testenv.Must(t, os.WriteFile(path, nil, 0o755))
		}
		testenv.Must(t, c.change())
		p := Program{Path: control, Libraries: map[string]string{"libcuda.so.1": library}}
		err := p.prepare(checkStrictly)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}
