package sim

import (
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

//go:embed machines/*.yaml
var machineFiles embed.FS

// maxMachineFile is the maximum size of a machine file in bytes. The largest one in the package has 2 KB.
const maxMachineFile = 1 << 20

// Machines returns the names of the machines in the package, sorted.
func Machines() []string {
	var names []string
	files, _ := fs.Glob(machineFiles, "machines/*.yaml") // the pattern is well-formed, so there is no error
	for _, f := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(f), ".yaml"))
	}
	slices.Sort(names)
	return names
}

// LoadMachine returns a machine by its name (one of Machines, or "pcie-fabric-N") or from a machine file, whose path
// has a slash or ends in ".yaml" or ".yml". Errors are ErrUnknownMachine, ErrMachineFile, and those of reading the
// file.
func LoadMachine(nameOrFile string) (*Machine, error) {
	ext := filepath.Ext(nameOrFile)
	if !strings.Contains(nameOrFile, "/") && ext != ".yaml" && ext != ".yml" {
		return builtIn(nameOrFile)
	}
	data, err := readMachineFile(nameOrFile)
	if err != nil {
		return nil, fmt.Errorf("read machine file: %w", err)
	}
	m, err := parseMachine(strings.TrimSuffix(filepath.Base(nameOrFile), ext), data)
	if err != nil {
		return nil, invalid("%w %s: %w", ErrMachineFile, nameOrFile, err)
	}
	return m, nil
}

func builtIn(name string) (*Machine, error) {
	if i := slices.Index(fabrics(), name); i >= 0 {
		return parseMachine(name, fabricFile(i+1))
	}
	data, err := machineFiles.ReadFile("machines/" + name + ".yaml")
	if err != nil {
		return nil, invalid("%w %q; there are %s and, of 16 to 128 GPUs, pcie-fabric-N",
			ErrUnknownMachine, name, strings.Join(Machines(), ", "))
	}
	return parseMachine(name, data)
}

// readMachineFile reads a regular file of at most maxMachineFile bytes.
func readMachineFile(path string) (data []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(err, fmt.Errorf("%s is not a regular file", path))
	}
	data, err = io.ReadAll(io.LimitReader(f, maxMachineFile+1))
	if err != nil {
		return nil, err
	}
	if len(data) > maxMachineFile {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, maxMachineFile)
	}
	return data, nil
}

// A machine "pcie-fabric-N" is generated: N GPUs on the largest PCIe fabrics that allocators meet. Each socket is a
// NUMA node with two host bridges. Below each host bridge are two root ports, below each root port a switch, and below
// that two switches with two GPUs each. So every PCIe path occurs: PIX, PXB, PHB, NODE, and, with several sockets, SYS.
const (
	fabricPrefix = "pcie-fabric-"
	fabricSocket = 16 // GPUs per socket
)

// fabrics returns the names of the generated machines, from the smallest to the largest. Machines does not return them,
// since tests run on each machine that it returns.
func fabrics() []string {
	var names []string
	for n := fabricSocket; n <= maxGPUs; n += fabricSocket {
		names = append(names, fabricPrefix+strconv.Itoa(n))
	}
	return names
}

// fabricFile returns the machine file of a fabric.
func fabricFile(sockets int) []byte {
	var b strings.Builder
	fmt.Fprintf(&b,
		"description: PCIe fabric, %d x L40S without NVLink, %d NUMA nodes, 2 host bridges and 8 switches each\n",
		sockets*fabricSocket, sockets)
	b.WriteString(`models:
  l40s:
    name: NVIDIA L40S
    pci: "10de:26b9"
    subsystem: "10de:1851"
    architecture: ada
    compute: "8.9"
    memory: 46068MiB
    sms: 142
    power: 350
    vbios: 95.02.66.00.02
    board: 900-2G133-0080-000
gpus:
`)
	for i := range sockets * fabricSocket {
		writeFabricGPU(&b, i)
	}
	b.WriteString("numa:\n")
	for s := range sockets {
		fmt.Fprintf(&b, "  %d: %d-%d\n", s, s*fabricSocket, (s+1)*fabricSocket-1)
	}
	b.WriteString("dri: {card: 0, render: 128}\n")
	return []byte(b.String())
}

// writeFabricGPU writes a GPU. The bits of its index are, from the lowest: the GPU on its switch, the switch, the root
// port, the host bridge, and the socket, which is also the PCI domain.
func writeFabricGPU(b *strings.Builder, i int) {
	gpu, leaf, port, bridge, socket := i&1, i>>1&1, i>>2&1, i>>3&1, i/fabricSocket
	root := 0x40 * bridge
	upper := root + 1 + 0x10*port
	lower := upper + 1 + 4*leaf
	fmt.Fprintf(b, "  - {bus: \"%04[1]x:%02[2]x:00.0\", numa: %[1]d, "+
		"pcie: \"pci%04[1]x:%02[3]x/%04[1]x:%02[3]x:%02[4]x.0/%04[1]x:%02[5]x:00.0/%04[1]x:%02[6]x:00.0\"}\n",
		socket, lower+1+gpu, root, 1+port, upper, lower)
}
