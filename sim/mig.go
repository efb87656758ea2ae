package sim

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// memorySlices is the number of memory slices of every model in migTables.
const memorySlices = 8

// migProfile is a GPU instance profile: a row of `nvidia-smi mig -lgip` and `-lgipp`.
type migProfile struct {
	name    string
	id      int   // the driver's id of the profile
	enum    int   // NVML_GPU_INSTANCE_PROFILE_*
	slices  int   // compute slices
	size    int   // memory slices
	starts  []int // where in the memory slices an instance may begin
	limit   int   // instances of the profile on one GPU
	memory  uint64
	sms     int
	engines Engines
}

const mib = 1 << 20

var (
	startsOne    = []int{0, 1, 2, 3, 4, 5, 6}
	startsTwo    = []int{0, 2, 4}
	startsDouble = []int{0, 2, 4, 6}
	startsHalf   = []int{0, 4}
	startsFirst  = []int{0}
)

// migTables has the GPU instance profiles of each model that has MIG, from the tables of the NVIDIA Multi-Instance
// GPU User Guide ("Supported MIG Profiles" and the outputs of `nvidia-smi mig -lgip` there). Memory sizes are the
// guide's figures in units of 2^30 bytes, rounded to a MiB.
var migTables = map[string][]migProfile{
	"a100-40gb": {
		{"1g.5gb", 19, 0, 1, 1, startsOne, 7, 4864 * mib, 14, Engines{1, 0, 0, 0, 0}},
		{"1g.5gb+me", 20, 7, 1, 1, startsOne, 1, 4864 * mib, 14, Engines{1, 1, 0, 1, 1}},
		{"1g.10gb", 15, 9, 1, 2, startsDouble, 4, 9856 * mib, 14, Engines{1, 1, 0, 0, 0}},
		{"2g.10gb", 14, 1, 2, 2, startsTwo, 3, 9984 * mib, 28, Engines{2, 1, 0, 0, 0}},
		{"3g.20gb", 9, 2, 3, 4, startsHalf, 2, 20096 * mib, 42, Engines{3, 2, 0, 0, 0}},
		{"4g.20gb", 5, 3, 4, 4, startsFirst, 1, 20096 * mib, 56, Engines{4, 2, 0, 0, 0}},
		{"7g.40gb", 0, 4, 7, 8, startsFirst, 1, 40320 * mib, 98, Engines{7, 5, 0, 1, 1}},
	},
	"a100-80gb": {
		{"1g.10gb", 19, 0, 1, 1, startsOne, 7, 9728 * mib, 14, Engines{1, 0, 0, 0, 0}},
		{"1g.10gb+me", 20, 7, 1, 1, startsOne, 1, 9728 * mib, 14, Engines{1, 1, 0, 1, 1}},
		{"1g.20gb", 15, 9, 1, 2, startsDouble, 4, 19968 * mib, 14, Engines{1, 1, 0, 0, 0}},
		{"2g.20gb", 14, 1, 2, 2, startsTwo, 3, 19968 * mib, 28, Engines{2, 1, 0, 0, 0}},
		{"3g.40gb", 9, 2, 3, 4, startsHalf, 2, 40192 * mib, 42, Engines{3, 2, 0, 0, 0}},
		{"4g.40gb", 5, 3, 4, 4, startsFirst, 1, 40192 * mib, 56, Engines{4, 2, 0, 0, 0}},
		{"7g.80gb", 0, 4, 7, 8, startsFirst, 1, 80640 * mib, 98, Engines{7, 5, 0, 1, 1}},
	},
	"h100-80gb": {
		{"1g.10gb", 19, 0, 1, 1, startsOne, 7, 9984 * mib, 16, Engines{1, 1, 0, 1, 0}},
		{"1g.10gb+me", 20, 7, 1, 1, startsOne, 1, 9984 * mib, 16, Engines{1, 1, 0, 1, 1}},
		{"1g.20gb", 15, 9, 1, 2, startsDouble, 4, 20096 * mib, 26, Engines{1, 1, 0, 1, 0}},
		{"2g.20gb", 14, 1, 2, 2, startsTwo, 3, 20096 * mib, 32, Engines{2, 2, 0, 2, 0}},
		{"3g.40gb", 9, 2, 3, 4, startsHalf, 2, 40448 * mib, 60, Engines{3, 3, 0, 3, 0}},
		{"4g.40gb", 5, 3, 4, 4, startsFirst, 1, 40448 * mib, 64, Engines{4, 4, 0, 4, 0}},
		{"7g.80gb", 0, 4, 7, 8, startsFirst, 1, 81152 * mib, 132, Engines{8, 7, 0, 7, 1}},
	},
}

