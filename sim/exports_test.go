package sim

import (
	"debug/elf"
	"os"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// notSimulated are functions of real drivers that are not in NVIDIA's header.
var notSimulated = []string{
	"nvmlGetBlacklistDeviceCount", "nvmlGetBlacklistDeviceInfoByIndex", "nvmlInternalGetExportTable",
	"nvmlDeviceCcuGetStreamState", "nvmlDeviceCcuSetStreamState", "nvmlRetry_NvRmControl",
}

// A library that has more functions than the driver that it plays would hide what the product does without them.
func TestTheLibraryExportsWhatItsDriverExports(t *testing.T) {
	testenv.Command(t, "cc")
	for driver, want := range map[string]struct{ real, newer int }{
		"470.256.02": {255, 0}, "525.147.05": {312, 0}, "535.261.03": {332, 0}, "550.163.01": {350, 0},
		"555.58.02": {354, 0},
		// Between and before the known drivers it has the functions of an earlier, or of the first.
		"545.29.06": {332, 0}, "450.80.02": {255, 0},
		"580.126.09": {354, 77},
	} {
		t.Run(driver, func(t *testing.T) {
			m, err := LoadMachine("pcie-pair")
			testenv.Must(t, err)
			n, err := Create(t.Context(), t.TempDir(), m, Options{Driver: driver, PlainNodes: true})
			testenv.Must(t, err)
			functions, err := RealFunctions(driver)
			testenv.Must(t, err)
			real, newer := 0, 0
			exported := exportedBy(t, n.Library())
			for _, name := range exported {
				if slices.Contains(functions, name) {
					real++
				} else {
					newer++
				}
			}
			for _, name := range notSimulated {
				if slices.Contains(exported, name) {
					t.Errorf("%s is simulated", name)
				}
				if slices.Contains(functions, name) {
					real++
				}
			}
			if real != want.real || newer != want.newer {
				t.Errorf("the library has %d of the driver's functions and %d newer ones, want %d and %d",
					real, newer, want.real, want.newer)
			}
		})
	}
}

// exportedBy returns the functions of NVML that programs find in a library.
func exportedBy(t *testing.T, library string) (names []string) {
	t.Helper()
	file, err := os.Open(library)
	testenv.Must(t, err)
	defer file.Close()
	f, err := elf.NewFile(file)
	testenv.Must(t, err)
	symbols, err := f.DynamicSymbols()
	testenv.Must(t, err)
	for _, s := range symbols {
		if strings.HasPrefix(s.Name, "nvml") && s.Section != elf.SHN_UNDEF {
			names = append(names, s.Name)
		}
	}
	return names
}
