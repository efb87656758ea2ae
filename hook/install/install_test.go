package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/pelletier/go-toml/v2"
	"github.com/rogpeppe/go-internal/txtar"

	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

const testHook = "/usr/local/sbin/prestart-hook"

// newHost returns a host with these files, where directories exist that have one.
func newHost(files map[string]*File) *Host {
	isFile := func(name string) bool { return files[name] != nil }
	leadsTo := func(name string) string {
		if f := files[name]; f != nil && f.Link != "" {
			return f.Link
		}
		return name
	}
	return &Host{files: files, isFile: isFile, leadsTo: leadsTo, isDir: func(name string) bool {
		for file := range files {
			if strings.HasPrefix(file, name+"/") {
				return true
			}
		}
		return false
	}}
}

// after returns the host as it is after a plan.
func after(h *Host, p *Plan) *Host {
	files := maps.Clone(h.files)
	for _, c := range p.Changes {
		files[c.Path] = c.After
		if c.After == nil {
			delete(files, c.Path)
		}
	}
	return newHost(files)
}

func texts(h *Host) map[string]string {
	all := map[string]string{}
	for name, f := range h.files {
		all[name] = string(f.Data)
		if f.Link != "" {
			all[name] = "link to " + f.Link + "\n"
		}
	}
	return all
}

