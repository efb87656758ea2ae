package sim

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/yamlfile"
)

// machineFile is the format of a machine file. sim/machines/dgx-h100.yaml explains the keys.
type machineFile struct {
	Description string               `yaml:"description"`
	Driver      string               `yaml:"driver"`
	Models      map[string]modelFile `yaml:"models"`
	GPUs        []gpuFile            `yaml:"gpus"`
	NUMA        map[int]string       `yaml:"numa"`
	DRI         driFile              `yaml:"dri"`
	NVLink      *nvlinkFile          `yaml:"nvlink"`
}

type modelFile struct {
	Name         string `yaml:"name"`
	PCI          string `yaml:"pci"`
	Subsystem    string `yaml:"subsystem"`
	Display      bool   `yaml:"display"`
	Architecture string `yaml:"architecture"`
	Brand        string `yaml:"brand"`
	Compute      string `yaml:"compute"`
	Memory       string `yaml:"memory"`
	SMs          int    `yaml:"sms"`
	Power        int    `yaml:"power"`
	VBIOS        string `yaml:"vbios"`
	Board        string `yaml:"board"`
	MIG          string `yaml:"mig"`
}

type gpuFile struct {
	Model string    `yaml:"model"`
	Bus   string    `yaml:"bus"`
	NUMA  *int      `yaml:"numa"`
	PCIe  string    `yaml:"pcie"`
	Minor *int      `yaml:"minor"`
	MIG   *[]string `yaml:"mig"`
}

type driFile struct {
	Card   int `yaml:"card"`
	Render int `yaml:"render"`
}

type nvlinkFile struct {
	Version  int        `yaml:"version"`
	Speed    int        `yaml:"speed"`
	PerGPU   int        `yaml:"perGPU"`
	Switches [][]string `yaml:"switches"`
	Matrix   [][]int    `yaml:"matrix"`
}

// parseMachine parses a machine file. The error has all problems, with their lines where known.
func parseMachine(name string, data []byte) (*Machine, error) {
	if len(data) > maxMachineFile {
		return nil, fmt.Errorf("larger than %d bytes", maxMachineFile)
	}
	var f machineFile
	document, err := yamlfile.Decode(data, &f, nil)
	switch {
	case err != nil:
		return nil, err
	case document.Kind == 0:
		return nil, errors.New("the file is empty")
	}
	b := &builder{
		machine: &Machine{
			Name: name, Description: f.Description, Driver: f.Driver, CPUs: f.NUMA,
			source: bytes.Clone(data),
		},
		file: &f, lines: lineNumbers(data),
	}
	b.build()
	if len(b.problems) > 0 {
		return nil, errors.Join(b.problems...)
	}
	return b.machine, nil
}

// lineNumbers maps the path of each node of a document ("gpus.3.bus") to its line.
func lineNumbers(data []byte) map[string]int {
	lines := map[string]int{}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil || len(doc.Content) == 0 {
		return lines
	}
	var walk func(path string, n *yaml.Node)
	walk = func(path string, n *yaml.Node) {
		lines[path] = n.Line
		if n.Kind == yaml.SequenceNode {
			for i, child := range n.Content {
				walk(fmt.Sprintf("%s.%d", path, i), child)
			}
		}
		for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
			walk(path+"."+n.Content[i].Value, n.Content[i+1])
		}
	}
	walk("", doc.Content[0])
	return lines
}

// builder makes a machine from a machine file and collects all problems.
type builder struct {
	file     *machineFile
	machine  *Machine
	lines    map[string]int
	problems []error
}

// addProblem records a problem at a path such as "gpus.3.bus".
func (b *builder) addProblem(path, format string, args ...any) {
	err := fmt.Errorf("%s: "+format, append([]any{path}, args...)...)
	for at := "." + path; at != ""; at = at[:strings.LastIndexByte(at, '.')] {
		if line, ok := b.lines[at]; ok {
			err = fmt.Errorf("line %d: %w", line, err)
			break
		}
	}
	b.problems = append(b.problems, err)
}

func (b *builder) build() {
	if d := b.file.Driver; d != "" && !driverPattern.MatchString(d) {
		b.addProblem("driver", "%q is not a driver version such as %s", d, DefaultDriver)
	}
	b.checkCPUs()
	models := b.buildModels()
	b.buildGPUs(models)
	if len(b.problems) > 0 {
		return // further checks would only repeat these problems
	}
	b.checkUnique()
	b.buildPairs()
	b.buildNVLinks()
	b.buildMIG()
}

func (b *builder) checkCPUs() {
	for _, node := range slices.Sorted(maps.Keys(b.file.NUMA)) {
		path := fmt.Sprintf("numa.%d", node)
		if node < 0 || node > 1023 {
			b.addProblem(path, "a NUMA node is 0 to 1023")
		}
		if list := b.file.NUMA[node]; list == "" || strings.Trim(list, "0123456789,-") != "" {
			b.addProblem(path, "%q is not a list of CPUs such as 0-15,32-47", list)
		}
	}
}

// maxGPUs is the largest number of GPUs in the library.
const maxGPUs = 128

// maxName is the length of the longest product name in bytes: NVML_DEVICE_NAME_V2_BUFFER_SIZE less the final zero.
const maxName = 95

// architectures maps names to NVML_DEVICE_ARCH_*, brands to NVML_BRAND_*.
var (
	architectures = map[string]int{"volta": 5, "turing": 6, "ampere": 7, "ada": 8, "hopper": 9, "blackwell": 10}
	brands        = map[string]int{
		"quadro": 1, "tesla": 2, "geforce": 5, "quadro-rtx": 12, "nvidia-rtx": 13,
		"nvidia": 14,
	}
)

