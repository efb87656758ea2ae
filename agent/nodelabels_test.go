package agent

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// labelled makes the service write labels into a new directory.
func labelled(t *testing.T) func(*config.Config) {
	t.Helper()
	dir := t.TempDir()
	return func(c *config.Config) { c.NodeLabels, c.FeaturesDir = true, dir }
}

// labels returns the file with the labels, or "" if there is none.
func (f *fixture) labels() string {
	data, _ := os.ReadFile(LabelsFile(&f.opts.Config))
	return string(data)
}

// hasLabel waits until the file has a label.
func (f *fixture) hasLabel(label string) {
	f.t.Helper()
	line := "\nnvidia.com/" + label + "\n"
	testenv.Eventually(f.t, "label "+label, func() bool { return strings.Contains(f.labels(), line) })
}

func TestLabelsFollowTheNode(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", labelled(t))
	f.start(Serve)
	f.hasLabel("gpu.count=4")
	f.reconfigure(func(c *config.Config) { c.MIGStrategy = resource.MIGMixed }) // the devices stay the same
	f.hasLabel("mig.strategy=mixed")
	f.reconfigure(inReplicas(3))
	f.hasLabel("gpu.product=NVIDIA-L40S-SHARED")
	f.reconfigure(func(c *config.Config) { c.GPUs.Exclude = []resource.Selector{"1"} })
	f.hasLabel("gpu.count=3")
	f.driver.set(func() { // the last two GPUs are unplugged
		s := &f.driver.snapshot
		s.Devices, s.Links = s.Devices[:2], s.Links[:1]
	})
	f.reload <- os.Interrupt
	f.hasLabel("gpu.count=1")
}

// The labels stay while the driver cannot be read and after the end, and are the same after the next start.
func TestLabelsStay(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-pair", labelled(t), func(c *config.Config) { c.FailOnInitError = false })
	f.start(Serve)
	f.hasLabel("gpu.count=2")
	want := f.labels()
	info, err := os.Stat(LabelsFile(&f.opts.Config))
	testenv.Must(t, err)
	f.stop()
	testenv.Must(t, f.result())
	f.driver.set(func() { f.driver.err = gpu.ErrNoDriver })
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 0, 0)
	if got := f.labels(); got != want {
		t.Errorf("labels without a driver:\n%s", got)
	}
	f.driver.set(func() { f.driver.err = nil })
	f.kubelet.WaitListed(gpuResource, 2, 0)
	again, err := os.Stat(LabelsFile(&f.opts.Config))
	testenv.Must(t, err)
	if got := f.labels(); got != want || !os.SameFile(info, again) {
		t.Errorf("labels with the driver again, in a new file %v:\n%s", !os.SameFile(info, again), got)
	}
}

func TestLabelsAreRemovedAtTheNextStartWithout(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		untrusted error
		removed   bool
	}{
		"in root's directory":                {nil, true},
		"in one that other users can change": {errors.New("others can change it"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-pair", labelled(t))
			f.opts.Config.NodeLabels = false
			f.opts.Trust = fakeTrust{dirs: map[string]error{"features-dir": c.untrusted}}
			file := LabelsFile(&f.opts.Config)
			testenv.Must(t, os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte("nvidia.com/a=b\n"), 0o644))
			f.start(Serve)
			f.kubelet.WaitListed(gpuResource, 2, 0)
			if got := f.labels(); (got == "") != c.removed {
				t.Errorf("labels: %q", got)
			}
			if c.removed {
				return
			}
			f.logs("the node keeps labels that node-labels does not want any more: others can change it", 1)
		})
	}
}

// An instance that cannot serve, since another one does, does not touch the labels of that one.
func TestASecondInstanceKeepsTheLabelsOfTheFirst(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-pair", labelled(t))
	f.start(Serve)
	f.hasLabel("gpu.count=2")
	g := f.successor(func(c *config.Config) { c.TakeOver, c.NodeLabels = false, false })
	g.start(Serve)
	wantError(t, g.result(), fileio.ErrHeld.Error())
	if f.labels() == "" {
		t.Error("the labels are gone")
	}
}

func TestLabelsThatCannotBeWritten(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-pair", labelled(t))
	dir := f.opts.Config.FeaturesDir
	testenv.Must(t, os.Remove(dir), os.WriteFile(dir, nil, 0o644)) // no directory
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 2, 0)
	f.logs("the node keeps its old labels: write the node's labels: ", 1)
	testenv.Must(t, os.Remove(dir), os.Mkdir(dir, 0o755))
	f.reload <- os.Interrupt
	f.hasLabel("gpu.count=2")
}

// Node feature discovery may be installed later than the plugin. Its directory is not made for it.
func TestLabelsWaitForNodeFeatureDiscovery(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := config.Default()
		c.NodeLabels, c.FeaturesDir = true, filepath.Join(t.TempDir(), "node-feature-discovery/features.d")
		h, err := host.New("/", "", "")
		testenv.Must(t, err)
		p := &publisher{
			devices: &devices{host: h, config: &current{}}, again: wake.New(), changed: wake.New(),
			state: node.State{Snapshot: &gpu.Snapshot{Devices: []gpu.Device{{UUID: "GPU-0"}}}},
		}
		p.devices.config.Store(&c)
		go func() { _ = p.run(t.Context()) }()
		aMinuteLater := func() string {
			t.Helper()
			time.Sleep(time.Minute)
			synctest.Wait()
			var text strings.Builder
			for _, r := range p.remarks() {
				text.WriteString(r.Text)
			}
			return text.String()
		}
		const want = "node feature discovery, which makes the directory, has not run on this node"
		if got := aMinuteLater(); !strings.Contains(got, want) {
			t.Errorf("without the directory: want a remark with %q, got %q", want, got)
		}
		if _, err := os.Stat(filepath.Dir(c.FeaturesDir)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the directory of node feature discovery was made: %v", err)
		}
		testenv.Must(t, os.MkdirAll(c.FeaturesDir, 0o755))
		for range 2 {
			if got := aMinuteLater(); got != "" {
				t.Errorf("with the directory: got the remark %q", got)
			}
			testenv.Must(t, os.Remove(LabelsFile(&c))) // another program may do that
		}
	})
}

func TestTheDirectoryOfLabelsMustBeRoots(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-pair", labelled(t))
	f.opts.Trust = fakeTrust{dirs: map[string]error{"features-dir": errors.New("others can change it")}}
	f.start(Serve)
	wantError(t, f.result(), "others can change it")
	if got := f.labels(); got != "" {
		t.Errorf("labels: %q", got)
	}
}
