// Package engines holds what hook install writes against the parsers of the engines.
package engines

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	containerd1 "github.com/containerd/containerd/services/server/config"
	containerd2 "github.com/containerd/containerd/v2/cmd/containerd/server/config"
	"github.com/cri-o/cri-o/pkg/config"
	docker "github.com/docker/docker/daemon/config"
	"github.com/docker/docker/opts"
	"github.com/spf13/pflag"
	podman "go.podman.io/common/pkg/config"
	"go.podman.io/common/pkg/hooks"

	"gpu-cdi-plugin/hook/install"
	"gpu-cdi-plugin/test/lib/testenv"
)

// host is a host in a directory, with a hook, runtimes and conmon beside it. PATH has no conmon.
type host struct {
	t                  *testing.T
	root, hook, conmon string
}

func newHost(t *testing.T) *host {
	t.Helper()
	testenv.Root(t)
	dir := t.TempDir()
	h := &host{
		t: t, root: filepath.Join(dir, "root"),
		hook: filepath.Join(dir, "sbin/prestart-hook"), conmon: filepath.Join(dir, "libexec/conmon"),
	}
	sbin := filepath.Dir(h.hook) // has the same path on this machine, where the parsers see whether a runtime exists
	testenv.Must(t, os.MkdirAll(filepath.Join(h.root, sbin), 0o755), os.Symlink(filepath.Join(h.root, sbin), sbin))
	for _, name := range []string{h.hook, h.conmon, filepath.Join(dir, "bin/crun"), filepath.Join(dir, "bin/runc")} {
		h.write(name, "#!/bin/sh\necho conmon version 2.1.12\n")
	}
	t.Setenv("PATH", filepath.Join(dir, "bin"))
	testenv.Must(t, os.MkdirAll(filepath.Join(h.root, "etc"), 0o755))
	return h
}

func (h *host) write(name, text string) {
	h.t.Helper()
	testenv.Must(h.t, os.MkdirAll(filepath.Dir(name), 0o755))
	testenv.Must(h.t, os.WriteFile(name, []byte(text), 0o755))
}

// install runs hook install on the host with these files.
func (h *host) install(engine string, files map[string]string) {
	h.t.Helper()
	for name, text := range files {
		h.write(filepath.Join(h.root, name), text)
	}
	read, err := install.Read(h.root, []string{engine}, h.hook)
	testenv.Must(h.t, err)
	plan, err := read.Install([]string{engine}, h.hook)
	testenv.Must(h.t, err)
	testenv.Must(h.t, plan.Apply())
}

func (h *host) wrapper(engine string) string {
	return filepath.Join(filepath.Dir(h.hook), "gpu-cdi-runtime-"+engine)
}

// CRI-O does not start with a handler whose monitor it does not find.
func TestCRIO(t *testing.T) {
	h := newHost(t)
	h.install("crio", map[string]string{
		"etc/crio/crio.conf.d/10-crio.conf": "[crio.runtime]\ndefault_runtime = 'crun'\n[crio.runtime.runtimes.crun]\n" +
			"runtime_root = '/run/site'\nmonitor_path = '" + h.conmon + "'\nmonitor_env = ['A=b']\n" +
			"default_annotations = {'run.oci.systemd.subgroup' = ''}\n",
	})
	c := h.loadCRIO()
	testenv.Must(t, c.TranslateMonitorFields(true))
	got := c.Runtimes["gpu-cdi"]
	if got == nil || got.RuntimePath != h.wrapper("crio") || got.MonitorPath != h.conmon ||
		got.RuntimeRoot != "/run/site" || len(got.MonitorEnv) != 1 || len(got.DefaultAnnotations) != 1 {
		t.Errorf("the handler is %+v", got)
	}
}

// If no file has CRI-O's default handler, ours must start where CRI-O's own starts: without a monitor_path both need
// conmon in PATH.
func TestCRIOWithoutDefault(t *testing.T) {
	for name, c := range map[string]struct {
		file     string
		standsIn string // the handler that ours copies
	}{
		"no file":              {"", "crun"},
		"no handler in a file": {"[crio.runtime]\nlog_level = 'info'\n", "crun"},
		// It is the default of CRI-O before 1.31.
		"a runc handler, and no default": {
			"[crio.runtime.runtimes.runc]\nmonitor_path = 'CONMON'\nmonitor_env = ['A=b']\n", "runc",
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			files := map[string]string{}
			if c.file != "" {
				files["etc/crio/crio.conf"] = strings.ReplaceAll(c.file, "CONMON", h.conmon)
			}
			h.install("crio", files)
			config := h.loadCRIO()
			ours, theirs := config.Runtimes["gpu-cdi"], config.Runtimes[c.standsIn]
			if ours == nil || theirs == nil || ours.RuntimePath != h.wrapper("crio") {
				t.Fatalf("our handler is %+v, and %s %+v", ours, c.standsIn, theirs)
			}
			h.checkMonitors(config, ours, theirs)
			t.Setenv("PATH", filepath.Dir(h.conmon)+":"+os.Getenv("PATH"))
			h.checkMonitors(config, ours, theirs)
			if err := config.TranslateMonitorFieldsForHandler(ours, true); err != nil {
				t.Errorf("our handler does not start: %v", err)
			}
		})
	}
}

