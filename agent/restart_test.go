package agent

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/internal/sdnotify"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestARestartReloadsTheUnit checks what systemd is told before the process starts its program anew. After STOPPING=1
// it would take the new program for one that does not end, and kill it.
func TestARestartReloadsTheUnit(t *testing.T) {
	t.Parallel()
	for role, run := range map[string]func(context.Context, *Options) error{"Serve": Serve, "Watch": Watch} {
		for name, c := range map[string]struct {
			restart func(*fixture)
			want    error
		}{
			"for another configuration": {func(f *fixture) { f.reconfigure(byVariable) }, ErrRestart},
			"for another driver":        {func(f *fixture) { replace(t, f.driver.library) }, node.ErrDriverChanged},
		} {
			t.Run(role+" "+name, func(t *testing.T) {
				t.Parallel()
				f := newFixture(t, "pcie-quad")
				library := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
				testenv.Must(t, os.WriteFile(library, nil, 0o644))
				f.driver.library = library
				socket, until := testenv.Systemd(t)
				f.opts.Env = []string{"NOTIFY_SOCKET=" + socket}
				f.start(run)
				until("READY=1")
				c.restart(f)
				if err := f.result(); !errors.Is(err, c.want) || !NeedsRestart(err) {
					t.Errorf("it ends with %v, want %v", err, c.want)
				}
				const end = "STATUS=end of the test"
				testenv.Must(t, sdnotify.New(f.opts.Env).Status("end of the test"))
				var told []string
				for got := until(""); got != end; got = until("") {
					told = append(told, got)
				}
				if n := len(told); n == 0 || slices.Contains(told, "STOPPING=1") ||
					!strings.HasPrefix(told[n-1], "RELOADING=1\nMONOTONIC_USEC=") {
					t.Errorf("systemd is told %q, want RELOADING=1 last and no STOPPING=1", told)
				}
			})
		}
	}
}

// replace puts another file at a path.
func replace(t *testing.T, path string) {
	t.Helper()
	testenv.Must(t, os.WriteFile(path+".new", nil, 0o644), os.Rename(path+".new", path))
}