// computeProfiles maps a number of compute slices to the driver's id of the compute instance profile, which is
// NVML_COMPUTE_INSTANCE_PROFILE_*_SLICE.
var computeProfiles = map[int]int{1: 0, 2: 1, 3: 2, 4: 3, 7: 4}

// instance is a GPU instance to make.
type instance struct {
	*migProfile
	start   int   // memory slice, -1 while it is not placed
	compute []int // slices of each compute instance, in order
}

// gi returns the driver's id of the GPU instance. The ids number the nodes of a binary tree over the memory slices from
// the root, as in the examples of the MIG User Guide.
func (i *instance) gi() int { return memorySlices/i.size - 1 + i.start/i.size }

func (i *instance) computeSlices() (sum int) {
	for _, n := range i.compute {
		sum += n
	}
	return sum
}

// partition creates the MIG devices of a GPU from the names of profiles, in the order of their ids. A name is a GPU
// instance profile ("3g.40gb") or a compute instance profile ("1c.3g.40gb"), optionally with the memory slice where the
// instance begins ("3g.40gb@4"). Compute instances share a GPU instance of the same profile while it has room.
func partition(g *GPU, names []string) ([]MIGDevice, error) {
	table, ok := migTables[g.Model.MIG]
	if !ok {
		return nil, fmt.Errorf("GPU %d (%s) has no MIG", g.Index, g.Name)
	}
	if g.Minor >= capGPUs {
		return nil, fmt.Errorf("GPU %d has the minor %d; the driver has capabilities for 0 to %d only", g.Index,
			g.Minor, capGPUs-1)
	}
	instances, err := parseProfiles(table, names)
	if err != nil {
		return nil, err
	}
	if !placeInstances(instances, 0) {
		return nil, fmt.Errorf("the profiles %s do not fit on one GPU together", strings.Join(names, ", "))
	}
	slices.SortFunc(instances, func(a, b *instance) int { return cmp.Compare(a.gi(), b.gi()) })
	devices := []MIGDevice{}
	for _, i := range instances {
		for ci := range i.compute {
			devices = append(devices, i.device(g, table, len(devices), ci))
		}
	}
	return devices, nil
}