// checkMonitors checks that CRI-O finds the same monitor for our handler as for the other, or none for both.
func (h *host) checkMonitors(c *config.Config, ours, theirs *config.RuntimeHandler) {
	h.t.Helper()
	wanted := c.TranslateMonitorFieldsForHandler(theirs, true)
	if err := c.TranslateMonitorFieldsForHandler(ours, true); (err == nil) != (wanted == nil) {
		h.t.Errorf("our handler: %v; the other: %v", err, wanted)
	}
	got, want := []string{ours.MonitorPath, ours.MonitorCgroup}, []string{theirs.MonitorPath, theirs.MonitorCgroup}
	if got, want = append(got, ours.MonitorEnv...), append(want, theirs.MonitorEnv...); !slices.Equal(got, want) {
		h.t.Errorf("our monitor is %q, and the other %q", got, want)
	}
}

// loadCRIO loads the host's files like CRI-O, and checks what CRI-O checks before it searches for monitors.
func (h *host) loadCRIO() *config.Config {
	h.t.Helper()
	c, err := config.DefaultConfig()
	testenv.Must(h.t, err)
	file := filepath.Join(h.root, "etc/crio/crio.conf")
	if err := c.UpdateFromFile(h.t.Context(), file); !errors.Is(err, fs.ErrNotExist) {
		testenv.Must(h.t, err)
	}
	testenv.Must(h.t, c.UpdateFromPath(h.t.Context(), filepath.Join(h.root, "etc/crio/crio.conf.d")))
	testenv.Must(h.t, c.ValidateDefaultRuntime())
	testenv.Must(h.t, c.ValidateRuntimes())
	return c
}

// containerd 1 replaces the CRI plugin's table by that of a later file.
func TestContainerd1(t *testing.T) {
	const cri = "[plugins.'io.containerd.grpc.v1.cri'"
	for name, files := range map[string]map[string]string{
		"no file":  {},
		"one file": {"etc/containerd/config.toml": "version = 2\n" + cri + "]\nsandbox_image = 'x'\n"},
		"an import with settings of CRI": {
			"etc/containerd/config.toml": "version = 2\nimports = ['conf.d/*.toml']\n" + cri +
				".containerd.runtimes.runc]\n",
			"etc/containerd/conf.d/site.toml": "version = 2\n" + cri + "]\nsandbox_image = 'x'\n",
		},
		"an import of something else": {
			"etc/containerd/config.toml":      "version = 2\nimports = ['conf.d/*.toml']\n",
			"etc/containerd/conf.d/site.toml": "version = 2\n[metrics]\naddress = '127.0.0.1:1338'\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.install("containerd", files)
			c := &containerd1.Config{}
			testenv.Must(t, containerd1.LoadConfig(filepath.Join(h.root, "etc/containerd/config.toml"), c))
			tree := c.Plugins["io.containerd.grpc.v1.cri"]
			keys := []string{"containerd", "runtimes", "gpu-cdi", "options", "BinaryName"}
			if got := tree.GetPath(keys); got != h.wrapper("containerd") {
				t.Errorf("the runtime is %v", got)
			}
			if tree.GetPath([]string{"containerd", "runtimes", "runc"}) == nil {
				t.Error("runc is gone")
			}
		})
	}
}

// containerd 2 merges all files.
func TestContainerd2(t *testing.T) {
	const cri = "[plugins.'io.containerd.cri.v1.runtime'"
	for name, files := range map[string]map[string]string{
		"a part of config.toml": {
			"etc/containerd/config.toml": "version = 3\n" + cri + ".containerd.runtimes.runc.options]\nSystemdCgroup = true\n",
		},
		"a drop-in": {
			"etc/containerd/config.toml": "version = 3\nimports = ['conf.d/*.toml']\n" + cri +
				".containerd]\ndefault_runtime_name = 'crun'\n",
			"etc/containerd/conf.d/99.toml": "version = 3\n" + cri +
				".containerd.runtimes.crun.options]\nSystemdCgroup = true\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			h.install("containerd", files)
			c := &containerd2.Config{Version: 3}
			testenv.Must(t, containerd2.LoadConfig(t.Context(), filepath.Join(h.root, "etc/containerd/config.toml"), c))
			var table any = c.Plugins
			for _, key := range []string{"io.containerd.cri.v1.runtime", "containerd", "runtimes", "gpu-cdi", "options"} {
				inner, _ := table.(map[string]any)
				table = inner[key]
			}
			options, _ := table.(map[string]any)
			if options["BinaryName"] != h.wrapper("containerd") || options["SystemdCgroup"] != true {
				t.Errorf("the options are %v", options)
			}
		})
	}
}

