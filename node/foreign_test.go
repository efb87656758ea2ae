package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"pgregory.net/rapid"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/agent/plugin"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// foreignFixture is a Reconciler between a CDI directory of lower and one of higher priority, and a plugin that serves
// its devices to a kubelet.
type foreignFixture struct {
	*fixture
	kubelet *kubelettest.Kubelet
	plugin  *plugin.Plugin
}

func newForeignFixture(t *testing.T, byIndex bool) *foreignFixture {
	f := &foreignFixture{kubelet: kubelettest.New(t)}
	node := simtest.Node(t, "mig-h100", simtest.Extras("gds", "imex"))
	for i := 2; i < len(node.Machine().GPUs); i++ { // two GPUs are enough
		testenv.Must(t, node.Remove(i))
	}
	f.fixture = newFixtureOn(t, node, func(o *Options) {
		o.Dirs = append(o.Dirs, filepath.Join(t.TempDir(), "high"))
		o.Extras, o.ByIndex = []Extra{gds, channel1}, byIndex
		o.Spec.Capabilities = driver.Utility // a small spec, which is read thousands of times
	})
	f.sink = func(s State) { // without the check at each publication: our spec may be removed at any time
		if err := f.plugin.Update(s.Resources, nil); err != nil {
			t.Error(err)
		}
	}
	var err error
	f.plugin, err = plugin.New(plugin.Options{Dir: f.kubelet.Dir, Log: f.rec.log, Allocate: plugin.AllocateOptions{
		Strategies: []resource.Strategy{resource.CDICRI},
	}})
	testenv.Must(t, err)
	f.kubelet.Start()
	for _, dir := range f.dirs {
		testenv.Must(t, os.MkdirAll(dir, 0o755))
	}
	f.start()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- f.plugin.Run(ctx) }()
	t.Cleanup(func() { cancel(); testenv.Must(t, <-done) })
	return f
}

// clear leaves the node as it was at the start.
func (f *foreignFixture) clear() {
	f.t.Helper()
	for _, dir := range f.dirs {
		entries, err := os.ReadDir(dir)
		if err != nil {
			testenv.Must(f.t, os.Remove(dir))
			testenv.Must(f.t, os.Mkdir(dir, 0o755))
		}
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), ".lock") {
				testenv.Must(f.t, os.RemoveAll(filepath.Join(dir, e.Name())))
			}
		}
	}
	f.source.set(nil)
}

// change draws a change of the CDI directories by another program or of a GPU, makes it, and returns its description.
func (f *foreignFixture) change(t *rapid.T) string {
	dir := rapid.SampledFrom(f.dirs).Draw(t, "dir")
	path := filepath.Join(dir, rapid.SampledFrom([]string{"a.json", "b.yaml", "nvidia.com-gpu.yaml"}).Draw(t, "file"))
	kind := rapid.SampledFrom([]string{
		cdi.DefaultKind, cdi.DefaultKind, cdi.DefaultKind, "nvidia.com/gds", "nvidia.com/imex-channel", "example.com/gpu",
	}).Draw(t, "kind")
	what := rapid.SampledFrom([]string{
		"names", "names", "names", "names", "copy", "ruin", "remove", "remove", "link", "directory", "dangling link",
		"our spec is removed", "our spec is edited", "our spec is taken", "a GPU is lost", "the GPUs are back",
		"unreadable directory",
	}).Draw(t, "what")
	ours := filepath.Join(filepath.Dir(f.path), cdi.FileName(kind))
	switch what {
	case "names":
		if os.RemoveAll(path) == nil && f.isDir(dir) {
			writeNames(
				f.t,
				path,
				kind,
				rapid.SliceOfNDistinct(rapid.SampledFrom(f.names()), 1, -1, rapid.ID).Draw(t, "names"),
			)
		}
	case "copy":
		if data, err := os.ReadFile(ours); err == nil && os.RemoveAll(path) == nil {
			_ = os.WriteFile(path, data, 0o644)
		}
	case "ruin":
		_ = os.RemoveAll(path)
		_ = os.WriteFile(path, []byte("{"), 0o644)
	case "remove":
		_ = os.RemoveAll(path)
	case "link":
		_ = os.RemoveAll(path)
		_ = os.Symlink(ours, path)
	case "directory":
		_ = os.RemoveAll(path)
		_ = os.Mkdir(path, 0o755)
	case "dangling link":
		_ = os.RemoveAll(path)
		_ = os.Symlink("nothing.json", path)
	case "our spec is removed":
		_ = os.Remove(ours)
	case "our spec is edited":
		if data, err := os.ReadFile(ours); err == nil {
			testenv.Must(f.t, os.WriteFile(ours, []byte(strings.ReplaceAll(string(data), "nvidia1", "nvidia7")), 0o644))
		}
	case "our spec is taken":
		if kind != cdi.DefaultKind || rapid.Bool().Draw(t, "by another kind") {
			_ = os.RemoveAll(f.path)
			writeNames(f.t, f.path, "example.com/gpu", []string{"0"})
		}
	case "a GPU is lost":
		f.source.set(nil, rapid.IntRange(0, 1).Draw(t, "GPU"))
	case "the GPUs are back":
		f.source.set(nil)
	case "unreadable directory":
		if dir != filepath.Dir(f.path) && rapid.IntRange(0, 3).Draw(t, "seldom") == 0 {
			_ = os.RemoveAll(dir)
			testenv.Must(f.t, os.WriteFile(dir, nil, 0o644))
		}
	}
	return what + " " + path + " " + kind
}

