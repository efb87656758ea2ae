package sim

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"gpu-cdi-plugin/gpu"
)

// descriptionHeader is the first line of a description. It has the version of the format.
const descriptionHeader = "gpusim 1\n"

// describe returns the description that is embedded in the library.
func describe(m *Machine, driver, libDir string) []byte {
	cuda, major := cudaVersion(driver)
	records := []record{newRecord("machine", "name", m.Name, "driver", driver, "kernel", driver, "cuda", cuda,
		"nvml", strconv.Itoa(major)+"."+driver, "libdir", libDir)}
	for i := range m.GPUs {
		records = append(records, describeGPU(&m.GPUs[i])...)
	}
	for _, p := range m.Pairs {
		if p.PCIe == gpu.PathSystem {
			continue // the default applies
		}
		records = append(records, newRecord("link", "a", p.A, "b", p.B, "pcie", strings.ToLower(p.PCIe.String())))
	}
	return append([]byte(descriptionHeader), formatRecords(records)...)
}

func describeGPU(g *GPU) []record {
	table := migTables[g.Model.MIG]
	maxMIG := 0
	if len(table) > 0 {
		maxMIG = memorySlices - 1
	}
	records := []record{newRecord("gpu",
		"index", g.Index, "uuid", g.UUID, "name", g.Name, "minor", g.Minor, "bus", g.Bus,
		"device", fmt.Sprintf("%#08x", g.Device), "subsystem", fmt.Sprintf("%#08x", g.Subsystem),
		"memory", g.MemoryBytes, "cc", g.ComputeCapability, "arch", architectures[g.Architecture],
		"brand", brands[g.Brand], "numa", g.NUMANode, "mig", g.MIGMode, "maxmig", maxMIG,
		"serial", g.Serial, "board", g.BoardPart, "vbios", g.VBIOS, "power", g.PowerWatts, "sms", g.SMs)}
	for _, l := range g.NVLinks {
		kind := "gpu"
		if l.Switch {
			kind = "switch"
		}
		records = append(records, newRecord("nvlink", "gpu", g.Index, "port", l.Port, "remote", l.Remote, "type", kind,
			"version", l.Version, "speed", l.SpeedMBps))
	}
	for _, p := range table {
		records = append(records, p.record(g.Index))
	}
	return append(records, describeMIG(g.Index, g.MIG)...)
}

func (p *migProfile) record(index int) record {
	starts := strings.ReplaceAll(strings.Trim(fmt.Sprint(p.starts), "[]"), " ", ",")
	return newRecord("migprofile", "gpu", index, "name", p.name, "id", p.id, "enum", p.enum, "slices", p.slices,
		"size", p.size, "starts", starts, "limit", p.limit, "memory", p.memory, "sms", p.sms,
		"copy", p.engines.Copy, "decoder", p.engines.Decoder, "encoder", p.engines.Encoder,
		"jpeg", p.engines.JPEG, "ofa", p.engines.OFA)
}

func describeMIG(index int, devices []MIGDevice) []record {
	var records []record
	ciStart := 0
	for _, d := range devices {
		if d.ComputeInstance == 0 {
			ciStart = 0
		}
		records = append(records, newRecord("mig", "gpu", index, "index", d.Index, "uuid", d.UUID, "gi", d.GPUInstance,
			"ci", d.ComputeInstance, "profile", d.Profile, "memory", d.MemoryBytes, "gislices", d.GPUSlices,
			"cislices", d.ComputeSlices, "sms", d.SMs, "giprofile", d.GPUProfile, "ciprofile", d.ComputeProfile,
			"start", d.Start, "size", d.Size, "cistart", ciStart,
			"gicap", d.GPUInstanceCap, "cicap", d.ComputeInstanceCap,
			"copy", d.Engines.Copy, "decoder", d.Engines.Decoder, "encoder", d.Engines.Encoder,
			"jpeg", d.Engines.JPEG, "ofa", d.Engines.OFA))
		ciStart += d.ComputeSlices
	}
	return records
}

