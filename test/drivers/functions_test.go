package drivers

import (
	"debug/elf"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// testFunctions compares the functions of the real libnvidia-ml with those that the simulated one has with this driver.
func (d *driver) testFunctions(t *testing.T) {
	if _, err := os.Stat(d.golden()); err != nil {
		t.Skipf("the version %s is new: its functions are not compared with sim/exports.txt", d.version)
	}
	libraries, err := filepath.Glob(filepath.Join(d.root, libDir, "nvidia/*/libnvidia-ml.so."+d.version))
	testenv.Must(t, err)
	if len(libraries) != 1 {
		t.Fatalf("want one libnvidia-ml, got %q", libraries)
	}
	f, err := elf.Open(libraries[0])
	testenv.Must(t, err)
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	testenv.Must(t, err)
	var got []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && elf.ST_TYPE(s.Info) == elf.STT_FUNC {
			got = append(got, s.Name)
		}
	}
	slices.Sort(got)
	want, err := sim.RealFunctions(d.version)
	testenv.Must(t, err)
	if diff := cmp.Diff(want, slices.Compact(got)); diff != "" {
		t.Errorf("the functions of driver %s (-sim/exports.txt +got):\n%s", d.version, diff)
	}
}
