package nodestatus

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/test/lib/testenv"
)

var update = flag.Bool("update", false, "write the golden files")

// TestMachines compares the status of the machines in testdata with golden files.
func TestMachines(t *testing.T) {
	reserved, err := ParseReserved(
		[]string{"cpu=500m", "memory=1Gi", "pid=1000"}, []string{"cpu=100m", "ephemeral-storage=1G"},
		[]string{"memory.available<100Mi", "nodefs.available<10%", "imagefs.available<15%"},
	)
	testenv.Must(t, err)
	devices := map[string]manager.Count{
		"nvidia.com/gpu": {
			Capacity:    8,
			Allocatable: 7,
		}, "a.b/gone": {}, "a.b/many": {Capacity: 10000, Allocatable: 9999},
	}
	for _, name := range []string{"two-sockets", "memory-nodes", "small"} {
		t.Run(name, func(t *testing.T) {
			h, err := host.New(filepath.Join("testdata", name), "", "")
			testenv.Must(t, err)
			m, err := readMachine(h)
			testenv.Must(t, err)
			m.EphemeralStorage = 1_967_317_618_688
			got, err := json.MarshalIndent(
				map[string]any{"machine": m, "status": Compute(m, reserved, 110, devices)},
				"",
				"  ",
			)
			testenv.Must(t, err)
			golden := filepath.Join("testdata", name+".json")
			if *update {
				testenv.Must(t, os.WriteFile(golden, append(got, '\n'), 0o644))
			}
			want, err := os.ReadFile(golden)
			testenv.Must(t, err)
			if diff := cmp.Diff(string(want), string(got)+"\n"); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestPods(t *testing.T) {
	for name, c := range map[string]struct{ maxPods, podsPerCore, want int }{
		"no limit for each CPU":              {110, 0, 110},
		"the limit for each CPU is lower":    {110, 10, 40},
		"the limit for all of them is lower": {110, 100, 110},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Pods(Machine{CPUs: 4}, c.maxPods, c.podsPerCore); got != c.want {
				t.Errorf("%d pods, want %d", got, c.want)
			}
		})
	}
}

func TestCompute(t *testing.T) {
	const gi = 1 << 30
	for name, c := range map[string]struct {
		machine                Machine
		system, kube, eviction []string
		capacity, allocatable  map[string]string
	}{
		"nothing reserved": {
			Machine{CPUs: 4, Memory: 7910 << 20, EphemeralStorage: 20 * gi},
			nil, nil, nil,
			map[string]string{"cpu": "4", "memory": "7910Mi", "pods": "110", "ephemeral-storage": "20Gi"},
			map[string]string{"cpu": "4", "memory": "7910Mi", "pods": "110", "ephemeral-storage": "20Gi"},
		},
		"sums": {
			Machine{CPUs: 4, Memory: 8 * gi, EphemeralStorage: 20 * gi},
			[]string{"cpu=0.5", "memory=1Gi"},
			[]string{"cpu=250m", "memory=1G", "ephemeral-storage=2Gi"},
			[]string{"memory.available<1024", "nodefs.available<1Ki"},
			map[string]string{"cpu": "4", "memory": "8Gi", "pods": "110", "ephemeral-storage": "20Gi"},
			map[string]string{"cpu": "3250m", "memory": "6516191744", "pods": "110", "ephemeral-storage": "18874367Ki"},
		},
		"percentages, rounded down": {
			Machine{CPUs: 1, Memory: 1001, EphemeralStorage: 3333},
			nil, nil,
			[]string{"memory.available<1.5%", "nodefs.available<10%"},
			map[string]string{"cpu": "1", "memory": "1001", "pods": "110", "ephemeral-storage": "3333"},
			map[string]string{"cpu": "1", "memory": "986", "pods": "110", "ephemeral-storage": "3000"},
		},
		"0% and 100% are ignored": {
			Machine{CPUs: 1, Memory: gi, EphemeralStorage: gi},
			nil, nil,
			[]string{"memory.available<100%", "nodefs.available<0%"},
			map[string]string{"cpu": "1", "memory": "1Gi", "pods": "110", "ephemeral-storage": "1Gi"},
			map[string]string{"cpu": "1", "memory": "1Gi", "pods": "110", "ephemeral-storage": "1Gi"},
		},
		"more than there is": {
			Machine{CPUs: 1, Memory: gi, EphemeralStorage: gi},
			[]string{"cpu=2", "memory=2Gi"},
			nil, nil,
			map[string]string{"cpu": "1", "memory": "1Gi", "pods": "110", "ephemeral-storage": "1Gi"},
			map[string]string{"cpu": "0", "memory": "0", "pods": "110", "ephemeral-storage": "1Gi"},
		},
		"huge pages are no memory for pods": {
			Machine{CPUs: 1, Memory: 4 * gi, HugePages: map[int64]int64{2 << 20: 512, gi: 1, 64 << 10: 0}},
			nil, nil, nil,
			map[string]string{
				"cpu": "1", "memory": "4Gi", "pods": "110", "ephemeral-storage": "0",
				"hugepages-2Mi": "1Gi", "hugepages-1Gi": "1Gi", "hugepages-64Ki": "0",
			},
			map[string]string{
				"cpu": "1", "memory": "2Gi", "pods": "110", "ephemeral-storage": "0",
				"hugepages-2Mi": "1Gi", "hugepages-1Gi": "1Gi", "hugepages-64Ki": "0",
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := ParseReserved(c.system, c.kube, c.eviction)
			testenv.Must(t, err)
			want := Status{Capacity: c.capacity, Allocatable: c.allocatable}
			if diff := cmp.Diff(want, Compute(c.machine, r, 110, nil)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestParseReservedRefuses(t *testing.T) {
	_, err := ParseReserved(
		[]string{"cpu", "gpu=1", "memory=-1", "cpu=1", "cpu=2"}, []string{"hugepages-2Mi=1Gi", "memory=1GB", "cpu=1"},
		[]string{
			"memory.available>1Gi", "memory.availble<1Gi", "nodefs.available<101%", "nodefs.available<NaN%",
			"imagefs.available<-1%", "pid.available<0", "nodefs.inodesFree<x", "memory.available<1Gi", "memory.available<2Gi",
		},
	)
	want := []string{
		`system-reserved: "cpu": want RESOURCE=QUANTITY`,
		`system-reserved: "gpu=1": cannot reserve "gpu" resource; did you mean cpu?`,
		`system-reserved: "memory=-1": resource quantity for "memory" cannot be negative: -1`,
		`system-reserved: "cpu=2": cpu is given twice`,
		`kube-reserved: "hugepages-2Mi=1Gi": cannot reserve "hugepages-2Mi" resource`,
		`kube-reserved: "memory=1GB": want a quantity, such as 2, 500m or 16Gi`,
		`eviction-hard: "memory.available>1Gi": want SIGNAL<QUANTITY or SIGNAL<PERCENT%`,
		`eviction-hard: "memory.availble<1Gi": unknown signal "memory.availble"; did you mean memory.available?`,
		`eviction-hard: "nodefs.available<101%": want a percentage from 0% to 100%, got 101%`,
		`eviction-hard: "nodefs.available<NaN%": want a percentage from 0% to 100%, got NaN%`,
		`eviction-hard: "imagefs.available<-1%": want a percentage from 0% to 100%, got -1%`,
		`eviction-hard: "pid.available<0": eviction threshold pid.available must be positive: 0`,
		`eviction-hard: "nodefs.inodesFree<x": want a quantity, such as 2, 500m or 16Gi`,
		`eviction-hard: "memory.available<2Gi": memory.available is given twice`,
	}
	if !errors.Is(err, ErrReserved) {
		t.Fatal(err)
	}
	got := strings.Split(strings.ReplaceAll(err.Error(), ErrReserved.Error()+": ", ""), "\n")
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestReadMachine(t *testing.T) {
	h, err := host.New("", "", "")
	testenv.Must(t, err)
	m, err := ReadMachine(h, t.TempDir())
	if err != nil || m.CPUs < 1 || m.Memory < 1<<20 || m.EphemeralStorage < 1<<20 || len(m.NUMANodes) == 0 {
		t.Errorf("%+v (%v)", m, err)
	}
	if _, err := ReadMachine(h, "/does/not/exist"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	empty, err := host.New(t.TempDir(), "", "")
	testenv.Must(t, err)
	if m, err := ReadMachine(empty, "/"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%+v (%v)", m, err)
	}
}

func FuzzParseReserved(f *testing.F) {
	f.Add("cpu=1", "memory=1Gi", "memory.available<10%")
	f.Add("cpu=1e3", "pid=1", "nodefs.available<1e1%")
	f.Fuzz(func(t *testing.T, system, kube, eviction string) {
		r, err := ParseReserved([]string{system}, []string{kube}, []string{eviction})
		if err != nil {
			if !errors.Is(err, ErrReserved) {
				t.Error(err)
			}
			return
		}
		machine := Machine{CPUs: 1, Memory: 1 << 30, EphemeralStorage: 1 << 40}
		for name, q := range Compute(machine, r, 110, nil).Allocatable {
			if strings.HasPrefix(q, "-") {
				t.Errorf("%s: %s", name, q)
			}
		}
	})
}
