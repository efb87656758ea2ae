package bench

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// BenchmarkHook measures what eight GPUs add to `runc run` of a short program, beyond their mounts and
// device nodes: with the hook in each of its positions, with `ldconfig` in its place, and with NVIDIA's programs. The
// floor is what a hook adds that does nothing, a static program that exits.
//
// "again" starts each container in its root file system again and again, "first" in a fresh one every time, where the
// hook has everything to write. Every contender has a root of its own, since hooks change it.
//
// The processor time is that of the runtime and of all that it runs. Other load on the machine changes it less.
func BenchmarkHook(b *testing.B) {
	for _, kind := range []image.Kind{image.Glibc, image.Many} {
		b.Run(string(kind)+", again", func(b *testing.B) { benchmarkHook(b, kind, false) })
		b.Run(string(kind)+", first", func(b *testing.B) { benchmarkHook(b, kind, true) })
	}
}

// hookRounds is how often each contender starts a container. A hook takes a few milliseconds of some tens.
const hookRounds = 51

// addition is what is measured: what a contender adds to another.
type addition struct {
	name, metric string
	with, to     *contender
}

func benchmarkHook(b *testing.B, kind image.Kind, fresh bool) {
	testenv.Root(b)
	n := shared.Node(b, "dgx-h100")
	theirs := peerSpec(b, n)
	program := shared.Program(b, "prestart-hook")
	exits := filepath.Join(b.TempDir(), "exits")
	image.Compile(b, exits, "int main(void) { return 0; }", "-static")
	wrapper := filepath.Join(b.TempDir(), "gpu-cdi-runtime")
	testenv.Must(b, os.Symlink(program, wrapper))
	// What a runtime makes of a spec, and the link that a hook makes to a mounted library.
	const node, link = "/dev/nvidia7", "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
	annotations := map[string]string{"cdi.k8s.io/devices": "nvidia.com/gpu=all"}
	useSpecs(b, n.CDIDir)
	withoutHook := b.TempDir()
	n.Plugin(b, 0, "--no-hook", "cdi", "generate", "--file", filepath.Join(withoutHook, filepath.Base(n.Spec())))

	var all []*contender
	add := func(name, shows string, c start) *contender {
		c.kind, c.fresh, c.shows = kind, fresh, shows
		all = append(all, c.contender(b, name))
		return all[len(all)-1]
	}
	noGPU := add("no GPU", "", start{})
	bare := add("nodes and mounts", node, start{cdiDir: n.CDIDir, edit: func(s *specs.Spec) { s.Hooks = nil }})
	peerBare := add(
		"nodes and mounts of nvidia-ctk",
		node,
		start{cdiDir: theirs, edit: func(s *specs.Spec) { s.Hooks = nil }},
	)
	additions := []addition{
		{"a hook that does nothing", floor + "hook-", add("a hook that does nothing", node, start{
			cdiDir: n.CDIDir, edit: func(s *specs.Spec) { s.Hooks = createContainer(exits) },
		}), bare},
		{"a Go program that does nothing", "go-", add("a Go program that does nothing", node, start{
			cdiDir: n.CDIDir, edit: func(s *specs.Spec) { s.Hooks = createContainer(emptyGo(b)) },
		}), bare},
		{"ldconfig", "ldconfig-", add("ldconfig", link, start{cdiDir: n.CDIDir, edit: func(s *specs.Spec) {
			s.Hooks = createContainer(testenv.Command(b, "ldconfig"), "-r", s.Root.Path)
		}}), bare},
		{"the mounts of --no-hook", "no-hook-", add("the mounts of --no-hook", link, start{cdiDir: withoutHook}), bare},
		{"create-container", "hook-", add("create-container", link, start{cdiDir: n.CDIDir}), bare},
		{"create-runtime", "live-", add("create-runtime", link, start{
			annotations: annotations, edit: func(s *specs.Spec) {
				s.Hooks = &specs.Hooks{
					CreateRuntime: []specs.Hook{{Path: program, Args: []string{program, "create-runtime"}}},
				}
			},
		}), bare},
		{
			"gpu-cdi-runtime",
			"wrapper-",
			add("gpu-cdi-runtime", link, start{annotations: annotations, runtime: wrapper}),
			bare,
		},
		{"precreate", "precreate-", add("precreate", link, start{annotations: annotations, precreate: program}), bare},
		{"nvidia-cdi-hook", peer + "hooks-", add("nvidia-cdi-hook", link, start{cdiDir: theirs}), peerBare},
		{"nvidia-container-runtime", peer + "runtime-", add("nvidia-container-runtime", link, start{
			annotations: annotations, runtime: shared.Peer(b, "nvidia-container-runtime"), env: peerConfig(b, theirs),
		}), peerBare},
	}
	count := hookRounds
	if fresh {
		count = freshRounds
	}
	for b.Loop() {
		compare(b, count, []string{"elapsed", "processor"}, all)
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(ms(median(noGPU.times[0])), "no-gpu-ms")
	report(b, additions)
}

// report reports what is added, and the ratios to what the first one adds, the floor.
func report(b *testing.B, additions []addition) {
	b.Helper()
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 3, ' ', tabwriter.AlignRight)
	fmt.Fprint(w, "added to nodes and mounts\tms\tx floor\tprocessor ms\tx floor\t\n")
	base := additions[0]
	wallFloor, cpuFloor := beyond(base.with, base.to, 0), beyond(base.with, base.to, 1)
	for _, a := range additions {
		wall, cpu := beyond(a.with, a.to, 0), beyond(a.with, a.to, 1)
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t\n",
			a.name, ms(wall), ratio(wall, wallFloor), ms(cpu), ratio(cpu, cpuFloor))
		b.ReportMetric(ms(wall), a.metric+"ms")
		if a != base {
			b.ReportMetric(ratio(wall, wallFloor), a.metric+"x-floor")
			b.ReportMetric(ratio(cpu, cpuFloor), a.metric+"cpu-x-floor")
		}
	}
	w.Flush()
	b.Logf("%s\n%s", b.Name(), text.String())
}

