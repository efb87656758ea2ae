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

// Extra is a feature of a host, besides its GPUs, that containers can get. Each extra has its own CDI kind and spec,
// so that a container with a GPU gets it only if it is configured.
type Extra string

const (
	// IMEX are the channels through which GPUs of several hosts share memory.
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

// Kind returns the CDI kind of the extra's devices, with the vendor of the GPUs' kind: "nvidia.com/gds" for
// "nvidia.com/gpu".
func (e Extra) Kind(gpus string) string {
	vendor, _, _ := strings.Cut(gpus, "/")
	return vendor + "/" + e.row().class
}

// Extras returns all extras.
func Extras() []Extra {
	var list []Extra
	for i := range extraTable {
		list = append(list, extraTable[i].extra)
	}
	return list
}

// HasNode reports whether a device node, given by its path in a container, could belong to the extra.
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

// ExtraFiles are the files of an extra on a host. If there is no device node, containers cannot get the extra.
type ExtraFiles struct {
	Extra Extra
	Nodes []DeviceNode
	Files []File
}

// DiscoverExtra finds the files of an extra on a host. For IMEX it searches only for the given channels; other extras
// have no channels. There is a finding for each file that was searched for, or that exists and has a numbered name.
func DiscoverExtra(h host.Host, e Extra, channels []int) (*ExtraFiles, []Finding) {
	found := &ExtraFiles{Extra: e}
	var findings []Finding
	numbers := ReadNumbers(h)
	for _, name := range e.row().names(h, channels) {
		n, err := findNode(h, numbers, name, All)
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

// names returns the device nodes under /dev to search for.
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