func mustPlan(t *testing.T, p *Plan, err error) *Plan {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Each file in testdata has an engine, a host before, in host/, and what is made and changed, in installed/. Hosts with
// and without a line break at the end of their files are as before after the removal.
func TestInstallAndUninstall(t *testing.T) {
	cases, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(cases) == 0 {
		t.Fatalf("%d golden files, %v", len(cases), err)
	}
	for _, golden := range cases {
		t.Run(strings.TrimSuffix(filepath.Base(golden), ".txtar"), func(t *testing.T) {
			archive, err := txtar.ParseFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			engines := strings.Fields(string(archive.Comment))
			files, want := map[string]*File{}, map[string]string{}
			var input []txtar.File
			for _, f := range archive.Files {
				if name, ok := strings.CutPrefix(f.Name, "host"); ok {
					files[name] = &File{Data: f.Data}
					input = append(input, f)
				} else {
					want[strings.TrimPrefix(f.Name, "installed")] = string(f.Data)
				}
			}
			h := newHost(files)
			p, err := h.Install(engines, testHook)
			installed := after(h, mustPlan(t, p, err))
			got := map[string]string{}
			for name, text := range texts(installed) {
				if f := files[name]; f == nil || string(f.Data) != text {
					got[name] = text
				}
			}
			if *update {
				archive.Files = input
				for _, name := range slices.Sorted(maps.Keys(got)) {
					archive.Files = append(archive.Files, txtar.File{Name: "installed" + name, Data: []byte(got[name])})
				}
				if err := os.WriteFile(golden, txtar.Format(archive), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("made and changed (-want +got; -update writes the file):\n%s", diff)
			}
			p, err = installed.Install(engines, testHook)
			if mustPlan(t, p, err); len(p.Changes) > 0 || len(p.Restart) > 0 {
				t.Errorf("a second Install changes %v", p.Changes)
			}
			checkRemoved(t, h, engines)
			for _, f := range files {
				f.Data = []byte(strings.TrimSuffix(string(f.Data), "\n"))
			}
			checkRemoved(t, h, engines)
		})
	}
}

// checkRemoved checks that after Install and Uninstall everything is as before, also if the hook was elsewhere first.
func checkRemoved(t *testing.T, before *Host, engines []string) {
	t.Helper()
	installed := before
	for _, hook := range []string{"/opt/old/prestart-hook", testHook} {
		p, err := installed.Install(engines, hook)
		installed = after(installed, mustPlan(t, p, err))
	}
	p, err := installed.Uninstall(engines)
	removed := after(installed, mustPlan(t, p, err))
	if diff := cmp.Diff(texts(before), texts(removed)); diff != "" {
		t.Errorf("Uninstall (-before +after):\n%s", diff)
	}
	p, err = removed.Uninstall(engines)
	if mustPlan(t, p, err); len(p.Changes) > 0 {
		t.Errorf("a second Uninstall changes %v", p.Changes)
	}
}

// Each engine has a link of its own. That of version 0.1.0 is for all of them, and containers may still use it.
func TestLinksStayUntilTheirEnginesAreUninstalled(t *testing.T) {
	const old, crio, podman = "/usr/local/sbin/gpu-cdi-runtime", "/usr/local/sbin/gpu-cdi-runtime-crio",
		"/usr/local/sbin/gpu-cdi-runtime-podman"
	h := newHost(map[string]*File{
		recordFile: {Data: []byte(`{"installed": ["crio"], "digests": {"` + old + `": "link to prestart-hook"}}`)},
		old:        {Link: "prestart-hook"},
	})
	p, err := h.Install([]string{"crio", "podman", "live"}, testHook)
	h = after(h, mustPlan(t, p, err))
	for _, step := range []struct {
		engine string
		want   []string
	}{{"podman", []string{old, crio}}, {"crio", nil}} {
		p, err := h.Uninstall([]string{step.engine})
		h = after(h, mustPlan(t, p, err))
		for _, link := range []string{old, crio, podman} {
			if (h.files[link] != nil) != slices.Contains(step.want, link) {
				t.Errorf("after %s: %s is %v", step.engine, link, h.files[link])
			}
		}
	}
	if installed, err := h.Installed(); err != nil || !slices.Equal(installed, []string{"live"}) {
		t.Errorf("installed: %v, %v", installed, err)
	}
	if text := texts(h)[recordFile]; strings.Contains(text, crioDropIn) || strings.Contains(text, podmanDropIn) {
		t.Errorf("the record has files that are gone:\n%s", text)
	}
}

// A link or file that was there before Install stays, even if it is the same as ours.
func TestFilesThatWereThere(t *testing.T) {
	h := newHost(map[string]*File{"/usr/local/sbin/gpu-cdi-runtime": {Link: "prestart-hook"}})
	checkRemoved(t, h, []string{"wrapper"})

	const file = commonHooks + "/" + liveHook
	h = newHost(map[string]*File{})
	p, err := h.Install([]string{"live"}, testHook)
	h = newHost(map[string]*File{file: after(h, mustPlan(t, p, err)).files[file]})
	p, err = h.Install([]string{"live"}, testHook)
	installed := after(h, mustPlan(t, p, err))
	p, err = installed.Uninstall([]string{"live"})
	if diff := cmp.Diff(texts(h), texts(after(installed, mustPlan(t, p, err)))); diff != "" {
		t.Errorf("Uninstall (-before +after):\n%s", diff)
	}
}

// A file of ours that an administrator has changed stays as it is, and the plan says so. It is written again once it
// was removed. Uninstall refuses if the file runs our programs, which go.
func TestChangedFilesOfOurs(t *testing.T) {
	const runsOurs = "was changed after hook install wrote it, and runs gpu-cdi-runtime or prestart-hook"
	for name, c := range map[string]struct{ engine, file, old, new, err string }{
		"a handler":              {"crio", crioDropIn, "[crio", "[crio]\nlog_level = 'debug'\n[crio", runsOurs},
		"a hook of podman":       {"podman", precreate, `"precreate"]`, `"precreate", "x"]`, runsOurs},
		"a hook for all":         {"live", commonHooks + "/" + liveHook, `"annotations"`, `"a"`, runsOurs},
		"no TOML":                {"crio", crioDropIn, "[crio", "crio", runsOurs},
		"what others have there": {"crio", crioDropIn, "gpu-cdi", "other", ""},
	} {
		t.Run(name, func(t *testing.T) {
			installed := newHost(map[string]*File{})
			p, err := installed.Install([]string{c.engine}, testHook)
			installed = after(installed, mustPlan(t, p, err))
			edited := strings.ReplaceAll(string(installed.files[c.file].Data), c.old, c.new)
			installed.files[c.file] = &File{Data: []byte(edited)}
			if name != "no TOML" {
				for _, hook := range []string{testHook, "/opt/new/prestart-hook"} {
					p, err := installed.Install([]string{c.engine}, hook)
					got := after(installed, mustPlan(t, p, err)).files[c.file]
					if string(got.Data) != edited || !slices.Equal(p.Kept, []string{c.file}) {
						t.Errorf("Install for %s: %q, kept %q", hook, got.Data, p.Kept)
					}
				}
			}
			p, err = installed.Uninstall([]string{c.engine})
			if c.err != "" {
				if p != nil || err == nil || name != "no TOML" && !strings.Contains(err.Error(), c.err) {
					t.Errorf("Uninstall: %v, want %q", err, c.err)
				}
			} else if removed := after(installed, mustPlan(t, p, err)); len(removed.files) != 1 ||
				!slices.Equal(p.Kept, []string{c.file}) {
				t.Errorf("Uninstall leaves %v, kept %q", texts(removed), p.Kept)
			}
			delete(installed.files, c.file)
			p, err = installed.Install([]string{c.engine}, testHook)
			if after(installed, mustPlan(t, p, err)).files[c.file] == nil || len(p.Kept) > 0 {
				t.Errorf("Install without the file changes %v, kept %q", p.Changes, p.Kept)
			}
		})
	}
}

// Our files and entries are recognised by what they say: other programs write files again without comments.
func TestRewrittenFiles(t *testing.T) {
	reformat := func(file string, data []byte) []byte {
		var config map[string]any
		if path.Ext(file) == ".json" {
			testenv.Must(t, json.Unmarshal(data, &config))
			text, err := json.Marshal(config)
			testenv.Must(t, err)
			return text
		}
		testenv.Must(t, toml.Unmarshal(data, &config))
		text, err := toml.Marshal(config)
		testenv.Must(t, err)
		return text
	}
	const (
		version2 = "version = 2\n[debug]\nlevel = 'info'\n"
		tables   = "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.gpu-cdi"
	)
	for name, c := range map[string]struct {
		engine, file, before string
		change               func(text string) string // of the file after Install and a reformatting
	}{
		"containerd, version 2": {"containerd", containerdFile, version2, nil},
		"containerd, version 3": {"containerd", containerdFile, "version = 3\n[debug]\nlevel = 'info'\n", nil},
		"containerd, migrated": {"containerd", containerdFile, version2, func(text string) string {
			return strings.NewReplacer("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "= 2", "= 3").Replace(text)
		}},
		"containerd, indented, with comments": {"containerd", containerdFile, version2, func(string) string {
			return "version = 2\n\n  # BEGIN gpu-cdi-plugin hook install\n  " + tables + "]\n    a = [\n    ['x'],\n    ]\n" +
				"  " + tables + ".options]\n    BinaryName = '/usr/local/sbin/gpu-cdi-runtime'\n" +
				"  # END gpu-cdi-plugin hook install\n\n# Others'.\n[debug]\nlevel = 'info'\n"
		}},
		"containerd, others between the comments": {"containerd", containerdFile, "version = 2\n", func(string) string {
			return "version = 2\n" + beginBlock + tables + ".options]\nBinaryName = '/usr/local/sbin/gpu-cdi-runtime'\n" +
				"[debug]\nlevel = 'info'\n" + endBlock
		}},
		"containerd, keys after our part": {"containerd", containerdFile, "version = 2\n", func(string) string {
			return "version = 2\n[debug]\nlevel = 'info'\n" + beginBlock + tables + ".options]\n" +
				"BinaryName = '/usr/local/sbin/gpu-cdi-runtime'\n" + endBlock + "NoNewKeyring = true\n"
		}},
		"docker":              {"docker", daemonFile, `{"a": 1}`, nil},
		"a drop-in of CRI-O":  {"crio", crioDropIn, "", nil},
		"a drop-in of podman": {"podman", podmanDropIn, "", nil},
		"a hook of podman":    {"podman", precreate, "", nil},
		"a hook for all":      {"live", commonHooks + "/" + liveHook, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(map[string]*File{})
			if c.before != "" {
				h.files[c.file] = &File{Data: []byte(c.before)}
			}
			p, err := h.Install([]string{c.engine}, testHook)
			h = after(h, mustPlan(t, p, err))
			text := reformat(c.file, h.files[c.file].Data)
			if c.change != nil {
				text = []byte(c.change(string(text)))
			}
			h.files[c.file] = &File{Data: text}
			p, err = h.Install([]string{c.engine}, testHook)
			again := after(h, mustPlan(t, p, err))
			for _, h := range []*Host{h, again} {
				p, err := h.Uninstall([]string{c.engine})
				removed := after(h, mustPlan(t, p, err))
				f := removed.files[c.file]
				if (f != nil) != (c.before != "") || len(p.Kept) > 0 || len(removed.files) > 1 {
					t.Fatalf("Uninstall leaves %v, kept %q", texts(removed), p.Kept)
				}
				if f == nil {
					continue
				}
				left := string(f.Data)
				for _, others := range []string{"[debug]\nlevel = 'info'\n", "# Others'."} {
					if strings.Contains(string(text), others) != strings.Contains(left, others) {
						t.Errorf("Uninstall changes %q", others)
					}
				}
				if strings.Contains(left, "gpu-cdi") || strings.Contains(left, "NoNewKeyring") {
					t.Errorf("Uninstall leaves\n%s", left)
				}
			}
		})
	}
}

// docker takes its runtimes when it is reloaded, but not features.cdi, which version 0.1.0 set. No service reads the
// files of gpu-cdi-runtime.
func TestWhichServicesReadTheFiles(t *testing.T) {
	engines := []string{"docker", "containerd", "podman", "crio"}
	h := newHost(map[string]*File{})
	p, err := h.Install(engines, testHook)
	mustPlan(t, p, err)
	if !slices.Equal(p.Restart, []string{"containerd", "crio"}) || !slices.Equal(p.Reload, []string{"docker"}) {
		t.Errorf("restart %q, reload %q", p.Restart, p.Reload)
	}
	h = after(h, p)
	for _, engine := range engines {
		delete(h.files, runtimeFile(engine))
	}
	p, err = h.Install(engines, testHook)
	h = after(h, mustPlan(t, p, err))
	if len(p.Changes) == 0 || len(p.Restart) > 0 || len(p.Reload) > 0 {
		t.Errorf("gpu-cdi-runtime's files are made: restart %q, reload %q", p.Restart, p.Reload)
	}
	for _, file := range []string{daemonFile, containerdFile, crioDropIn} {
		delete(h.files, file)
	}
	p, err = h.Uninstall(engines)
	mustPlan(t, p, err)
	if len(p.Changes) == 0 || len(p.Restart) > 0 || len(p.Reload) > 0 {
		t.Errorf("gpu-cdi-runtime's files are removed: restart %q, reload %q", p.Restart, p.Reload)
	}
	h = newHost(map[string]*File{
		recordFile: {Data: []byte(`{"installed": ["docker"], "daemonJSON": ["features", "features.cdi"]}`)},
		daemonFile: {Data: []byte(`{"features": {"cdi": true}}`)},
	})
	p, err = h.Uninstall([]string{"docker"})
	mustPlan(t, p, err)
	if !slices.Equal(p.Restart, []string{"docker"}) || len(p.Reload) > 0 {
		t.Errorf("restart %q, reload %q", p.Restart, p.Reload)
	}
}

// Without the record an entry is ours by its program.
func TestUninstallWithoutTheRecord(t *testing.T) {
	for engine, file := range map[string]string{"docker": daemonFile, "containerd": containerdFile} {
		h := newHost(map[string]*File{file: {Data: []byte("{\n}\n")}})
		if engine == "containerd" {
			h.files[file].Data = []byte("version = 2\n")
		}
		p, err := h.Install([]string{engine}, testHook)
		h = after(h, mustPlan(t, p, err))
		delete(h.files, recordFile)
		p, err = h.Uninstall([]string{engine})
		if text := texts(after(h, mustPlan(t, p, err)))[file]; strings.Contains(text, "gpu-cdi") {
			t.Errorf("Uninstall leaves\n%s", text)
		}
	}
	h := newHost(map[string]*File{daemonFile: {Data: []byte(`{"runtimes": {"gpu-cdi": {"path": "/x"}}}`)}})
	p, err := h.Uninstall([]string{"docker"})
	if mustPlan(t, p, err); len(p.Changes) > 0 {
		t.Errorf("another program's runtime gpu-cdi: Uninstall changes %v", p.Changes)
	}
}

// An engine whose default runtime is gone starts no containers.
func TestUninstallOfTheDefaultRuntime(t *testing.T) {
	for name, c := range map[string]struct{ engine, file, content, want string }{
		"podman": {
			"podman", "/etc/containers/containers.conf", "[engine]\nruntime = 'gpu-cdi'\n", "(runtime)",
		},
		"CRI-O": {"crio", "/etc/crio/crio.conf.d/99", "[crio.runtime]\ndefault_runtime = 'gpu-cdi'\n", "(default_runtime)"},
		"docker": {
			"docker", daemonFile,
			`{"default-runtime": "gpu-cdi", "runtimes": {"gpu-cdi": {"path": "/usr/local/sbin/gpu-cdi-runtime"}}}`,
			"(default-runtime)",
		},
		"containerd": {
			"containerd", containerdFile,
			"version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd]\ndefault_runtime_name = 'gpu-cdi'\n",
			"(default_runtime_name)",
		},
		"containerd, imported": {
			"containerd", "/etc/containerd/conf.d/99.toml",
			"version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'gpu-cdi'\n",
			"(default_runtime_name)",
		},
		"docker, by its unit": {
			"docker", "/etc/systemd/system/docker.service", "[Service]\nExecStart=dockerd --default-runtime gpu-cdi\n",
			"(--default-runtime)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(map[string]*File{
				containerdFile: {Data: []byte("version = 3\nimports = ['conf.d/*.toml']\n")},
				c.file:         {Data: []byte(c.content)},
			})
			if name == "containerd" {
				h.files[containerdFile].Data = []byte(c.content)
			}
			for range 2 { // a second Install copies our own entry
				p, err := h.Install([]string{c.engine}, testHook)
				h = after(h, mustPlan(t, p, err))
			}
			p, err := h.Uninstall([]string{c.engine})
			want := c.file + " makes gpu-cdi the default runtime " + c.want
			if p != nil || err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got the error %v, want %q", err, want)
			}
		})
	}
}

