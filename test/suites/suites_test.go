package suites

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/boot"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

var whole = flag.Bool("whole", false, "run the engines of all suites, and write docs/engines.md")

// engine is an engine of a suite, with the checks of testdata/NAME.sh.
type engine struct {
	suite, name string
	packages    []string // the first one's version is the engine's
	runtimes    []string // are packages too; "" is the engine's own
	// mode has what the engine needs of cgroups.
	mode boot.Mode
	// inCI means that it is run without -whole.
	inCI bool
}

var (
	podman = []string{"podman", "netavark"}
	docker = []string{"docker.io", "docker-cli"}
	both   = []string{"crun", "runc"}
)

var engines = []engine{
	{"trixie", "podman", podman, both, boot.Namespaces, true},
	{"trixie", "docker", docker, both[1:], boot.Controllers, false},
	{"trixie", "containerd", []string{"containerd"}, both[1:], boot.Controllers, false},
	{"trixie", "buildah", []string{"buildah", "netavark"}, both, boot.Controllers, false},
	{"trixie", "incus", []string{"incus"}, []string{""}, boot.Namespaces, false},
	{"sid", "podman", podman, both, boot.Namespaces, false},
	{"sid", "docker", docker, both[1:], boot.Controllers, false},
	{"sid", "containerd", []string{"containerd"}, both[1:], boot.Controllers, false},
	{"sid", "buildah", []string{"buildah", "netavark"}, both, boot.Controllers, false},
	{"sid", "incus", []string{"incus"}, []string{""}, boot.Namespaces, false},
	{"sid", "apptainer", []string{"apptainer"}, []string{""}, boot.Namespaces, false},
}

// TestEngines compares what the engines do with docs/engines.md, or writes that.
func TestEngines(t *testing.T) {
	testenv.Root(t)
	testenv.Command(t, "apt-get")
	var rows []row
	all := 0
	for _, e := range engines {
		all += len(e.runtimes)
		if !e.inCI && !*whole {
			continue
		}
		t.Run(e.suite+"/"+e.name, func(t *testing.T) {
			lower := filepath.Join(t.TempDir(), "root")
			versions, missing := e.unpack(t, lower)
			if missing != "" {
				t.Log("not run: " + missing)
			}
			for _, runtime := range e.runtimes {
				t.Run(runtime, func(t *testing.T) {
					r := row{suite: e.suite, engine: e.name, runtime: runtime, missing: missing, versions: versions}
					if missing == "" {
						e.run(t, lower, &r)
					}
					rows = append(rows, r)
				})
			}
		})
	}
	if t.Failed() {
		return
	}
	if len(rows) == all {
		write(t, rows)
	} else {
		compare(t, rows)
	}
}

// Exit statuses of testdata/root.sh.
const (
	statusNoPackage = 3
	statusNoSuite   = 69
)

// unpack makes a root with the engine's packages, and returns the versions of all packages. Otherwise it returns which
// package the suite lacks. Without the suite it skips the test.
func (e *engine) unpack(t *testing.T, dir string) (versions map[string]string, missing string) {
	t.Helper()
	packages := slices.DeleteFunc(slices.Concat(e.packages, e.runtimes), func(p string) bool { return p == "" })
	r, err := proc.Run(t.Context(), proc.Cmd{Args: append([]string{"sh", "testdata/root.sh", e.suite, dir}, packages...)})
	testenv.Must(t, err)
	switch r.Code {
	case 0:
	case statusNoPackage:
		return nil, lastLine(r.Stderr)
	case statusNoSuite:
		t.Skip(lastLine(r.Stderr)) // in CI too: archives change, and are not always there
	default:
		t.Fatal(r)
	}
	data, err := os.ReadFile(filepath.Join(dir, "versions"))
	testenv.Must(t, err)
	versions = map[string]string{}
	for line := range strings.Lines(string(data)) {
		f := strings.Fields(line)
		versions[f[0]] = upstream(f[1])
	}
	versions[e.name] = versions[e.packages[0]]
	return versions, ""
}

