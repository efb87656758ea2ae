package sim

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"gpu-cdi-plugin/gpu"
)

// maxGPUs is the number of GPUs that the library has room for, and more than any machine has.
const maxGPUs = 128

// maxName is the longest product name in bytes: NVML_DEVICE_NAME_V2_BUFFER_SIZE less the final zero.
const maxName = 95

// architectures maps names to NVML_DEVICE_ARCH_*, brands to NVML_BRAND_*.
var (
	architectures = map[string]int{"volta": 5, "turing": 6, "ampere": 7, "ada": 8, "hopper": 9, "blackwell": 10}
	brands        = map[string]int{"quadro": 1, "tesla": 2, "geforce": 5, "quadro-rtx": 12, "nvidia-rtx": 13, "nvidia": 14}
)

var (
	busPattern     = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)
	bridgePattern  = regexp.MustCompile(`^pci[0-9a-f]{4}:[0-9a-f]{2}$`)
	pciIDPattern   = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{4}$`)
	computePattern = regexp.MustCompile(`^[1-9][0-9]?\.[0-9]$`)
)

func (b *builder) models() map[string]Model {
	models := map[string]Model{}
	for _, key := range slices.Sorted(maps.Keys(b.file.Models)) {
		models[key] = b.model("models."+key, b.file.Models[key])
	}
	if len(models) == 0 {
		b.problem("models", "there is none")
	}
	return models
}

func (b *builder) model(path string, f modelFile) Model {
	m := Model{
		Name: f.Name, Class: 0x030200, Architecture: f.Architecture, ComputeCapability: f.Compute, SMs: f.SMs,
		PowerWatts: f.Power, Brand: f.Brand, VBIOS: f.VBIOS, BoardPart: f.Board, MIG: f.MIG,
	}
	if f.Display {
		m.Class = 0x030000
	}
	if m.Brand == "" {
		m.Brand = "nvidia"
	}
	m.Device = b.pciID(path+".pci", f.PCI)
	m.Subsystem = b.pciID(path+".subsystem", f.Subsystem)
	m.MemoryBytes = b.memory(path+".memory", f.Memory)
	b.oneOf(path+".architecture", f.Architecture, slices.Sorted(maps.Keys(architectures)))
	b.oneOf(path+".brand", m.Brand, slices.Sorted(maps.Keys(brands)))
	if f.MIG != "" {
		b.oneOf(path+".mig", f.MIG, slices.Sorted(maps.Keys(migTables)))
	}
	if f.Name == "" || len(f.Name) > maxName || strings.ContainsFunc(f.Name, func(r rune) bool { return r > unicode.MaxASCII || !unicode.IsPrint(r) }) {
		b.problem(path+".name", "want 1 to %d printable ASCII characters", maxName)
	}
	if !computePattern.MatchString(f.Compute) {
		b.problem(path+".compute", "%q is not a compute capability such as \"9.0\"", f.Compute)
	}
	if f.SMs < 1 || f.SMs > 1024 {
		b.problem(path+".sms", "%d is not a number of multiprocessors from 1 to 1024", f.SMs)
	}
	if f.Power < 1 || f.Power > 10000 {
		b.problem(path+".power", "%d is not a power limit from 1 to 10000 W", f.Power)
	}
	return m
}

func (b *builder) oneOf(path, value string, known []string) {
	if !slices.Contains(known, value) {
		b.problem(path, "%q is not one of %s", value, strings.Join(known, ", "))
	}
}

// pciID turns "10de:2330" as lspci writes it into 0x233010de as NVML does.
func (b *builder) pciID(path, s string) uint32 {
	if !pciIDPattern.MatchString(s) {
		b.problem(path, "%q is not a PCI id such as 10de:2330", s)
		return 0
	}
	vendor, _ := strconv.ParseUint(s[:4], 16, 16) // the pattern lets only hexadecimal digits pass
	device, _ := strconv.ParseUint(s[5:], 16, 16)
	return uint32(device)<<16 | uint32(vendor)
}

func (b *builder) memory(path, s string) uint64 {
	digits := strings.TrimRight(s, "MGiB")
	unit, ok := map[string]uint64{"": 1, "MiB": mib, "GiB": 1 << 30}[s[len(digits):]]
	n, err := strconv.ParseUint(digits, 10, 64)
	if !ok || err != nil || n == 0 || n > math.MaxInt64/unit {
		b.problem(path, "%q is not an amount of memory such as 81559MiB", s)
		return 0
	}
	return n * unit
}

func (b *builder) gpus(models map[string]Model) {
	if n := len(b.file.GPUs); n < 1 || n > maxGPUs {
		b.problem("gpus", "there are %d; a machine has 1 to %d", n, maxGPUs)
		return
	}
	for i, f := range b.file.GPUs {
		b.machine.GPUs = append(b.machine.GPUs, b.gpu(i, f, models))
	}
}

func (b *builder) gpu(i int, f gpuFile, models map[string]Model) GPU {
	path := fmt.Sprintf("gpus.%d", i)
	id := []string{b.machine.Name, strconv.Itoa(i)}
	g := GPU{
		Model: b.modelOf(path+".model", f.Model, models), Index: i, Minor: i, Bus: f.Bus, NUMANode: gpu.NoNUMANode,
		UUID: "GPU-" + uuid(id...), Serial: serial(id...),
		Card: fmt.Sprintf("card%d", b.file.DRI.Card+i), Render: fmt.Sprintf("renderD%d", max(b.file.DRI.Render, 128)+i),
	}
	if f.Minor != nil {
		g.Minor = *f.Minor
	}
	if g.Minor < 0 || g.Minor >= maxGPUs {
		b.problem(path+".minor", "a minor is 0 to %d", maxGPUs-1)
	}
	if f.NUMA != nil {
		g.NUMANode = *f.NUMA
		if _, ok := b.file.NUMA[g.NUMANode]; !ok {
			b.problem(path+".numa", "the CPUs of node %d are not in numa", g.NUMANode)
		}
	}
	if !busPattern.MatchString(f.Bus) {
		b.problem(path+".bus", "%q is not a PCI address such as 0000:1b:00.0", f.Bus)
	}
	g.Upstream = b.upstream(path+".pcie", f.PCIe)
	return g
}

func (b *builder) modelOf(path, name string, models map[string]Model) Model {
	if name == "" && len(models) == 1 {
		for _, only := range models {
			return only
		}
	}
	m, ok := models[name]
	if !ok {
		b.problem(path, "%q is not one of %s", name, strings.Join(slices.Sorted(maps.Keys(models)), ", "))
	}
	return m
}

// upstream takes "pci0000:15/0000:15:01.0/0000:16:00.0" apart: a host bridge, then bridges.
func (b *builder) upstream(path, s string) []string {
	parts := strings.Split(s, "/")
	bad := !bridgePattern.MatchString(parts[0]) || len(parts) > 8
	for _, p := range parts[1:] {
		bad = bad || !busPattern.MatchString(p)
	}
	if bad {
		b.problem(path, "%q is not a host bridge and PCI addresses of bridges, such as pci0000:15/0000:15:01.0", s)
	}
	return parts
}

// checkUnique looks for addresses and minors that occur twice.
func (b *builder) checkUnique() {
	buses, minors := map[string]int{}, map[int]int{}
	for i, g := range b.machine.GPUs {
		if j, ok := buses[g.Bus]; ok {
			b.problem(fmt.Sprintf("gpus.%d.bus", i), "GPU %d has the address %s too", j, g.Bus)
		}
		if j, ok := minors[g.Minor]; ok {
			b.problem(fmt.Sprintf("gpus.%d.minor", i), "GPU %d has the minor %d too", j, g.Minor)
		}
		if slices.Contains(g.Upstream, g.Bus) {
			b.problem(fmt.Sprintf("gpus.%d.pcie", i), "the GPU is its own bridge")
		}
		buses[g.Bus], minors[g.Minor] = i, i
	}
}

func (b *builder) partitions() {
	for i := range b.machine.GPUs {
		g, wanted := &b.machine.GPUs[i], b.file.GPUs[i].MIG
		g.MIGMode = MIGDisabled
		if g.Model.MIG == "" {
			g.MIGMode = MIGUnsupported
		}
		if wanted == nil {
			continue
		}
		devices, err := partition(g, *wanted)
		if err != nil {
			b.problem(fmt.Sprintf("gpus.%d.mig", i), "%w", err)
			continue
		}
		g.MIGMode, g.MIG = MIGEnabled, devices
	}
}

// uuid makes a UUID of version 8 (RFC 9562: made by the application's own rule) from a hash of the words.
func uuid(words ...string) string {
	h := sha256.Sum256([]byte(strings.Join(words, "\x00")))
	h[6] = h[6]&0x0f | 0x80
	h[8] = h[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// serial makes a 13-digit serial number from a hash of the words.
func serial(words ...string) string {
	h := sha256.Sum256([]byte("serial\x00" + strings.Join(words, "\x00")))
	n := uint64(h[0])<<32 | uint64(h[1])<<24 | uint64(h[2])<<16 | uint64(h[3])<<8 | uint64(h[4])
	return fmt.Sprintf("1%012d", n%1_000_000_000_000)
}