// Uninstall removes the link gpu-cdi-runtime only if it leads to our hook.
func TestAWrapperThatLeadsElsewhere(t *testing.T) {
	h := newHost(map[string]*File{})
	p, err := h.Install([]string{"crio"}, testHook)
	h = after(h, mustPlan(t, p, err))
	wrapper := path.Join(path.Dir(testHook), wrapperName+"-crio")
	h.files[wrapper] = &File{Link: "/usr/bin/other-runtime"}
	p, err = h.Uninstall([]string{"crio"})
	if after(h, mustPlan(t, p, err)).files[wrapper] == nil || !slices.Equal(p.Kept, []string{wrapper}) {
		t.Errorf("Uninstall changes %v, kept %q", p.Changes, p.Kept)
	}
}

// What gpu-cdi-runtime runs is the default runtime of the engine, as a path or as a name for its PATH.
func TestTheDefaultRuntimeOfAnEngine(t *testing.T) {
	const (
		unit    = "/usr/lib/systemd/system/docker.service"
		podman  = "/etc/containers/containers.conf"
		version = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd"

		version2 = "version = 2\n"
		cri2     = "[plugins.'io.containerd.grpc.v1.cri'.containerd]\ndefault_runtime_name = 'x'\n" +
			"[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.x.options]\nBinaryName = '/opt/x'\n"
	)
	for name, c := range map[string]struct {
		files map[string]string
		want  map[string]string // by engine; "" for none
	}{
		"nothing is configured": {
			nil, map[string]string{"docker": "runc", "containerd": "runc", "crio": "", "podman": ""},
		},
		"runc is installed": {
			map[string]string{"/usr/sbin/runc": ""},
			map[string]string{"docker": "runc", "containerd": "runc", "crio": "", "podman": "runc"},
		},
		"runc and crun are installed": {
			map[string]string{"/usr/sbin/runc": "", "/usr/bin/crun": ""},
			map[string]string{"docker": "runc", "containerd": "runc", "crio": "crun", "podman": "crun"},
		},
		"CRI-O has its own": {map[string]string{
			"/etc/crio/crio.conf.d/10": "[crio.runtime.runtimes.crun]\nruntime_path = '/usr/libexec/crio/crun'\n",
			"/usr/libexec/crio/crun":   "",
		}, map[string]string{"crio": "/usr/libexec/crio/crun"}},
		"CRI-O names one": {map[string]string{
			"/etc/crio/crio.conf": "[crio.runtime]\ndefault_runtime = 'site'\n[crio.runtime.runtimes.site]\n",
		}, map[string]string{"crio": "site"}},
		"containerd": {map[string]string{
			containerdFile: version + "]\ndefault_runtime_name = 'x'\n" +
				"[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.x.options]\nBinaryName = '/opt/x'\n",
			"/opt/x": "",
		}, map[string]string{"containerd": "/opt/x"}},
		"containerd 1, its table is replaced": {map[string]string{
			containerdFile:           version2 + "imports = ['a.toml', 'b.toml']\n" + cri2,
			"/etc/containerd/a.toml": version2 + "[plugins.'io.containerd.grpc.v1.cri']\n",
			"/etc/containerd/b.toml": version2, "/opt/x": "",
		}, map[string]string{"containerd": "runc"}},
		"containerd 1, its table stays": {map[string]string{
			containerdFile: version2 + "imports = ['a.toml']\n" + cri2, "/etc/containerd/a.toml": version2, "/opt/x": "",
		}, map[string]string{"containerd": "/opt/x"}},
		"docker, by daemon.json": {map[string]string{
			daemonFile: `{"default-runtime": "x", "runtimes": {"x": {"path": "/opt/x"}}}`, "/opt/x": "",
		}, map[string]string{"docker": "/opt/x"}},
		"docker, a name": {map[string]string{
			daemonFile: `{"default-runtime": "x", "runtimes": {"x": {"path": "runx"}}}`,
		}, map[string]string{"docker": "runx"}},
		"docker, runc's shim": {map[string]string{
			daemonFile: `{"default-runtime": "x", "runtimes": {"x": {"runtimeType": "io.containerd.runc.v2",
				"options": {"BinaryName": "runx"}}}}`,
		}, map[string]string{"docker": "runx"}},
		"docker, another shim": {map[string]string{
			daemonFile: `{"default-runtime": "x", "runtimes": {"x": {"runtimeType": "io.containerd.kata.v2"}}}`,
		}, map[string]string{"docker": "runc"}},
		"docker, by its unit": {map[string]string{
			unit: "[Service]\nExecStart=/usr/bin/dockerd \\\n --add-runtime x=/opt/x --default-runtime \"x\"\n" +
				"# --default-runtime=z\n",
			"/opt/x": "",
		}, map[string]string{"docker": "/opt/x"}},
		"docker, by a drop-in": {map[string]string{
			unit: "[Service]\nExecStart=/usr/bin/dockerd --default-runtime=y --config-file=/none\n",
			"/etc/systemd/system/docker.service.d/10.conf": "[Service]\nExecStart=\nExecStart=dockerd --default-runtime=x\n",
			daemonFile: `{"runtimes": {"x": {"path": "/opt/x"}}}`, "/opt/x": "",
		}, map[string]string{"docker": "/opt/x"}},
		"docker, by a replaced unit": {map[string]string{
			unit:                                   "[Service]\nExecStart=dockerd --default-runtime=y --add-runtime=y=/none\n",
			"/etc/systemd/system/docker.service":   "[Service]\nExecStart=dockerd --default-runtime=io.x\n",
			"/lib/systemd/system/docker.service.d": "", "/opt/x": "",
		}, map[string]string{"docker": "runc"}},
		"docker, by its environment": {map[string]string{
			"/etc/default/docker": "DOCKER_OPTS=\"--default-runtime=x --add-runtime=x=/opt/x\"\n", "/opt/x": "",
		}, map[string]string{"docker": "/opt/x"}},
		"podman, a path": {
			map[string]string{podman: "[engine]\nruntime = '/opt/x'\n", "/opt/x": ""}, map[string]string{"podman": "/opt/x"},
		},
		"podman, the first path of a name": {map[string]string{
			podman:                                  "[engine]\nruntime = 'x'\n",
			"/usr/share/containers/containers.conf": "[engine.runtimes]\nx = ['/none', '/opt/x', '/opt/y']\n",
			"/opt/x":                                "", "/opt/y": "",
		}, map[string]string{"podman": "/opt/x"}},
	} {
		t.Run(name, func(t *testing.T) {
			for engine, want := range c.want {
				h := newHost(map[string]*File{})
				for file, text := range c.files {
					h.files[file] = &File{Data: []byte(text)}
				}
				p, err := h.Install([]string{engine}, testHook)
				got := texts(after(h, mustPlan(t, p, err)))[runtimeFile(engine)]
				if want != "" {
					want = header + "runtime: \"" + want + "\"\n"
				}
				if got != want {
					t.Errorf("%s: got %q, want %q", engine, got, want)
				}
			}
		})
	}
}