func (f *foreignFixture) isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// names are some that our specs have, and one that they have not.
func (f *foreignFixture) names() []string {
	list := []string{"0", "1", "0:0", "all", "other"}
	for uuid := range reasons(f.rec.State()) {
		list = append(list, uuid)
	}
	slices.Sort(list)
	return list
}

// writeNames writes a spec whose devices have those names.
func writeNames(t *testing.T, path, kind string, names []string) {
	t.Helper()
	s := &specs.Spec{Version: "0.5.0", Kind: kind}
	for _, n := range names {
		s.Devices = append(
			s.Devices,
			specs.Device{Name: n, ContainerEdits: specs.ContainerEdits{Env: []string{"FOREIGN=1"}}},
		)
	}
	writeSpec(t, path, s)
}

// writeSpec writes a spec as another program does, without waiting for the disk.
func writeSpec(t *testing.T, path string, s *specs.Spec) {
	t.Helper()
	format, err := cdi.FormatOf(path)
	testenv.Must(t, err)
	data, err := cdi.Marshal(s, format)
	testenv.Must(t, err)
	testenv.Must(t, os.WriteFile(path, data, 0o644))
}

// library reads directories as engines do.
func library(t *testing.T, dirs []string) *cdilib.Cache {
	t.Helper()
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dirs...), cdilib.WithAutoRefresh(false))
	testenv.Must(t, err)
	return cache
}

// possible is the library's view of the directories if all of our names were in our spec: the names that it then takes
// from our spec are those that foreign specs leave to us. A link to our spec is copied as a link.
func (f *foreignFixture) possible(t *testing.T, scratch string) func(name string) bool {
	t.Helper()
	testenv.Must(t, os.RemoveAll(scratch))
	copied := make([]string, len(f.dirs))
	for i, dir := range f.dirs {
		copied[i] = filepath.Join(scratch, fmt.Sprint(i))
		testenv.Must(t, os.MkdirAll(copied[i], 0o755))
		entries, err := os.ReadDir(dir)
		if err != nil {
			testenv.Must(t, os.Remove(copied[i]))
			testenv.Must(t, os.WriteFile(copied[i], nil, 0o644))
		}
		for _, e := range entries {
			from, to := filepath.Join(dir, e.Name()), filepath.Join(copied[i], e.Name())
			if target, err := os.Readlink(from); err == nil {
				testenv.Must(t, os.Symlink(strings.ReplaceAll(target, filepath.Dir(f.path), filepath.Join(scratch, "1")), to))
			} else if data, err := os.ReadFile(from); err == nil {
				testenv.Must(t, os.WriteFile(to, data, 0o644))
			}
		}
	}
	ours := map[string]bool{}
	for _, s := range f.rec.plan.specs {
		path := filepath.Join(copied[1], cdi.FileName(s.Kind))
		if old, err := cdi.ReadFile(path); err != nil || old.Kind == s.Kind { // else it is not ours to write
			writeSpec(t, path, s)
			ours[path] = true
		}
	}
	cache := library(t, copied)
	return func(name string) bool {
		d := cache.GetDevice(name)
		return d != nil && ours[d.GetSpec().GetPath()]
	}
}