func ratio(a, b time.Duration) float64 { return float64(a) / float64(b) }

// beyond is what a contender takes longer than another: the median of the differences in each round, which is steadier
// than the difference of the medians.
func beyond(c, other *contender, column int) time.Duration {
	var more []time.Duration
	for i := range c.times[column] {
		more = append(more, c.times[column][i]-other.times[column][i])
	}
	return median(more)
}

func createContainer(args ...string) *specs.Hooks {
	return &specs.Hooks{CreateContainer: []specs.Hook{{Path: args[0], Args: args}}}
}

// emptyGo builds a Go program that does nothing. No hook in Go can take less.
func emptyGo(b *testing.B) string {
	b.Helper()
	dir := b.TempDir()
	testenv.Must(b, os.WriteFile(filepath.Join(dir, "main.go"), []byte("package main\n\nfunc main() {}\n"), 0o644))
	proc.Must(b, 0, proc.Cmd{
		Args: []string{"go", "build", "-ldflags", "-s -w", "-o", "empty", "main.go"},
		Dir:  dir, Env: append(os.Environ(), "CGO_ENABLED=0"),
	})
	return filepath.Join(dir, "empty")
}

// useSpecs gives this benchmark, and the programs that it runs, a /run of its own with the CDI specs of a directory.
func useSpecs(b *testing.B, cdiDir string) {
	b.Helper()
	testenv.MountNamespace(b)
	err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755")
	if err == nil {
		err = os.Mkdir("/run/cdi", 0o755)
	}
	if err == nil {
		err = unix.Mount(cdiDir, "/run/cdi", "", unix.MS_BIND, "")
	}
	testenv.Must(b, err)
}

// start is how a contender starts its container.
type start struct {
	kind  image.Kind
	fresh bool // root file system
	// cdiDir has the specs whose devices are in config.json, or is empty. annotations ask for devices.
	cdiDir      string
	annotations map[string]string
	edit        func(*specs.Spec)
	// runtime is called in place of runc, and precreate is called before it as engines do; empty without.
	runtime, precreate string
	env                []string // besides this process's
	// shows is a path that the container has only if the work was done, or empty.
	shows string
}