// NVIDIA's runtime gives GPUs to images that ask for them, so it is never behind ours.
func TestNVIDIAsRuntimeIsNotBehindOurs(t *testing.T) {
	const (
		cri     = "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd"
		nvidia  = "/usr/bin/nvidia-container-runtime"
		toolkit = "/usr/local/nvidia/toolkit/nvidia-container-runtime.cdi"
	)
	defaults := map[string]func(program string) (engine, file, text string){
		"docker": func(p string) (string, string, string) {
			return "docker", daemonFile, `{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "` + p + `"}}}`
		},
		"docker by a shim": func(p string) (string, string, string) {
			return "docker", daemonFile, `{"default-runtime": "nvidia", "runtimes": {"nvidia": {
				"runtimeType": "io.containerd.runc.v2", "options": {"BinaryName": "` + p + `"}}}}`
		},
		"docker by its command line": func(p string) (string, string, string) {
			return "docker", "/etc/default/docker", "DOCKER_OPTS=--default-runtime=nvidia --add-runtime=nvidia=" + p + "\n"
		},
		"containerd": func(p string) (string, string, string) {
			return "containerd", containerdFile, cri + "]\ndefault_runtime_name = 'nvidia'\n" +
				"[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]\nBinaryName = '" + p + "'\n"
		},
		"CRI-O": func(p string) (string, string, string) {
			return "crio", "/etc/crio/crio.conf.d/99-nvidia.conf", "[crio.runtime]\ndefault_runtime = 'nvidia'\n" +
				"[crio.runtime.runtimes.nvidia]\nruntime_path = '" + p + "'\n"
		},
		"podman": func(p string) (string, string, string) {
			return "podman", "/etc/containers/containers.conf", "[engine]\nruntime = 'nvidia'\n" +
				"[engine.runtimes]\nnvidia = ['" + p + "']\n"
		},
	}
	for name, program := range map[string]string{
		"its path": nvidia, "its toolkit": toolkit, "a link to it": "/opt/nvidia",
	} {
		for of, setting := range defaults {
			t.Run(of+", "+name, func(t *testing.T) {
				engine, file, text := setting(program)
				files := map[string]*File{
					nvidia: {}, toolkit: {}, "/opt/nvidia": {Link: nvidia}, "/usr/sbin/runc": {Link: nvidia},
					file: {Data: []byte(text)},
				}
				_, err := newHost(files).Install([]string{engine}, testHook)
				if want := "neither runc nor crun"; err == nil || !strings.Contains(err.Error(), want) ||
					!strings.Contains(err.Error(), file) {
					t.Errorf("without another runtime: want %q and %s, got %v", want, file, err)
				}
				files["/usr/bin/crun"] = &File{}
				h := newHost(files)
				p, err := h.Install([]string{engine}, testHook)
				got := texts(after(h, mustPlan(t, p, err)))[runtimeFile(engine)]
				if want := header + "runtime: \"/usr/bin/crun\"\n"; got != want {
					t.Errorf("got %q, want %q", got, want)
				}
				if len(p.Warnings) != 1 || !strings.Contains(p.Warnings[0], "runs /usr/bin/crun in its place") {
					t.Errorf("it warns of %q", p.Warnings)
				}
			})
		}
	}
}