func parseProfiles(table []migProfile, names []string) ([]*instance, error) {
	var list []*instance
	var errs []error
	for _, name := range names {
		p, compute, start, err := parseProfile(table, name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		open := slices.IndexFunc(list, func(i *instance) bool {
			return i.migProfile == p && (start < 0 || i.start == start) && i.computeSlices()+compute <= p.slices
		})
		if open < 0 {
			list = append(list, &instance{migProfile: p, start: start})
			open = len(list) - 1
		}
		list[open].compute = append(list[open].compute, compute)
	}
	return list, errors.Join(errs...)
}

// parseProfile returns the GPU instance profile in a name, the number of compute slices, and the start or -1.
func parseProfile(table []migProfile, name string) (p *migProfile, compute, start int, err error) {
	bare, at, placed := strings.Cut(name, "@")
	start = -1
	if placed {
		if start, err = strconv.Atoi(at); err != nil {
			return nil, 0, 0, fmt.Errorf("MIG profile %q: the start after @: %w", name, err)
		}
	}
	part, whole, isPart := strings.Cut(bare, "c.")
	if !isPart {
		whole = bare
	}
	i := slices.IndexFunc(table, func(p migProfile) bool { return p.name == whole })
	if i < 0 {
		return nil, 0, 0, fmt.Errorf("unknown MIG profile %q; this model has %s", name, profileNames(table))
	}
	p = &table[i]
	compute = p.slices
	if isPart {
		n, err := strconv.Atoi(part)
		if _, ok := computeProfiles[n]; err != nil || !ok || n > p.slices || (n == 3 && p.slices == 4) {
			return nil, 0, 0, fmt.Errorf("MIG profile %q: %s has no compute instances of %s slices", name, whole, part)
		}
		compute = n
	}
	if placed && !slices.Contains(p.starts, start) {
		return nil, 0, 0, fmt.Errorf("MIG profile %q: %s can begin at %v", name, p.name, p.starts)
	}
	return p, compute, start, nil
}

func profileNames(table []migProfile) string {
	var names []string
	for _, p := range table {
		names = append(names, p.name)
	}
	return strings.Join(names, ", ")
}

// placeInstances finds a start for every instance from the i-th on, and reports whether all fit. It tries all starts,
// which is fast since a GPU has at most 7 instances.
func placeInstances(list []*instance, i int) bool {
	if len(list) > memorySlices-1 {
		return false
	}
	if i == len(list) {
		return true
	}
	this := list[i]
	starts, fixed := this.starts, this.start
	if fixed >= 0 {
		starts = []int{fixed}
	}
	for _, start := range starts {
		this.start = start
		if fits(list[:i], list[i+1:], this) && placeInstances(list, i+1) {
			return true
		}
	}
	this.start = fixed
	return false
}

// fits reports whether an instance overlaps neither with those before it nor with those after it whose names have a
// start.
func fits(before, after []*instance, one *instance) bool {
	same, compute := 1, one.slices
	for _, other := range slices.Concat(before, after) {
		if other.start < 0 {
			continue
		}
		if one.start < other.start+other.size && other.start < one.start+one.size {
			return false
		}
		if other.migProfile == one.migProfile {
			same++
		}
		compute += other.slices
	}
	return same <= one.limit && compute < memorySlices
}

// device returns the MIG device of compute instance ci. Its UUID is derived from the GPU and the two ids, so that the
// same partitioning gives the same UUIDs, as with the real driver.
func (i *instance) device(g *GPU, table []migProfile, index, ci int) MIGDevice {
	n, name, sms := i.compute[ci], i.name, i.sms
	if n < i.slices {
		name = fmt.Sprintf("%dc.%s", n, i.name)
		sms = n * table[0].sms
	}
	return MIGDevice{
		MIGDevice: gpu.MIGDevice{
			Index:              index,
			UUID:               "MIG-" + uuid(g.UUID, "mig", strconv.Itoa(i.gi()), strconv.Itoa(ci)),
			Profile:            name,
			GPUInstance:        i.gi(),
			ComputeInstance:    ci,
			GPUInstanceCap:     gpuInstanceCap(g.Minor, i.gi()),
			ComputeInstanceCap: computeInstanceCap(g.Minor, i.gi(), ci),
			MemoryBytes:        i.memory,
		},
		GPUProfile: i.id, ComputeProfile: computeProfiles[n],
		GPUSlices: i.slices, ComputeSlices: n,
		Start: i.start, Size: i.size, SMs: sms, Engines: i.engines,
	}
}

// Minor numbers in /dev/nvidia-caps, which /proc/driver/nvidia-caps/mig-minors lists: config and monitor, then 15 GPU
// instances with 8 compute instances each for every GPU minor.
const (
	capConfig           = 1
	capMonitor          = 2
	capFirst            = 3
	capGPUs             = 32
	capGPUInstances     = 15
	capComputeInstances = 8
)

func gpuInstanceCap(minor, gi int) int {
	return capFirst + (minor*capGPUInstances+gi)*(1+capComputeInstances)
}

func computeInstanceCap(minor, gi, ci int) int { return gpuInstanceCap(minor, gi) + 1 + ci }
