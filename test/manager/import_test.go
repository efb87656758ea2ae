package manager

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestAnImportThatFailsChangesNothing imports a pod, and then others in a way that cannot end well.
func TestAnImportThatFailsChangesNothing(t *testing.T) {
	t.Parallel()
	p := newProgram(t)
	state := filepath.Join(p.dir, "state")
	write := func(name string, pods int, uid func(int) string) string {
		t.Helper()
		var placements []model.Placement
		for i := range pods {
			placements = append(placements, model.Placement{
				Pod: model.Pod{UID: uid(i)},
				Allocations: []model.Allocation{{
					Container: "main", Resource: "example.com/gpu", IDs: []string{fmt.Sprint(name, i)}, Response: []byte{},
				}},
			})
		}
		data, err := manager.NewCheckpoint(placements, map[string][]string{"example.com/gpu": {}}).Marshal()
		testenv.Must(t, err)
		path := filepath.Join(p.dir, name)
		testenv.Must(t, os.WriteFile(path, data, 0o600))
		return path
	}
	named := func(name string) func(int) string { return func(i int) string { return fmt.Sprint(name, i) } }
	program := shared.Program(t, "device-manager")
	verb := func(name, file string) []string {
		return []string{program, "checkpoint", name, file, "--state-dir", state}
	}
	fifo := filepath.Join(p.dir, "fifo")
	testenv.Must(t, unix.Mkfifo(fifo, 0o600))
	proc.Must(t, 0, proc.Cmd{Args: verb("import", write("first", 1, named("first")))})
	before := proc.Must(t, 0, proc.Cmd{Args: verb("export", "-")}).Stdout
	third := func(i int) string { return []string{"a", "b", strings.Repeat("c", 254), "d"}[i] }
	for name, test := range map[string]struct {
		file, text string
		limit      bool // of the size of files
	}{
		"a malformed third pod":        {file: write("third", 4, third), text: "1 to 253 characters"},
		"a file that cannot grow":      {file: write("many", 4000, named("many")), limit: true, text: "file too large"},
		"a FIFO into which none write": {file: fifo, text: "its writer did not close it within 10s"},
		"a directory":                  {file: p.dir, text: "is a directory"},
		"a device without an end":      {file: "/dev/zero", text: "/dev/zero: it is larger than"},
	} {
		t.Run(name, func(t *testing.T) {
			args := verb("import", test.file)
			if test.limit {
				args = append([]string{"sh", "-c", `ulimit -c 0; ulimit -f 1000; exec "$@"`, "sh"}, args...)
			}
			r, err := proc.Run(t.Context(), proc.Cmd{Args: args})
			if err != nil || r.Code == 0 || !strings.Contains(r.Stderr, test.text) {
				t.Errorf("want an error with %q, got %v and %v", test.text, err, r)
			}
			if after := proc.Must(t, 0, proc.Cmd{Args: verb("export", "-")}).Stdout; after != before {
				t.Errorf("before %s, after %s", before, after)
			}
		})
	}
	var all struct{ Data kubelet.Checkpoint }
	proc.Must(t, 0, proc.Cmd{Args: verb("import", filepath.Join(p.dir, "many"))})
	after := proc.Must(t, 0, proc.Cmd{Args: verb("export", "-")}).Stdout
	if err := json.Unmarshal([]byte(after), &all); err != nil || len(all.Data.PodDeviceEntries) != 4001 {
		t.Errorf("after an import that succeeds there are %d pods: %v", len(all.Data.PodDeviceEntries), err)
	}
}