// After an administrator has made gpu-cdi the default runtime, a second Install keeps what is behind it.
func TestTheDefaultRuntimeIsOurs(t *testing.T) {
	const (
		cri  = "[plugins.'io.containerd.cri.v1.runtime'.containerd"
		opts = cri + ".runtimes.x.options]\nBinaryName = '/opt/x'\n"
	)
	for engine, c := range map[string]struct{ file, before, after string }{
		"docker": {
			daemonFile, `{"default-runtime": "x", "runtimes": {"x": {"path": "/opt/x"}}}`,
			`{"default-runtime": "gpu-cdi", "runtimes": {"x": {"path": "/opt/x"}}}`,
		},
		"podman": {
			"/etc/containers/containers.conf", "[engine]\nruntime = '/opt/x'\n", "[engine]\nruntime = 'gpu-cdi'\n",
		},
		"crio": {
			"/etc/crio/crio.conf",
			"[crio.runtime]\ndefault_runtime = 'x'\n[crio.runtime.runtimes.x]\nruntime_path = '/opt/x'\n",
			"[crio.runtime]\ndefault_runtime = 'gpu-cdi'\n[crio.runtime.runtimes.x]\nruntime_path = '/opt/x'\n",
		},
		"containerd": {
			"/etc/containerd/conf.d/90.toml", "version = 3\n" + cri + "]\ndefault_runtime_name = 'x'\n" + opts,
			"version = 3\n" + cri + "]\ndefault_runtime_name = 'gpu-cdi'\n" + opts,
		},
	} {
		t.Run(engine, func(t *testing.T) {
			h := newHost(map[string]*File{
				containerdFile: {Data: []byte("version = 3\nimports = ['conf.d/*.toml']\n")},
				c.file:         {Data: []byte(c.before)}, "/opt/x": {},
			})
			for _, text := range []string{c.before, c.after} {
				h.files[c.file] = &File{Data: []byte(text)}
				delete(h.files, crioDropIn)
				delete(h.files, containerdDropIn)
				p, err := h.Install([]string{engine}, testHook)
				h = after(h, mustPlan(t, p, err))
				if got := texts(h)[runtimeFile(engine)]; got != header+"runtime: \"/opt/x\"\n" {
					t.Errorf("with %s: got %q", text, got)
				}
			}
		})
	}
}

