package cdi

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The specs of the extras of a node that has all of them are in specs/extras.
func TestGoldenExtras(t *testing.T) {
	n := simtest.Node(t, "dgx-h100", simtest.Extras("gdrcopy", "gds", "imex", "mofed"))
	h, err := host.New(n.Root(), "", "")
	testenv.Must(t, err)
	for extra, kind := range map[driver.Extra]string{
		driver.IMEX: "nvidia.com/imex-channel", driver.GDS: "nvidia.com/gds",
		driver.GDRCopy: "nvidia.com/gdrcopy", driver.MOFED: "nvidia.com/mofed", driver.NVSwitch: "nvidia.com/nvswitch",
	} {
		found, findings := driver.DiscoverExtra(h, extra, []int{0, 1})
		if slices.ContainsFunc(findings, func(f driver.Finding) bool { return !f.Used }) {
			t.Errorf("%s: something was not found: %+v", extra, findings)
		}
		if got := extra.Kind(DefaultKind); got != kind {
			t.Errorf("%s has the kind %s, want %s", extra, got, kind)
		}
		spec, err := GenerateExtra(found, kind)
		testenv.Must(t, err)
		if problems := validate(spec); len(problems) > 0 {
			t.Errorf("%s: %v", extra, problems)
		}
		data, err := Marshal(spec, JSON)
		testenv.Must(t, err)
		got := bytes.ReplaceAll(data, []byte(n.Root()+"/"), []byte(goldenRoot+"/"))
		path := filepath.Join("..", "specs", "extras", string(extra)+".json")
		if *update {
			testenv.Must(t, os.WriteFile(path, got, 0o644))
		}
		want, err := os.ReadFile(path)
		testenv.Must(t, err)
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("spec of %s (-want +got); -update writes it:\n%s", extra, diff)
		}
		if _, err := cdilib.ReadSpec(path, 0); err != nil {
			t.Errorf("the CDI library refuses the spec: %v", err)
		}
	}
}

func TestAnExtraWithoutANodeHasNoDevice(t *testing.T) {
	for _, extra := range driver.Extras() {
		spec, err := GenerateExtra(&driver.ExtraFiles{Extra: extra}, extra.Kind(DefaultKind))
		if err != nil || len(spec.Devices) > 0 {
			t.Errorf("%s: %v, %v", extra, spec, err)
		}
	}
}

func TestGenerateExtraRefusesAMalformedKind(t *testing.T) {
	_, err := GenerateExtra(&driver.ExtraFiles{Extra: driver.GDS}, "gds")
	if err == nil || !strings.Contains(err.Error(), `kind "gds"`) {
		t.Errorf("error %v", err)
	}
}

func TestWroteExtraKnowsItsOwnSpecs(t *testing.T) {
	for _, e := range driver.Extras() {
		spec, err := ReadFile(filepath.Join("..", "specs", "extras", string(e)+".json"))
		testenv.Must(t, err)
		for _, other := range driver.Extras() {
			if got := WroteExtra(other, spec); got != (other == e) {
				t.Errorf("the spec of %s is taken for one of %s: %t", e, other, got)
			}
		}
		spec.ContainerEdits.Env = []string{"NVIDIA_VISIBLE_DEVICES=void"}
		if WroteExtra(e, spec) {
			t.Errorf("the spec of %s by another program is taken for ours", e)
		}
	}
}