// check compares the advertised devices with the responses of Allocate and with what engines do.
func (f *foreignFixture) check(t *testing.T, scratch string) (problems []string) {
	wrong := func(format string, args ...any) { problems = append(problems, fmt.Sprintf(format, args...)) }
	state := f.rec.State()
	engine, possible := library(t, f.dirs), f.possible(t, scratch)
	for _, r := range state.Resources {
		e := f.kubelet.WaitRegistered(r.Name)
		for _, d := range r.Devices {
			name := f.rec.cdiName(&d)
			given := strings.TrimPrefix(name, cdi.DefaultKind+"=")
			found := engine.GetDevice(name)
			right := found != nil && found.GetSpec().GetPath() == f.path && sameEdits(found, state.Spec, given)
			lost := strings.Contains(d.Reason, "GPU is lost")
			if d.Healthy != right || d.Healthy != (possible(name) && !lost) || !d.Healthy && d.Reason == "" {
				wrong(
					"%s: healthy %t (%s), engines take it from our spec: %t, could: %t",
					name,
					d.Healthy,
					d.Reason,
					right,
					possible(name),
				)
			}
			names, err := allocate(t, e, d.ID)
			if d.Healthy != (err == nil) || err != nil && status.Code(err) != codes.FailedPrecondition {
				wrong("%s: healthy %t (%s), and Allocate answers %v", name, d.Healthy, d.Reason, err)
			}
			for _, n := range names {
				if at := engine.GetDevice(n); at == nil ||
					filepath.Dir(at.GetSpec().GetPath()) != filepath.Dir(f.path) {
					wrong("%s: Allocate answers %s, which engines do not take from our specs", name, n)
				}
			}
			if want := wantedExtras(f.rec, possible); err == nil && !slices.Equal(names[1:], want) {
				wrong("%s: containers get %v besides, want %v", name, names[1:], want)
			}
		}
	}
	return problems
}

// wantedExtras are the names of extras that foreign specs leave to us.
func wantedExtras(r *Reconciler, possible func(string) bool) []string {
	var names []string
	for _, f := range r.files[1:] {
		spec := r.plan.specs[f.kind]
		if spec == nil {
			continue
		}
		for _, d := range spec.Devices {
			if name := spec.Kind + "=" + d.Name; possible(name) {
				names = append(names, name)
			}
		}
	}
	return names
}

func sameEdits(found *cdilib.Device, spec *specs.Spec, name string) bool {
	if spec == nil || !reflect.DeepEqual(found.GetSpec().ContainerEdits, spec.ContainerEdits) {
		return false
	}
	return slices.ContainsFunc(spec.Devices, func(d specs.Device) bool {
		return d.Name == name && reflect.DeepEqual(d.ContainerEdits, found.ContainerEdits)
	})
}

// allocate returns the CDI names that a container with the device gets.
func allocate(t *testing.T, e *kubelettest.Endpoint, id string) ([]string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	answer, err := e.Client.Allocate(ctx, &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{id}}},
	})
	var names []string
	for _, d := range answer.GetContainerResponses()[:min(1, len(answer.GetContainerResponses()))] {
		for _, c := range d.GetCdiDevices() {
			names = append(names, c.GetName())
		}
	}
	return names, err
}

// With any other spec files, a device is healthy exactly when engines take the name that containers are given from our
// spec. Allocate then returns only names that engines take from our specs.
func TestSlowWhatIsListedAsHealthyCanBeAllocatedBesideAnySpecs(t *testing.T) {
	for name, byIndex := range map[string]bool{"by UUID": false, "by index": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			checkBesideAnySpecs(t, newForeignFixture(t, byIndex))
		})
	}
}

func checkBesideAnySpecs(t *testing.T, f *foreignFixture) {
	t.Helper()
	scratch := filepath.Join(t.TempDir(), "possible")
	rapid.Check(t, func(r *rapid.T) {
		f.clear()
		f.reconcile()
		if c := countOf(f.rec.State()); c.unhealthy > 0 {
			r.Fatalf("after all foreign specs are gone the devices are %+v: %v", c, reasons(f.rec.State()))
		}
		var done []string
		for range rapid.IntRange(1, 3).Draw(r, "reconciliations") {
			for range rapid.IntRange(1, 4).Draw(r, "changes") {
				done = append(done, f.change(r))
			}
			f.reconcile()
			if f.rec.changed() { // a link to our spec, which dangled before, leads to what was just written
				f.reconcile()
			}
			if problems := f.check(t, scratch); len(problems) > 0 {
				r.Fatalf("after\n  %s\n%s", strings.Join(done, "\n  "), strings.Join(problems, "\n"))
			}
		}
	})
}