// Only our entries go from files that others have changed since.
func TestUninstallAfterChangesOfOthers(t *testing.T) {
	for name, c := range map[string]struct {
		engine, file, before string
		change               func(installed string) string
		want                 string // empty: no file
		isKept               bool
	}{
		"a key in a daemon.json that Install made": {
			"docker", daemonFile, "",
			func(s string) string { return strings.Replace(s, "{", `{"debug": true,`, 1) },
			"{\"debug\": true\n}\n", false,
		},
		"another program replaced daemon.json": {
			"docker", daemonFile, `{"debug": false}`,
			func(string) string {
				return `{"runtimes":{"gpu-cdi":{"path":"/usr/local/sbin/gpu-cdi-runtime"},"x":{"path":"/x"}},"debug":true}`
			},
			`{"runtimes":{"x":{"path":"/x"}},"debug":true}`, false,
		},
		"daemon.json is empty": {"docker", daemonFile, `{"a":1}`, func(string) string { return " \n" }, " \n", false},
		"another runtime has our name": {
			"docker", daemonFile, `{"a":1}`, func(s string) string { return strings.Replace(s, "gpu-cdi-runtime-", "", 1) },
			`{"runtimes": {"gpu-cdi": {"path": "/usr/local/sbin/docker"}},"a":1}`, true,
		},
		"our keys are gone": {
			"docker", daemonFile, "", func(string) string { return `{"debug": true}` }, `{"debug": true}`, false,
		},
		"lines behind our part of config.toml": {
			"containerd", containerdFile, "version = 3",
			func(s string) string { return s + "[debug]\nlevel = 'info'\n" },
			"version = 3\n[debug]\nlevel = 'info'\n", false,
		},
		"a comment behind our part of config.toml": {
			"containerd", containerdFile, "version = 3", func(s string) string { return s + "# Others'.\n" },
			"version = 3\n# Others'.\n", false,
		},
		"a file of another program in place of ours": {
			"crio", crioDropIn, "", func(string) string { return "[crio]\n" }, "[crio]\n", true,
		},
		"our file is gone": {"crio", crioDropIn, "", func(string) string { return "" }, "", false},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(map[string]*File{})
			if c.before != "" {
				h.files[c.file] = &File{Data: []byte(c.before)}
			}
			p, err := h.Install([]string{c.engine}, testHook)
			h = after(h, mustPlan(t, p, err))
			changed := c.change(string(h.files[c.file].Data))
			h.files[c.file] = &File{Data: []byte(changed)}
			if changed == "" {
				delete(h.files, c.file)
			}
			p, err = h.Uninstall([]string{c.engine})
			h = after(h, mustPlan(t, p, err))
			got := ""
			if f := h.files[c.file]; f != nil {
				got = string(f.Data)
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", c.file, diff)
			}
			if slices.Contains(p.Kept, c.file) != c.isKept {
				t.Errorf("kept %q", p.Kept)
			}
		})
	}
}

// The keys of an earlier installation are forgotten: an administrator may have set the same ones since.
func TestUninstallForgetsTheKeysOfDaemonJSON(t *testing.T) {
	h := newHost(map[string]*File{daemonFile: {Data: []byte(`{"a": 1}`)}})
	p, err := h.Install([]string{"docker", "wrapper"}, testHook)
	h = after(h, mustPlan(t, p, err))
	p, err = h.Uninstall([]string{"docker"})
	h = after(h, mustPlan(t, p, err))
	h.files[daemonFile] = &File{Data: []byte(`{"runtimes": {}}`)}
	p, err = h.Install([]string{"docker"}, testHook)
	h = after(h, mustPlan(t, p, err))
	p, err = h.Uninstall([]string{"docker"})
	if got := texts(after(h, mustPlan(t, p, err)))[daemonFile]; got != `{"runtimes": {}}` {
		t.Errorf("Uninstall leaves %q", got)
	}
}

