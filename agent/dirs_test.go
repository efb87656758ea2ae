package agent

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestCheckDirs(t *testing.T) {
	t.Parallel()
	file := func(t *testing.T, dir string) {
		t.Helper()
		testenv.Must(t, os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600))
	}
	full := func(t *testing.T, dir string) {
		t.Helper()
		testenv.SmallDisk(t, dir, 0)
		for _, name := range []string{"devices", "mps"} { // exists already
			testenv.Must(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		}
		if err := os.WriteFile(filepath.Join(dir, "full"), make([]byte, 1<<20), 0o600); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("the disk is not full: %v", err)
		}
	}
	readOnly := func(t *testing.T, dir string) { t.Helper(); testenv.SmallDisk(t, dir, unix.MS_RDONLY) }
	for name, c := range map[string]struct {
		config         func(*config.Config)
		state, runtime func(*testing.T, string)
		want           []string // texts of the error; none if serve goes on
		log            string
	}{
		"all is well":                      {},
		"the state directory is a file":    {state: file, want: []string{"state-dir: ", "not a directory"}},
		"the state directory is read-only": {state: readOnly, want: []string{"state-dir: ", "read-only file system"}},
		"the state directory is full": {
			state: full, log: "state-dir is full; containers get no devices until it has space: ",
		},
		"the directory for MPS is read-only": {
			config: byMPS, runtime: readOnly, want: []string{"runtime-dir: ", "read-only file system"},
		},
		"the directory for MPS is full": {
			config: byMPS, runtime: full, log: "runtime-dir is full; containers get no devices until it has space: ",
		},
		"the directory for MPS is read-only, without MPS": {runtime: readOnly},
		"two directories are files": {
			config: byMPS, state: file, runtime: file, want: []string{"state-dir: ", "runtime-dir: "},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testenv.Root(t)
			conf, log := configIn(t.TempDir(), c.config), &testenv.Log{}
			if c.state != nil {
				c.state(t, conf.StateDir)
			}
			if c.runtime != nil {
				c.runtime(t, conf.RuntimeDir)
			}
			err := checkDirs(&Options{Config: conf, Trust: fakeTrust{}}, slog.New(slog.NewTextHandler(log, nil)))
			if (err == nil) != (len(c.want) == 0) {
				t.Errorf("error %v, want %q", err, c.want)
			}
			for _, text := range c.want {
				wantError(t, err, text)
			}
			if e, ok := errors.AsType[*NotWritableError](err); ok && !strings.HasPrefix(c.want[0], e.Option+": ") {
				t.Errorf("the error names %s, want %s", e.Option, c.want[0])
			}
			if got := log.String(); (got == "") != (c.log == "") || !strings.Contains(got, c.log) {
				t.Errorf("the log is %q, want %q", got, c.log)
			}
		})
	}
}

// configIn returns the default configuration with all directories in another one, and a change.
func configIn(dir string, change func(*config.Config)) config.Config {
	c := config.Default()
	c.StateDir, c.RuntimeDir = filepath.Join(dir, "state"), filepath.Join(dir, "run")
	c.CDIDir, c.DevicePluginDir = filepath.Join(dir, "cdi"), filepath.Join(dir, "plugins")
	if change != nil {
		change(&c)
	}
	return c
}

func TestCheckDirsTrustsOnlyWhatIsRoots(t *testing.T) {
	t.Parallel()
	byWatcher := func(c *config.Config) { c.Registration = config.RegisterWatcher }
	for name, c := range map[string]struct {
		config func(*config.Config)
		option string // of the directory that is not root's
		unused bool
	}{
		"the state directory":                             {option: "state-dir"},
		"the runtime directory, also without MPS":         {option: "runtime-dir"},
		"the directory of sockets":                        {option: "device-plugin-dir"},
		"the directory of specs":                          {option: "cdi-dir"},
		"the directory of specs, if none is written":      {option: "cdi-dir", config: byVariable, unused: true},
		"the plugin watcher's directory":                  {option: "plugins-registry-dir", config: byWatcher},
		"the plugin watcher's directory, if it is unused": {option: "plugins-registry-dir", unused: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			trust := fakeTrust{dirs: map[string]error{c.option: errors.New(c.option + ": not root's")}}
			want := c.option + ": not root's"
			if c.unused {
				want = ""
			}
			conf := configIn(t.TempDir(), c.config)
			wantError(t, checkDirs(&Options{Config: conf, Trust: trust}, slog.New(slog.DiscardHandler)), want)
		})
	}
}

// The descriptors are the first files that serve writes, so a state directory that it cannot write to ends it before it
// writes a spec or registers.
func TestServeChecksItsDirectoriesFirst(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	testenv.Must(t, os.WriteFile(f.opts.Config.StateDir, nil, 0o600))
	f.start(Serve)
	if _, ok := errors.AsType[*NotWritableError](f.result()); !ok || f.kubelet.Registrations() != 0 {
		t.Errorf("it ends with another error, or after %d registrations", f.kubelet.Registrations())
	}
	if entries, err := os.ReadDir(f.opts.Config.CDIDir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory of specs has %d files, error %v", len(entries), err)
	}
}