func (s start) contender(b *testing.B, name string) *contender {
	b.Helper()
	root := shared.Images.Copy(b, s.kind)
	options := engine.Container{
		Args:        []string{"/bin/ls", "-L", cmp.Or(s.shows, "/dev/null")},
		CDIDir:      s.cdiDir,
		Annotations: s.annotations,
	}
	if s.cdiDir != "" {
		options.Devices = []string{"nvidia.com/gpu=all"}
	}
	bundle := shared.Runtimes()[0].Bundle(b, root, options)
	if s.edit != nil {
		testenv.Must(b, bundle.Edit(func(spec *specs.Spec) error { s.edit(spec); return nil }))
	}
	config, err := os.ReadFile(filepath.Join(bundle.Dir, "config.json"))
	testenv.Must(b, err)
	// containerd and docker have their bundles in /run too, a tmpfs.
	bundle.Dir = filepath.Join("/run", name)
	testenv.Must(b, os.Mkdir(bundle.Dir, 0o755))
	bundle.Runtime = cmp.Or(s.runtime, bundle.Runtime)
	return &contender{
		name: name,
		prepare: func() error {
			err := os.WriteFile(filepath.Join(bundle.Dir, "config.json"), config, 0o644)
			if s.fresh {
				err = errors.Join(err, shared.Images.Restore(b, s.kind, root))
			}
			return err
		},
		run: func() []time.Duration { return s.run(b, bundle, string(config)) },
	}
}

// run starts the container once, and returns the elapsed time and the processor time.
func (s start) run(b *testing.B, bundle *image.Bundle, config string) []time.Duration {
	b.Helper()
	var before proc.Result
	if s.precreate != "" {
		before = proc.Must(b, 0, proc.Cmd{Args: []string{s.precreate, "precreate"}, Stdin: strings.NewReader(config)})
		testenv.Must(b, os.WriteFile(filepath.Join(bundle.Dir, "config.json"), []byte(before.Stdout), 0o644))
	}
	args := bundle.Command()
	if strings.HasSuffix(s.runtime, "nvidia-container-runtime") {
		args[2] = "create" // of --root: this runtime edits config.json only if an argument is that, not for run
	}
	res := proc.Must(b, 0, proc.Cmd{Args: args, Dir: bundle.Dir, Env: append(os.Environ(), s.env...)})
	return []time.Duration{before.Wall + res.Wall, before.CPU + res.CPU}
}

// peerConfig makes nvidia-container-runtime read the specs of a directory, and returns its environment for that.
func peerConfig(b *testing.B, cdiDir string) (env []string) {
	b.Helper()
	path := filepath.Join(b.TempDir(), "config.toml")
	config := fmt.Sprintf("[nvidia-container-runtime]\nmode = \"cdi\"\nruntimes = [%q]\n"+
		"[nvidia-container-runtime.modes.cdi]\nspec-dirs = [%q]\n", testenv.Command(b, "runc"), cdiDir)
	testenv.Must(b, os.WriteFile(path, []byte(config), 0o644))
	return []string{"NVIDIA_CTK_CONFIG_FILE_PATH=" + path}
}

// peerSpec runs nvidia-ctk with the node as its root, and makes the host paths in its spec those of this machine.
func peerSpec(b *testing.B, n *suite.Node) (dir string) {
	b.Helper()
	inside := suite.Install(b, n.Root(), shared.Peer(b, "nvidia-ctk"))
	var spec cdispecs.Spec
	printed := inside("nvidia-ctk", "cdi", "generate", "--format=json").Stdout
	if err := json.Unmarshal([]byte(printed), &spec); err != nil {
		b.Fatalf("read nvidia-ctk's spec: %v", err)
	}
	hook := shared.Peer(b, "nvidia-cdi-hook")
	relocate(&spec.ContainerEdits, n.Root(), hook)
	for i := range spec.Devices {
		relocate(&spec.Devices[i].ContainerEdits, n.Root(), hook)
	}
	data, err := json.Marshal(&spec)
	testenv.Must(b, err)
	dir = b.TempDir()
	testenv.Must(b, os.WriteFile(filepath.Join(dir, "nvidia.json"), data, 0o644))
	return dir
}

func relocate(edits *cdispecs.ContainerEdits, root, hook string) {
	for _, d := range edits.DeviceNodes {
		d.HostPath = filepath.Join(root, d.Path)
	}
	for _, m := range edits.Mounts {
		if m.HostPath != os.DevNull { // the machine has it
			m.HostPath = filepath.Join(root, m.HostPath)
		}
	}
	for _, h := range edits.Hooks {
		h.Path = hook
	}
}