// Version 0.1.0 also set features.cdi in daemon.json.
func TestUninstallOfVersion010(t *testing.T) {
	const record = `{
  "installed": ["docker"],
  "made": ["/var/lib/gpu-cdi-plugin"],
  "daemonJSON": ["features", "features.cdi", "runtimes", "runtimes.gpu-cdi"],
  "digests": {"/usr/local/sbin/gpu-cdi-runtime": "link to prestart-hook"}
}`
	const runtimes = `"runtimes": {"gpu-cdi": {"path": "/usr/local/sbin/gpu-cdi-runtime"}}`
	for name, c := range map[string]struct{ daemon, want string }{
		"as it was written":     {`{"features": {"cdi": true},` + runtimes + `,"a": 1}`, `{"a": 1}`},
		"with another feature":  {`{"features": {"cdi": true, "x": true},` + runtimes + `}`, `{"features": { "x": true}}`},
		"CDI was switched off":  {`{"features": {"cdi": false},` + runtimes + `}`, `{"features": {"cdi": false}}`},
		"the keys were removed": {`{"a": 1}`, `{"a": 1}`},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(map[string]*File{
				recordFile: {Data: []byte(record)}, daemonFile: {Data: []byte(c.daemon)},
				"/usr/local/sbin/gpu-cdi-runtime": {Link: "prestart-hook"},
			})
			p, err := h.Uninstall([]string{"docker"})
			want := map[string]string{daemonFile: c.want}
			if diff := cmp.Diff(want, texts(after(h, mustPlan(t, p, err)))); diff != "" {
				t.Errorf("Uninstall (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	const containerd2 = "version = 2\n"
	for name, c := range map[string]struct {
		engine, file, content string
		want                  string
	}{
		"no JSON":            {"docker", daemonFile, `{"debug": true,}`, "read /etc/docker/daemon.json: "},
		"UTF-16":             {"docker", daemonFile, "\xff\xfe{\x00}\x00", "/etc/docker/daemon.json is in UTF-16"},
		"a list":             {"docker", daemonFile, "[]", "it is not a JSON object"},
		"two values":         {"docker", daemonFile, "{} {}", "more than one JSON value"},
		"a key twice":        {"docker", daemonFile, `{"features": {}, "features": {}}`, `it has "features" twice`},
		"runtimes is a list": {"docker", daemonFile, `{"runtimes": []}`, "cannot unmarshal array"},
		"runtimes is null":   {"docker", daemonFile, `{"runtimes": null}`, "runtimes: it is not a JSON object"},
		"another runtime": {
			"docker", daemonFile, `{"runtimes": {"gpu-cdi": {"path": "/x"}}}`, "another runtime gpu-cdi",
		},
		"a runtime that is gone": {
			"docker", daemonFile, `{"default-runtime": "x", "runtimes": {"x": {"path": "/opt/x"}}}`,
			"/etc/docker/daemon.json names the runtime /opt/x, which does not exist",
		},
		"a handler's program that is gone": {
			"crio", "/etc/crio/crio.conf.d/99", "[crio.runtime.runtimes.crun]\nruntime_path = '/opt/x'\n",
			"/etc/crio/crio.conf.d/99 names the runtime /opt/x, which does not exist",
		},
		"another daemon.json": {
			"docker", "/etc/systemd/system/docker.service.d/x.conf", "[Service]\nExecStart=dockerd --config-file /x.json\n",
			"/etc/systemd/system/docker.service.d/x.conf sets --config-file to /x.json",
		},
		"no TOML":       {"containerd", containerdFile, "version = 2\n[a", "config.toml: line 2, column "},
		"version 1":     {"containerd", containerdFile, `oom_score = 0`, "has a version before 2"},
		"inline tables": {"containerd", containerdFile, containerd2 + "plugins = {}", "cannot be added"},
		"another handler": {
			"containerd", containerdFile,
			containerd2 + "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.gpu-cdi]", "already has another " +
				"runtime gpu-cdi",
		},
		"a drop-in":  {"crio", crioDropIn, "[crio]", crioDropIn + " was written by another program"},
		"a document": {"live", commonHooks + "/" + liveHook, "{}", "was written by another program"},
		"a handler of CRI-O": {
			"crio", "/etc/crio/crio.conf", "[crio.runtime.runtimes.gpu-cdi]",
			"/etc/crio/crio.conf already has another runtime gpu-cdi",
		},
		"virtual machines": {
			"crio", "/etc/crio/crio.conf",
			"[crio.runtime]\ndefault_runtime = 'kata'\n[crio.runtime.runtimes.kata]\nruntime_type = 'vm'\n",
			"/etc/crio/crio.conf has a default_runtime with virtual machines",
		},
		"no TOML of CRI-O": {"live", "/etc/crio/crio.conf", "[", "read /etc/crio/crio.conf: line 1"},
		"CRI-O reads others": {
			"live", "/etc/crio/crio.conf", "[crio.runtime]\nhooks_dir = ['/x']", "sets hooks_dir without ",
		},
		"CRI-O reads none": {
			"live", "/etc/crio/crio.conf.d/99", "[crio.runtime]\nhooks_dir = []",
			"/etc/crio/crio.conf.d/99 sets hooks_dir without ",
		},
		"podman reads none": {
			"podman", "/etc/containers/containers.conf.d/99.conf", "[engine]\nhooks_dir = []", "sets hooks_dir without ",
		},
		"a hooks_dir that is no list": {
			"live", "/etc/crio/crio.conf", "[crio.runtime]\nhooks_dir = '/x'", "sets hooks_dir to something else than a list",
		},
		"no CRI": {
			"containerd", containerdFile, `disabled_plugins = ["cri"]`,
			"/etc/containerd/config.toml disables the CRI plugin (disabled_plugins)",
		},
		"no CRI, version 3": {
			"containerd", containerdFile, "version = 3\ndisabled_plugins = ['x', 'io.containerd.grpc.v1.cri']\n",
			"/etc/containerd/config.toml disables the CRI plugin (disabled_plugins)",
		},
		"podman reads others": {
			"podman", "/etc/containers/containers.conf", "[engine]\nhooks_dir = ['/x', {append=true}]",
			"/etc/containers/containers.conf sets hooks_dir without /etc/containers/oci/gpu-cdi-plugin.d",
		},
		"a program":       {"wrapper", "/usr/local/sbin/gpu-cdi-runtime", "\x7fELF", "was written by another program"},
		"a broken record": {"wrapper", recordFile, "{", "read the record " + recordFile},
		"a form that cannot be removed": {
			"containerd", containerdFile, containerd2 +
				"plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.gpu-cdi.options.BinaryName = '/x/gpu-cdi-runtime'\n",
			"has the runtime gpu-cdi in a form that cannot be removed",
		},
		"an unknown engine": {"lxc", "/x", "", `unknown engine "lxc"`},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(map[string]*File{c.file: {Data: []byte(c.content)}})
			p, err := h.Install([]string{c.engine}, testHook)
			if p != nil || err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got the error %v, want %q", err, c.want)
			}
		})
	}
	h := newHost(map[string]*File{daemonFile: {Link: "/srv/daemon.json", Data: []byte("{}")}})
	if _, err := h.Install([]string{"docker"}, testHook); !errors.As(err, new(*SettingError)) {
		t.Errorf("a daemon.json that is a link: %v", err)
	}
	if _, err := h.Install([]string{"wrapper"}, "/a\"b/prestart-hook"); err == nil {
		t.Error("a hook with a quote in its path is installed")
	}
}