var (
	busPattern     = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]$`)
	bridgePattern  = regexp.MustCompile(`^pci[0-9a-f]{4}:[0-9a-f]{2}$`)
	pciIDPattern   = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{4}$`)
	computePattern = regexp.MustCompile(`^[1-9][0-9]?\.[0-9]$`)
)

func (b *builder) buildModels() map[string]Model {
	models := map[string]Model{}
	for _, key := range slices.Sorted(maps.Keys(b.file.Models)) {
		models[key] = b.model("models."+key, b.file.Models[key])
	}
	if len(models) == 0 {
		b.addProblem("models", "want at least one model")
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
	if f.Name == "" || len(f.Name) > maxName ||
		strings.ContainsFunc(f.Name, func(r rune) bool { return r > unicode.MaxASCII || !unicode.IsPrint(r) }) {
		b.addProblem(path+".name", "want 1 to %d printable ASCII characters", maxName)
	}
	if !computePattern.MatchString(f.Compute) {
		b.addProblem(path+".compute", "%q is not a compute capability such as \"9.0\"", f.Compute)
	}
	if f.SMs < 1 || f.SMs > 1024 {
		b.addProblem(path+".sms", "%d is not a number of multiprocessors from 1 to 1024", f.SMs)
	}
	if f.Power < 1 || f.Power > 10000 {
		b.addProblem(path+".power", "%d is not a power limit from 1 to 10000 W", f.Power)
	}
	return m
}

func (b *builder) oneOf(path, value string, known []string) {
	if !slices.Contains(known, value) {
		b.addProblem(path, "%q is not one of %s", value, strings.Join(known, ", "))
	}
}

// pciID converts "10de:2330", the format of lspci, to 0x233010de, the format of NVML.
func (b *builder) pciID(path, s string) uint32 {
	if !pciIDPattern.MatchString(s) {
		b.addProblem(path, "%q is not a PCI id such as 10de:2330", s)
		return 0
	}
	vendor, _ := strconv.ParseUint(s[:4], 16, 16) // the pattern admits only hexadecimal digits
	device, _ := strconv.ParseUint(s[5:], 16, 16)
	return uint32(device)<<16 | uint32(vendor)
}

func (b *builder) memory(path, s string) uint64 {
	bytes, err := ParseMemory(s)
	if err != nil || bytes == 0 || bytes > math.MaxInt64 {
		b.addProblem(path, "%q is not an amount of memory such as 81559MiB", s)
		return 0
	}
	return bytes
}

func (b *builder) buildGPUs(models map[string]Model) {
	if n := len(b.file.GPUs); n < 1 || n > maxGPUs {
		b.addProblem("gpus", "want 1 to %d GPUs, not %d", maxGPUs, n)
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
		b.addProblem(path+".minor", "a minor is 0 to %d", maxGPUs-1)
	}
	if f.NUMA != nil {
		g.NUMANode = *f.NUMA
		if _, ok := b.file.NUMA[g.NUMANode]; !ok {
			b.addProblem(path+".numa", "the CPUs of node %d are not in numa", g.NUMANode)
		}
	}
	if !busPattern.MatchString(f.Bus) {
		b.addProblem(path+".bus", "%q is not a PCI address such as 0000:1b:00.0", f.Bus)
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
		b.addProblem(path, "%q is not one of %s", name, strings.Join(slices.Sorted(maps.Keys(models)), ", "))
	}
	return m
}

// upstream splits "pci0000:15/0000:15:01.0/0000:16:00.0" into a host bridge and bridges.
func (b *builder) upstream(path, s string) []string {
	parts := strings.Split(s, "/")
	bad := !bridgePattern.MatchString(parts[0]) || len(parts) > 8
	for _, p := range parts[1:] {
		bad = bad || !busPattern.MatchString(p)
	}
	if bad {
		b.addProblem(path, "%q is not a host bridge and PCI addresses of bridges, such as pci0000:15/0000:15:01.0", s)
	}
	return parts
}

// checkUnique records a problem for each address or minor that occurs twice.
func (b *builder) checkUnique() {
	buses, minors := map[string]int{}, map[int]int{}
	for i, g := range b.machine.GPUs {
		if j, ok := buses[g.Bus]; ok {
			b.addProblem(fmt.Sprintf("gpus.%d.bus", i), "GPU %d has the same address %s", j, g.Bus)
		}
		if j, ok := minors[g.Minor]; ok {
			b.addProblem(fmt.Sprintf("gpus.%d.minor", i), "GPU %d has the same minor %d", j, g.Minor)
		}
		if slices.Contains(g.Upstream, g.Bus) {
			b.addProblem(fmt.Sprintf("gpus.%d.pcie", i), "the GPU is its own bridge")
		}
		buses[g.Bus], minors[g.Minor] = i, i
	}
}

func (b *builder) buildMIG() {
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
			b.addProblem(fmt.Sprintf("gpus.%d.mig", i), "%w", err)
			continue
		}
		g.MIGMode, g.MIG = MIGEnabled, devices
	}
}

// uuid returns a UUID of version 8 (RFC 9562: vendor-specific) that is a hash of the words.
func uuid(words ...string) string {
	h := sha256.Sum256([]byte(strings.Join(words, "\x00")))
	h[6] = h[6]&0x0f | 0x80
	h[8] = h[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// serial returns a 13-digit serial number that is a hash of the words.
func serial(words ...string) string {
	h := sha256.Sum256([]byte("serial\x00" + strings.Join(words, "\x00")))
	n := uint64(h[0])<<32 | uint64(h[1])<<24 | uint64(h[2])<<16 | uint64(h[3])<<8 | uint64(h[4])
	return fmt.Sprintf("1%012d", n%1_000_000_000_000)
}
