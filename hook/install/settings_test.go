package install

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestSettings(t *testing.T) {
	on, off, five := true, false, int64(5)
	none := map[string]string{}
	for name, c := range map[string]struct {
		engine string
		files  map[string]string
		want   Settings
	}{
		"no file": {"podman", nil, Settings{Runtimes: none}},
		"podman, whose later files count": {
			"podman", map[string]string{
				"/usr/share/containers/containers.conf": "[engine]\ncdi_spec_dirs = [\"/a\"]\n[containers]\npids_limit = 5\n" +
					"devices = [\"nvidia.com/gpu=all\"]\n",
				"/etc/containers/containers.conf.d/b.conf": "[engine]\nruntime = \"crun\"\n" +
					"cdi_spec_dirs = [\"/b\", {append = true}]\n" +
					"[engine.runtimes]\ncrun = [\"/opt/crun\", \"/usr/bin/crun\"]\n[containers]\nlabel = false\n",
			}, Settings{
				Files:    []string{"/usr/share/containers/containers.conf", "/etc/containers/containers.conf.d/b.conf"},
				SpecDirs: []string{"/b"}, SpecDirsFile: "/etc/containers/containers.conf.d/b.conf",
				Runtimes: map[string]string{"crun": "/usr/bin/crun"}, Default: "crun",
				DefaultFile: "/etc/containers/containers.conf.d/b.conf",
				PIDsLimit:   &five, PIDsFile: "/usr/share/containers/containers.conf", SELinux: &off,
				Devices: []string{"nvidia.com/gpu=all"}, DevicesFile: "/usr/share/containers/containers.conf",
			},
		},
		"CRI-O": {
			"crio", map[string]string{
				"/etc/crio/crio.conf": "[crio.runtime]\ncdi_spec_dirs = []\nhooks_dir = [\"/h\"]\nselinux = true\n" +
					"additional_devices = [\"/dev/nvidia0\"]\n",
				"/etc/crio/crio.conf.d/10.conf": "[crio.runtime]\ndefault_runtime = \"x\"\n[crio.runtime.runtimes.x]\n" +
					"runtime_path = \"/usr/bin/x\"\n",
			}, Settings{
				Files:    []string{"/etc/crio/crio.conf", "/etc/crio/crio.conf.d/10.conf"},
				SpecDirs: []string{}, SpecDirsFile: "/etc/crio/crio.conf", HookDirs: []string{"/h"},
				HookDirsFile: "/etc/crio/crio.conf", Runtimes: map[string]string{"x": "/usr/bin/x"}, Default: "x",
				DefaultFile: "/etc/crio/crio.conf.d/10.conf", SELinux: &on,
				Devices: []string{"/dev/nvidia0"}, DevicesFile: "/etc/crio/crio.conf",
			},
		},
		"containerd 1, where a later table replaces an earlier one": {
			"containerd", map[string]string{
				containerdFile: "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n" +
					"[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n",
				"/etc/containerd/conf.d/a.toml": "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n" +
					"default_runtime_name = \"runc\"\n",
			}, Settings{
				Files: []string{containerdFile, "/etc/containerd/conf.d/a.toml"}, Version: 2, CDIFile: containerdFile,
				Runtimes: none, Default: "runc", DefaultFile: "/etc/containerd/conf.d/a.toml",
			},
		},
		"containerd 2, which merges tables": {
			"containerd", map[string]string{
				containerdFile: "version = 3\nimports = [\"conf.d/*.toml\"]\n" +
					"disabled_plugins = [\"io.containerd.cri.v1.runtime\"]\n" +
					"[plugins.\"io.containerd.cri.v1.runtime\"]\nenable_cdi = true\nenable_selinux = true\n",
				"/etc/containerd/conf.d/a.toml": "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\nenable_cdi = false\n" +
					"[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.kata]\nruntime_type = \"io.containerd.kata.v2\"\n",
			}, Settings{
				Files: []string{containerdFile, "/etc/containerd/conf.d/a.toml"}, Version: 3, WithoutCRI: containerdFile,
				CDI: &off, CDIFile: "/etc/containerd/conf.d/a.toml", Runtimes: map[string]string{"kata": ""}, SELinux: &on,
			},
		},
		"the file of docker's package of containerd, without CRI": {
			"containerd",
			map[string]string{containerdFile: "disabled_plugins = [\"cri\"]\n"},
			Settings{Files: []string{containerdFile}, WithoutCRI: containerdFile, Runtimes: none},
		},
		"containerd's file of version 1": {
			"containerd",
			map[string]string{containerdFile: "[plugins.cri]\nenable_selinux = true\n" +
				"[plugins.cri.containerd]\ndefault_runtime_name = \"nvidia\"\n"},
			Settings{
				Files: []string{containerdFile}, Runtimes: none, Default: "nvidia", DefaultFile: containerdFile, SELinux: &on,
			},
		},
		"docker by its file": {
			"docker", map[string]string{daemonFile: `{"features": {"cdi": true}, "cdi-spec-dirs": ["/c"], "default-runtime": "x",
				"runtimes": {"x": {"path": "/usr/bin/x"}, "y": {"runtimeType": "io.containerd.runc.v2",
				"options": {"BinaryName": "/usr/bin/y"}}}, "selinux-enabled": true}`}, Settings{
				Files: []string{daemonFile}, CDI: &on, CDIFile: daemonFile, SpecDirs: []string{"/c"}, SpecDirsFile: daemonFile,
				Runtimes: map[string]string{"x": "/usr/bin/x", "y": "/usr/bin/y"}, Default: "x", DefaultFile: daemonFile,
				SELinux: &on,
			},
		},
		"docker by its command line": {
			"docker", map[string]string{"/etc/default/docker": "DOCKER_OPTS=\"--feature cdi=true --cdi-spec-dir=/c " +
				"--cdi-spec-dir /d --default-runtime=x --add-runtime x=/usr/bin/x\"\n"}, Settings{
				Files: []string{"/etc/default/docker"}, CDI: &on, CDIFile: "/etc/default/docker", SpecDirs: []string{"/c", "/d"},
				SpecDirsFile: "/etc/default/docker", Runtimes: map[string]string{"x": "/usr/bin/x"}, Default: "x",
				DefaultFile: "/etc/default/docker",
			},
		},
		"docker that reads another file": {
			"docker",
			map[string]string{"/etc/default/docker": "OPTIONS=--config-file=/srv/d.json\n", daemonFile: `{`},
			Settings{Elsewhere: "/srv/d.json", Runtimes: none},
		},
	} {
		t.Run(name, func(t *testing.T) {
			files := map[string]*File{}
			for path, text := range c.files {
				files[path] = &File{Data: []byte(text)}
			}
			h := newHost(files)
			h.isFile = func(name string) bool { return name == "/usr/bin/crun" }
			got, err := h.Settings(c.engine)
			testenv.Must(t, err)
			if diff := cmp.Diff(c.want, *got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestSettingsOfADamagedFile(t *testing.T) {
	for engine, file := range map[string]string{
		"podman": "/etc/containers/containers.conf", "crio": "/etc/crio/crio.conf", "containerd": containerdFile,
		"docker": daemonFile,
	} {
		for _, text := range []string{"[", "{", "\x00", "version = 1\n["} {
			h := newHost(map[string]*File{file: {Data: []byte(text)}})
			if s, err := h.Settings(engine); err == nil {
				t.Errorf("%s, %q: got %+v", engine, text, s)
			}
		}
	}
	if _, err := newHost(nil).Settings("lxc"); err == nil {
		t.Error("want an error for an unknown engine")
	}
}

// Values of unexpected types are ignored, as the engines' own errors are not ours to report.
func TestSettingsOfOtherTypes(t *testing.T) {
	for engine, c := range map[string][2]string{
		"podman":     {"/etc/containers/containers.conf", "engine = 1\ncontainers = []\n"},
		"crio":       {"/etc/crio/crio.conf", "crio = [1]\n"},
		"containerd": {containerdFile, "version = 3\nplugins = 3\n"},
		"docker":     {daemonFile, `{"other": {"cdi": "x"}}`},
	} {
		if _, err := newHost(map[string]*File{c[0]: {Data: []byte(c[1])}}).Settings(engine); err != nil {
			t.Errorf("%s: %v", engine, err)
		}
	}
}

func FuzzSettings(f *testing.F) {
	files := map[string]string{
		"podman": "/etc/containers/containers.conf", "crio": "/etc/crio/crio.conf", "containerd": containerdFile,
		"docker": daemonFile,
	}
	for engine := range files {
		f.Add(engine, []byte("version = 3\n[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true\n"))
		f.Add(engine, []byte(`{"features": {"cdi": true}, "runtimes": {"x": {"path": "/x"}}}`))
		f.Add(engine, []byte("[crio.runtime]\nhooks_dir = [1]\n[engine]\nruntimes = 1\n"))
	}
	f.Fuzz(func(t *testing.T, engine string, text []byte) {
		if files[engine] == "" {
			return
		}
		s, err := newHost(map[string]*File{files[engine]: {Data: text}}).Settings(engine)
		if err == nil && s == nil {
			t.Error("neither settings nor an error")
		}
		_ = s.Program()
	})
}

// Parsers compare each key with all others. Files that would take minutes are refused, by hook install too.
func TestConfigurationsThatAreTooLarge(t *testing.T) {
	lines := func(format string, n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, format, i)
		}
		return b.String()
	}
	object := func(n int) string { return strings.TrimSuffix(lines(`"r%d": {"path": "/x"},`, n), ",") }
	for name, c := range map[string]struct {
		engine, file, text, want string
	}{
		"many dotted keys of TOML": {
			"containerd", containerdFile, lines("a.b%d.c=1\n", 100_000), `it has "=" 100000 times, the limit is 5000`,
		},
		"many tables of TOML": {
			"crio", "/etc/crio/crio.conf", lines("[a.b%d]\n", 100_000), `it has "[" 100000 times, the limit is 5000`,
		},
		"a deep key of TOML": {
			"podman", "/etc/containers/containers.conf", "a" + strings.Repeat(".a", 1_000_000) + "=1\n",
			`it has "." 1000000 times, the limit is 20000`,
		},
		"many members of JSON": {
			"docker", daemonFile, "{" + object(100_000) + "}", "it has an object with more than 1000 members",
		},
		"many runtimes": {"docker", daemonFile, `{"runtimes": {` + object(101) + `}}`, ""},
		"very many runtimes": {
			"docker", daemonFile, `{"runtimes": {` + object(100_000) + `}}`, "more than 1000 members",
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(map[string]*File{c.file: {Data: []byte(c.text)}})
			_, err := h.Settings(c.engine)
			if c.engine == "docker" && strings.Contains(c.text, "runtimes") {
				if err == nil || !strings.Contains(err.Error(), "runtimes, the limit is 100") {
					t.Errorf("the settings: %v", err)
				}
			} else if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the settings: %v, want %q", err, c.want)
			}
			_, err = h.Install([]string{c.engine}, "/usr/libexec/prestart-hook")
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("the installation: %v, want %q", err, c.want)
			}
		})
	}
}
