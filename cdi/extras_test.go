package cdi

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/sim/simtest"
)

// The specs of a node with all extras are in specs/extras.
func TestGoldenExtras(t *testing.T) {
	n := simtest.Node(t, "dgx-h100", simtest.Extras("gdrcopy", "gds", "imex", "mofed"))
	h, err := host.New(n.Root(), "", "")
	if err != nil {
		t.Fatal(err)
	}
	for extra, kind := range map[Extra]string{
		IMEX: "nvidia.com/imex-channel", GDS: "nvidia.com/gds",
		GDRCopy: "nvidia.com/gdrcopy", MOFED: "nvidia.com/mofed", NVSwitch: "nvidia.com/nvswitch",
	} {
		found, findings := DiscoverExtra(h, extra, []int{0, 1})
		if slices.ContainsFunc(findings, func(f Finding) bool { return !f.Used }) {
			t.Errorf("%s: not all was found: %+v", extra, findings)
		}
		if got := extra.Kind(DefaultKind); got != kind {
			t.Errorf("%s has the kind %s, want %s", extra, got, kind)
		}
		spec, err := GenerateExtra(found, kind)
		if err != nil {
			t.Fatal(err)
		}
		if problems := Validate(spec); len(problems) > 0 {
			t.Errorf("%s: %v", extra, problems)
		}
		data, err := Marshal(spec, JSON)
		if err != nil {
			t.Fatal(err)
		}
		got := bytes.ReplaceAll(data, []byte(n.Root()+"/"), []byte(goldenRoot+"/"))
		path := filepath.Join("..", "specs", "extras", string(extra)+".json")
		if *update {
			if err := os.WriteFile(path, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("spec of %s (-want +got); -update writes it:\n%s", extra, diff)
		}
		if _, err := cdilib.ReadSpec(path, 0); err != nil {
			t.Errorf("the CDI library refuses the spec: %v", err)
		}
	}
}

func TestExtrasThatAreNotThere(t *testing.T) {
	h := newTree(t).host()
	for _, extra := range Extras() {
		found, _ := DiscoverExtra(h, extra, []int{0})
		if spec, err := GenerateExtra(found, extra.Kind(DefaultKind)); !errors.Is(err, ErrNoDevices) {
			t.Errorf("%s: %v, %v", extra, spec, err)
		}
	}
}

func TestWhatIsNotAnExtra(t *testing.T) {
	cases := map[string]struct {
		extra    Extra
		channels []int
		put      func(*tree)
		note     string // of some finding
	}{
		"a regular file in a node's place": {
			IMEX,
			[]int{3},
			func(r *tree) { r.file("/dev/nvidia-caps-imex-channels/channel3", "", 0o666) },
			"a regular file, not a character device",
		},
		"a channel that is not asked for": {
			IMEX,
			[]int{4},
			func(r *tree) { r.link("/dev/nvidia-caps-imex-channels/channel3", "/dev/null") },
			"not found",
		},
		"a link to a node": {
			GDRCopy, nil,
			func(r *tree) { r.link("/dev/gdrdrv", "/dev/null") },
			"a symbolic link, not a character device",
		},
		"a directory in a file's place": {
			GDS, nil,
			func(r *tree) { r.file("/etc/cufile.json/x", "", 0o644) },
			"a directory, not used",
		},
		"a file in a directory's place": {
			GDS, nil,
			func(r *tree) { r.file("/run/udev", "", 0o644) },
			"a regular file, not used",
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			r := newTree(t)
			c.put(r)
			found, findings := DiscoverExtra(r.host(), c.extra, c.channels)
			if len(found.Nodes)+len(found.Files) > 0 {
				t.Errorf("found %+v", found)
			}
			if !slices.ContainsFunc(findings, func(f Finding) bool { return f.Note == c.note }) {
				t.Errorf("no finding says %q: %+v", c.note, findings)
			}
		})
	}
}

// The settings of libcufile come from the driver's root if they are there, and a link in it does not lead out of it.
func TestExtrasOfADriverContainer(t *testing.T) {
	node, driver := newTree(t), newTree(t)
	node.file("/etc/cufile.json", "", 0o644)
	node.file("/run/udev/data/x", "", 0o644)
	driver.file("/opt/cufile.json", "", 0o644)
	driver.link("/etc/cufile.json", "/opt/cufile.json")
	h, err := host.New(node.dir, driver.dir, "")
	if err != nil {
		t.Fatal(err)
	}
	found, _ := DiscoverExtra(h, GDS, nil)
	want := map[string]string{"/etc/cufile.json": driver.dir + "/opt/cufile.json", "/run/udev": node.dir + "/run/udev"}
	got := map[string]string{}
	for _, f := range found.Files {
		got[f.Path] = f.HostPath
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
}

func TestExtraOfNoKind(t *testing.T) {
	_, err := GenerateExtra(&ExtraFiles{Extra: GDS}, "gds")
	if err == nil || !strings.Contains(err.Error(), `kind "gds"`) {
		t.Errorf("error %v", err)
	}
}

func TestASpecOfAnExtraIsKnownAgain(t *testing.T) {
	for _, e := range Extras() {
		spec, err := ReadFile(filepath.Join("..", "specs", "extras", string(e)+".json"))
		if err != nil {
			t.Fatal(err)
		}
		for _, other := range Extras() {
			if got := other.Wrote(spec); got != (other == e) {
				t.Errorf("the spec of %s is taken for one of %s: %t", e, other, got)
			}
		}
		spec.ContainerEdits.Env = []string{"NVIDIA_VISIBLE_DEVICES=void"}
		if e.Wrote(spec) {
			t.Errorf("somebody else's spec of %s is taken for ours", e)
		}
	}
}
