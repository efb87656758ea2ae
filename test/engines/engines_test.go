// Package engines holds what hook install writes against the parsers of the engines.
package engines

import (
	"os"
	"path/filepath"
	"testing"

	containerd1 "github.com/containerd/containerd/services/server/config"
	containerd2 "github.com/containerd/containerd/v2/cmd/containerd/server/config"
	"github.com/cri-o/cri-o/pkg/config"
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
	c, err := config.DefaultConfig()
	testenv.Must(t, err)
	testenv.Must(t, c.UpdateFromPath(t.Context(), filepath.Join(h.root, "etc/crio/crio.conf.d")))
	testenv.Must(t, c.ValidateDefaultRuntime())
	testenv.Must(t, c.ValidateRuntimes())
	testenv.Must(t, c.TranslateMonitorFields(true))
	got := c.Runtimes["gpu-cdi"]
	if got == nil || got.RuntimePath != h.wrapper("crio") || got.MonitorPath != h.conmon ||
		got.RuntimeRoot != "/run/site" || len(got.MonitorEnv) != 1 || len(got.DefaultAnnotations) != 1 {
		t.Errorf("the handler is %+v", got)
	}
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