// dockerd does not start if its command line and daemon.json set the same option, and takes no unknown one.
func TestDocker(t *testing.T) {
	for name, c := range map[string]struct {
		file  string
		flags []string
		want  []string // the names of the runtimes
	}{
		"no file":           {"", nil, []string{"gpu-cdi"}},
		"an empty file":     {"\xef\xbb\xbf\n", nil, []string{"gpu-cdi"}},
		"a byte order mark": {"\xef\xbb\xbf{\"debug\": true}\n", nil, []string{"gpu-cdi"}},
		"features in the command line": {
			`{"default-runtime": "crun", "runtimes": {"crun": {"path": "/usr/bin/crun", "runtimeArgs": ["--debug"]}}}`,
			[]string{"--feature=cdi=true"},
			[]string{"crun", "gpu-cdi"},
		},
		"runtimes in the command line": {
			"{}", []string{"--add-runtime=crun=/usr/bin/crun", "--default-runtime=crun"}, []string{"crun", "gpu-cdi"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			files := map[string]string{
				"etc/systemd/system/docker.service": "[Service]\nExecStart=/usr/bin/dockerd " + strings.Join(c.flags, " ") + "\n",
				"usr/bin/crun":                      "#!/bin/sh\n",
			}
			if c.file != "" {
				files["etc/docker/daemon.json"] = c.file
			}
			h.install("docker", files)
			config := loadDocker(t, filepath.Join(h.root, "etc/docker/daemon.json"), c.flags)
			if got := config.Runtimes["gpu-cdi"]; got.Path != h.wrapper("docker") {
				t.Errorf("the runtime is %+v", got)
			}
			if names := slices.Sorted(maps.Keys(config.Runtimes)); !slices.Equal(names, c.want) {
				t.Errorf("the runtimes are %v", names)
			}
		})
	}
}

// loadDocker does what dockerd --validate does, with those flags of dockerd that hook install reads. The module has no
// function that makes them.
func loadDocker(t *testing.T, path string, args []string) *docker.Config {
	t.Helper()
	defaults, err := docker.New()
	testenv.Must(t, err)
	flags := pflag.NewFlagSet("dockerd", pflag.ContinueOnError)
	flags.BoolVar(&defaults.Debug, "debug", false, "")
	flags.StringVar(&defaults.DefaultRuntime, "default-runtime", defaults.DefaultRuntime, "")
	flags.Var(opts.NewNamedRuntimeOpt("runtimes", &defaults.Runtimes, docker.StockRuntimeName), "add-runtime", "")
	flags.Var(opts.NewNamedMapOpts("features", map[string]string{}, nil), "feature", "")
	testenv.Must(t, flags.Parse(args))
	config, err := docker.MergeDaemonConfigurations(defaults, flags, path)
	testenv.Must(t, err)
	return config
}

func TestPodman(t *testing.T) {
	h := newHost(t)
	h.install("podman", map[string]string{"etc/containers/containers.conf": "[engine]\nruntime = 'crun'\n"})
	t.Setenv("CONTAINERS_CONF", filepath.Join(h.root, "etc/containers/containers.conf.d/50-gpu-cdi-plugin.conf"))
	c, err := podman.New(nil)
	testenv.Must(t, err)
	paths, dirs := c.Engine.OCIRuntimes["gpu-cdi"], c.Engine.HooksDir.Get()
	if len(paths) != 1 || paths[0] != h.wrapper("podman") || len(dirs) != 2 {
		t.Fatalf("the runtime is %v, and the directories of hooks are %v", paths, dirs)
	}
	_, err = hooks.New(t.Context(), []string{filepath.Join(h.root, dirs[1])}, []string{"precreate", "poststop"})
	testenv.Must(t, err)
}

func TestLiveHook(t *testing.T) {
	h := newHost(t)
	h.install("live", nil)
	_, err := hooks.New(t.Context(), []string{filepath.Join(h.root, "usr/share/containers/oci/hooks.d")}, nil)
	testenv.Must(t, err)
}
