package driver

import (
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
)

// Extra is something that a node has besides its GPUs and that containers can get. Each has a CDI kind and a spec of
// its own, so that a container with a GPU gets it only where it is configured.
type Extra string

// The extras.
const (
	// IMEX are the channels by which GPUs of several nodes share memory.
	IMEX Extra = "imex"
	// GDS is GPUDirect Storage: reading from disks and the network into a GPU's memory.
	GDS Extra = "gds"
	// GDRCopy maps a GPU's memory for the CPU.
	GDRCopy Extra = "gdrcopy"
	// MOFED are the host's InfiniBand and RoCE adapters, for RDMA into a GPU's memory (GPUDirect RDMA).
	MOFED Extra = "mofed"
	// NVSwitch are the switches between the GPUs, for programs that manage them.
	NVSwitch Extra = "nvswitch"
)

// Kind is the CDI kind of the extra's devices, with the vendor of that of the GPUs: "nvidia.com/gds" for
// "nvidia.com/gpu".
func (e Extra) Kind(gpus string) string {
	vendor, _, _ := strings.Cut(gpus, "/")
	return vendor + "/" + e.row().class
}

// Extras lists the extras.
func Extras() []Extra {
	var list []Extra
	for i := range extraTable {
		list = append(list, extraTable[i].extra)
	}
	return list
}

// HasNode reports whether a device node, by its path in a container, could be one of the extra's.
func (e Extra) HasNode(node string) bool {
	r := e.row()
	name := strings.TrimPrefix(node, "/dev/")
	return slices.Contains(r.nodes, name) || r.numbered != "" && isNumbered(name, r.numbered)
}

func (e Extra) row() *extraRow {
	i := slices.IndexFunc(extraTable, func(r extraRow) bool { return r.extra == e })
	if i < 0 {
		return &extraRow{extra: e, class: string(e)}
	}
	return &extraTable[i]
}

// ExtraFiles are what a host has of an extra. Without a node containers cannot get it.
type ExtraFiles struct {
	Extra Extra
	Nodes []DeviceNode
	Files []File
}

// DiscoverExtra finds what a host has of an extra. Of IMEX it searches only for the channels of those numbers; other
// extras have none. There is a finding for each file that was searched for, or that exists where names have numbers.
func DiscoverExtra(h host.Host, e Extra, channels []int) (*ExtraFiles, []Finding) {
	found := &ExtraFiles{Extra: e}
	var findings []Finding
	for _, name := range e.row().names(h, channels) {
		n, err := findNode(h, name, All)
		findings = append(findings, n.finding(err))
		if err == nil {
			found.Nodes = append(found.Nodes, n)
		}
	}
	for _, row := range e.row().files {
		places := []place{{newRoot(h.DriverRoot()), row.path}, {newRoot(h.Root()), row.path}}
		f, finding := findFile(Finding{Name: row.path, Kind: KindConfig}, places, row.check)
		findings = append(findings, finding)
		if finding.Used {
			found.Files = append(found.Files, f)
		}
	}
	return found, findings
}

// names are the nodes under /dev to search for.
func (r *extraRow) names(h host.Host, channels []int) []string {
	if r.extra == IMEX {
		names := make([]string, len(channels))
		for i, c := range channels {
			names[i] = imexChannel + strconv.Itoa(c)
		}
		return names
	}
	if r.numbered == "" {
		return r.nodes
	}
	return slices.Concat(r.nodes, numberedNodes(h, r.numbered))
}

func (r *extraFileRow) check(_ place, info fs.FileInfo) error {
	if info.Mode().Type() != r.mode {
		return fmt.Errorf("%s, not used", fileio.TypeName(info.Mode()))
	}
	return nil
}