// What setKey adds, removeKey removes, byte for byte; nothing else of a document changes.
func FuzzDaemonJSON(f *testing.F) {
	for _, document := range []string{
		"", " \n", "\xef\xbb\xbf", "\xef\xbb\xbf{\"a\": 1}\r\n",
		"{}", "{ }", "{\n}\n", `{"a":1}`, `{"features": {"a": true}}`,
		"{\n\t\"runtimes\": {\n\t\t\"x\": {}\n\t},\n\t\"b\": [1, \"}\"]\n}",
		`{"runtimes": {} }`, `{"\u0061" : {"b":"\"}"} , "c":null}`,
	} {
		f.Add([]byte(document))
	}
	f.Fuzz(func(t *testing.T, document []byte) {
		h := newHost(map[string]*File{daemonFile: {Data: document}})
		p, err := h.Install([]string{"docker"}, testHook)
		if (p == nil) == (err == nil) {
			t.Fatalf("both or neither: %v, %v", p, err)
		}
		if err != nil {
			return
		}
		installed := after(h, p)
		if _, err := parseObject(bytes.TrimPrefix(installed.files[daemonFile].Data, []byte("\xef\xbb\xbf"))); err != nil {
			t.Fatalf("made of %q: %q: %v", document, installed.files[daemonFile].Data, err)
		}
		p, err = installed.Uninstall([]string{"docker"})
		if err != nil {
			t.Fatal(err)
		}
		if got := after(installed, p).files[daemonFile]; got == nil || string(got.Data) != string(document) {
			t.Errorf("%q is %v after Install and Uninstall", document, got)
		}
	})
}

func FuzzContainerdConfig(f *testing.F) {
	for _, text := range []string{
		"version = 2", "version = 2\n", "version = 3\n",
		"version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = false\n",
		"version = 2\n[plugins.'io.containerd.grpc.v1.cri']",
		"version = 2\na = '''\n[plugins.'io.containerd.grpc.v1.cri']\n'''\n",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		if strings.Contains(string(text), "gpu-cdi-plugin") {
			return // what looks like ours goes
		}
		h := newHost(map[string]*File{containerdFile: {Data: text}})
		p, err := h.Install([]string{"containerd"}, testHook)
		if err != nil {
			return
		}
		installed := after(h, p)
		p, err = installed.Uninstall([]string{"containerd"})
		if err != nil {
			t.Fatal(err)
		}
		if got := after(installed, p).files[containerdFile]; got == nil || string(got.Data) != string(text) {
			t.Errorf("%q is %v after Install and Uninstall", text, fmt.Sprint(got))
		}
	})
}

// A second Install does not move our part of config.toml behind the lines that others have added.
func TestASecondInstallLeavesLinesOfOthers(t *testing.T) {
	h := newHost(map[string]*File{containerdFile: {Data: []byte("version = 3\n")}})
	p, err := h.Install([]string{"containerd"}, testHook)
	h = after(h, mustPlan(t, p, err))
	h.files[containerdFile].Data = append(h.files[containerdFile].Data, "[debug]\nlevel = 'info'\n"...)
	p, err = h.Install([]string{"containerd"}, testHook)
	if mustPlan(t, p, err); len(p.Changes) > 0 {
		t.Errorf("it changes %v", p.Changes)
	}
}

// In containerd 2 our part belongs in the drop-in as soon as config.toml imports that, and else in config.toml.
func TestOurPartFollowsTheImports(t *testing.T) {
	h := newHost(map[string]*File{})
	for _, step := range []struct {
		imports  string
		isDropIn bool
	}{{"site.d/*.toml", false}, {"conf.d/*.toml", true}, {"site.d/*.toml", false}} {
		config := []byte("version = 3\nimports = ['site.d/*.toml']\n")
		if f := h.files[containerdFile]; f != nil {
			config = f.Data
		}
		config = regexp.MustCompile(`imports = .*`).ReplaceAll(config, []byte("imports = ['"+step.imports+"']"))
		h.files[containerdFile] = &File{Data: config}
		p, err := h.Install([]string{"containerd"}, testHook)
		h = after(h, mustPlan(t, p, err))
		for file, want := range map[string]bool{containerdFile: !step.isDropIn, containerdDropIn: step.isDropIn} {
			if text := texts(h)[file]; strings.Contains(text, "runtimes.gpu-cdi") != want {
				t.Errorf("imports of %s: %s is\n%s", step.imports, file, text)
			}
		}
	}
	// containerd 1, which also reads version 2, would take all settings of CRI from the drop-in.
	h.files[containerdFile] = &File{Data: []byte("version = 2\nimports = ['conf.d/*.toml']\n")}
	p, err := h.Install([]string{"containerd"}, testHook)
	h = after(h, mustPlan(t, p, err))
	if !strings.Contains(texts(h)[containerdFile], "runtimes.gpu-cdi") || h.files[containerdDropIn] != nil {
		t.Errorf("with version 2: %v", texts(h))
	}

	h.files[containerdDropIn] = &File{Data: []byte("version = 3\n")}
	h.files[containerdFile].Data = []byte("version = 3\nimports = ['conf.d/*.toml']\n")
	if p, err := h.Install([]string{"containerd"}, testHook); p != nil || !errors.As(err, new(*ForeignError)) {
		t.Errorf("with another program's drop-in: %v", err)
	}
}