// cudaVersions maps a driver's branch to the newest CUDA version that it supports, in NVML's form (1000 times the major
// version plus 10 times the minor version), from the CUDA Toolkit release notes.
var cudaVersions = map[int]int{
	470: 11040, 525: 12000, 530: 12010, 535: 12020, 545: 12030, 550: 12040, 555: 12050, 560: 12060, 565: 12070, 570: 12080,
	575: 12090, 580: 13000, 590: 13010, 615: 13040,
}

// cudaVersion returns the newest CUDA version that a driver supports, in NVML's form, and the driver's major version.
// For an unknown branch it returns the CUDA version of the branch before.
func cudaVersion(driver string) (cuda, major int) {
	first, _, _ := strings.Cut(driver, ".")
	major, _ = strconv.Atoi(first) // driverPattern admits only numbers
	cuda, best := 11000, 0
	for branch, version := range cudaVersions {
		if branch <= major && branch > best {
			cuda, best = version, branch
		}
	}
	return cuda, major
}

// Snapshot returns the snapshot of the machine with a driver version and without faults.
func (m *Machine) Snapshot(driver string) *gpu.Snapshot {
	cuda, _ := cudaVersion(driver)
	s := &gpu.Snapshot{DriverVersion: driver, CUDAVersion: fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)}
	for i := range m.GPUs {
		s.Devices = append(s.Devices, m.GPUs[i].device())
	}
	for _, p := range m.Pairs {
		a, b := &m.GPUs[p.A], &m.GPUs[p.B]
		link := gpu.Link{A: p.A, B: p.B, PCIe: p.PCIe, NVLinks: linksTo(a, b.Bus)}
		if on, other := linksToSwitches(a), linksToSwitches(b); on > 0 && other > 0 {
			link.NVLinks, link.Switched = min(on, other), true
		}
		s.Links = append(s.Links, link)
	}
	return s
}

func (g *GPU) device() gpu.Device {
	d := gpu.Device{
		Index: g.Index, UUID: g.UUID, Name: g.Name, Minor: g.Minor, PCIBusID: g.Bus, NUMANode: g.NUMANode,
		MemoryBytes: g.MemoryBytes, ComputeCapability: g.ComputeCapability, MIGEnabled: g.MIGMode == MIGEnabled,
		MIGCapable: g.MIGMode != MIGUnsupported, PCIClass: fmt.Sprintf("0x%06x", g.Class),
	}
	for _, m := range g.MIG {
		one, e := m.MIGDevice, m.Engines
		one.Attributes = gpu.MIGAttributes{
			Multiprocessors: m.SMs, GPUSlices: m.GPUSlices, ComputeSlices: m.ComputeSlices,
			CopyEngines: e.Copy, Decoders: e.Decoder, Encoders: e.Encoder, JPEGEngines: e.JPEG, OFAEngines: e.OFA,
		}
		d.MIG = append(d.MIG, one)
	}
	return d
}

func linksTo(g *GPU, bus string) (n int) {
	for _, l := range g.NVLinks {
		if !l.Switch && l.Remote == bus {
			n++
		}
	}
	return n
}

func linksToSwitches(g *GPU) (n int) {
	for _, l := range g.NVLinks {
		if l.Switch {
			n++
		}
	}
	return n
}

// descriptionSection is the library's section that holds the description.
const descriptionSection = ".gpusim"

// patch returns a copy of the compiled library with the description in it.
func patch(library, description []byte) ([]byte, error) {
	f, err := elf.NewFile(bytes.NewReader(library))
	if err != nil {
		return nil, fmt.Errorf("read the compiled library: %w", err)
	}
	s := f.Section(descriptionSection)
	if s == nil || s.Type != elf.SHT_PROGBITS || s.Offset+s.Size > uint64(len(library)) {
		return nil, errors.New("the compiled library has no section " + descriptionSection)
	}
	if uint64(len(description)) >= s.Size {
		return nil, fmt.Errorf("the machine's description has %d bytes, the library has room for %d",
			len(description), s.Size-1)
	}
	patched := bytes.Clone(library)
	room := patched[s.Offset : s.Offset+s.Size]
	clear(room[copy(room, description):])
	return patched, nil
}
