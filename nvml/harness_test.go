package nvml

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// A process can load one NVML library. So a test that loads one runs in a process of its own: the test binary again,
// with this variable naming the test. Such tests run in parallel.
const aloneEnv = "NVML_TEST_ALONE"

// runAlone reports whether the test is in a process of its own. If it is not, runAlone runs it in one first.
//
//	if !runAlone(t) {
//		return
//	}
func runAlone(t *testing.T) bool {
	t.Helper()
	if os.Getenv(aloneEnv) == t.Name() {
		return true
	}
	t.Parallel()
	exe, err := os.Executable()
	testenv.Must(t, err)
	args := []string{"-test.v", "-test.count=1", "-test.timeout=2m", "-test.run=" + patternOf(t.Name())}
	cmd := exec.CommandContext(t.Context(), exe, args...)
	if *update {
		cmd.Args = append(cmd.Args, "-update")
	}
	cmd.Env = append(os.Environ(), aloneEnv+"="+t.Name())
	out, err := cmd.CombinedOutput()
	switch {
	case err != nil:
		t.Errorf("in a process of its own: %v\n%s", err, out)
	case strings.Contains(string(out), "--- SKIP: "+t.Name()+" "):
		testenv.Skip(t, "in a process of its own: "+string(out))
	case !strings.Contains(string(out), "--- PASS: "+t.Name()+" "):
		t.Errorf("it did not run in a process of its own:\n%s", out)
	}
	return false
}

// patternOf is the pattern for -test.run that matches a test.
func patternOf(name string) string {
	parts := strings.Split(name, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return strings.Join(parts, "/")
}

// createNode creates a simulated node with plain files for its device nodes: the library only opens them, so the tests
// need no root.
func createNode(t testing.TB, machine string) *sim.Node {
	t.Helper()
	return simtest.Node(t, machine, simtest.PlainNodes())
}

func createNodeHost(t testing.TB, node *sim.Node) host.Host {
	t.Helper()
	h, err := host.New(node.Root(), "", "")
	testenv.Must(t, err)
	return h
}

// openNode opens the node's library.
func openNode(t testing.TB, node *sim.Node) (*Session, host.Host) {
	t.Helper()
	h := createNodeHost(t, node)
	session := NewSession(Options{Host: h, Timeout: 20 * time.Second})
	testenv.Must(t, session.Open(t.Context()))
	t.Cleanup(func() {
		if err := session.Close(); err != nil {
			t.Error(err)
		}
	})
	return session, h
}

// compareToNode compares a snapshot to the simulated node.
func compareToNode(t testing.TB, node *sim.Node, got *gpu.Snapshot) {
	t.Helper()
	want, err := node.Snapshot()
	testenv.Must(t, err)
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("snapshot (-node +got):\n%s", diff)
	}
}

// readTopology reads the GPUs and their links, and leaves the session open.
func readTopology(t testing.TB, session *Session, h host.Host) *gpu.Snapshot {
	t.Helper()
	session.opts.Host = h
	s, err := session.readTopology(t.Context())
	testenv.Must(t, err)
	checkSnapshot(t, s)
	return s
}

// createHost creates a host with these files, by path from its root.
func createHost(t testing.TB, files map[string]string) host.Host {
	t.Helper()
	root := t.TempDir()
	h, err := host.New(root, "", "")
	testenv.Must(t, err)
	for path, text := range files {
		writeFile(t, h.Driver(path), text)
	}
	return h
}

func writeFile(t testing.TB, path, text string) {
	t.Helper()
	testenv.Must(t, os.MkdirAll(path[:strings.LastIndexByte(path, '/')], 0o755))
	testenv.Must(t, os.WriteFile(path, []byte(text), 0o644))
}

func symlink(t testing.TB, path, target string) string {
	t.Helper()
	testenv.Must(t, os.Symlink(target, path))
	return path
}

func fail(t testing.TB, node *sim.Node, function string, gpu int, code nvml.Return) {
	t.Helper()
	testenv.Must(t, node.Fail(function, gpu, int(code)))
}

func remove(t testing.TB, path string) {
	t.Helper()
	testenv.Must(t, os.Remove(path))
}

func truncate(t testing.TB, path string) {
	t.Helper()
	info, err := os.Stat(path)
	testenv.Must(t, err)
	testenv.Must(t, os.Truncate(path, info.Size()/2))
}

var waitUntil = testenv.Eventually