// upstream returns the upstream part of a version, without what Debian adds to it.
func upstream(version string) string {
	if _, after, found := strings.Cut(version, ":"); found {
		version = after
	}
	if i := strings.IndexAny(version, "+-~"); i > 0 {
		version = version[:i]
	}
	return version
}

// run runs the checks of an engine with a runtime, and fills in the row.
func (e *engine) run(t *testing.T, lower string, r *row) {
	t.Helper()
	root := boot.NewRoot(t, lower)
	node := simtest.Node(t, "pcie-quad")
	snapshot, err := node.Snapshot()
	testenv.Must(t, err)
	devices := snapshot.Devices
	for _, name := range []string{"usr/bin", "usr/libexec/gpu-cdi-plugin"} {
		testenv.Must(t, os.MkdirAll(root.File(name), 0o755))
	}
	for _, name := range []string{"gpu-cdi-plugin", "device-manager"} {
		image.CopyFile(t, shared.Program(t, name), root.File("usr/bin/"+name))
	}
	if e.name == "containerd" {
		image.CopyFile(t, shared.NodePeer(t, "crictl"), root.File("usr/bin/crictl")) // Debian has none
	}
	image.CopyFile(t, shared.Program(t, "prestart-hook"), root.File("usr/libexec/gpu-cdi-plugin/prestart-hook"))
	image.CopyFile(t, "testdata/"+e.name+".sh", root.File("srv/engine.sh"))
	proc.Must(t, 0, proc.Cmd{Args: []string{"cp", "-a", node.Root(), root.File("sim")}}) // with its device nodes
	settings := fmt.Sprintf("runtime=%s\nuuid=%s\n", r.runtime, devices[len(devices)-1].UUID)
	testenv.Must(t,
		os.Symlink("device-manager", root.File("usr/bin/gpu-run")),
		os.WriteFile(root.File("srv/row"), []byte(settings), 0o644),
		image.WriteArchive(root.File("srv/ubuntu.tar"), "docker.io/library/ubuntu:latest",
			shared.Images.Copy(t, image.Glibc), image.Config{
				Env: []string{"PATH=/usr/sbin:/usr/bin"},
				Cmd: []string{"sleep", "infinity"}, // for the sandbox of a pod
			}))
	if res := root.Run(t, e.mode, "testdata/checks.sh"); res.Code != 0 {
		t.Fatal(res)
	}

	none, _ := readCheck(t, root, "none")
	if none.Code != 0 || none.Stdout != "started\n" {
		r.missing = lastLine(none.Stderr)
		t.Logf("not run: a container without GPUs: %v", none)
		return
	}
	r.cells = map[string]string{}
	for _, c := range columns {
		res, found := readCheck(t, root, c.check)
		if !found {
			continue
		}
		if cell, err := os.ReadFile(root.Out(c.check + ".cell")); err == nil {
			r.cells[c.check] = strings.TrimSpace(string(cell))
			continue
		}
		r.cells[c.check] = "yes"
		if problem := c.problem(res, devices); res.Code != 0 || problem != "" {
			t.Errorf("%s: %s %v", c.title, problem, res)
		}
	}
}

// readCheck returns the result of a check, if it was run.
func readCheck(t *testing.T, root *boot.Root, name string) (res proc.Result, found bool) {
	t.Helper()
	status, err := os.ReadFile(root.Out(name + ".status"))
	if errors.Is(err, os.ErrNotExist) {
		return res, false
	}
	testenv.Must(t, err)
	_, err = fmt.Sscan(string(status), &res.Code)
	stdout, _ := os.ReadFile(root.Out(name))
	stderr, _ := os.ReadFile(root.Out(name + ".log"))
	testenv.Must(t, err)
	res.Stdout, res.Stderr = string(stdout), string(stderr)
	return res, true
}

// list is what nvidia-smi -L prints in a container with these devices.
func list(devices ...gpu.Device) string {
	var b strings.Builder
	for i, d := range devices {
		fmt.Fprintf(&b, "GPU %d: %s (UUID: %s)\n", i, d.Name, d.UUID)
	}
	return b.String()
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}
