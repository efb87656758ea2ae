package sim

import (
	"fmt"
	"strconv"
	"strings"
)

// A machine "pcie-fabric-N" is generated: N GPUs on a PCIe fabric as large as allocators may have to deal with. Each
// socket is a NUMA node with two host bridges; below each are two root ports, below each of these a switch with two
// switches of two GPUs. So every PCIe path occurs: PIX, PXB, PHB, NODE, and, with more than one socket, SYS.
const (
	fabricPrefix = "pcie-fabric-"
	fabricSocket = 16 // GPUs of a socket
)

// Fabrics lists the names of the machines that are generated, from the smallest to the largest. They are not among
// Machines, which tests go through.
func Fabrics() []string {
	var names []string
	for n := fabricSocket; n <= maxGPUs; n += fabricSocket {
		names = append(names, fabricPrefix+strconv.Itoa(n))
	}
	return names
}

// fabricFile is the machine file of a fabric with that many sockets.
func fabricFile(sockets int) []byte {
	var b strings.Builder
	fmt.Fprintf(&b, "description: PCIe fabric, %d x L40S without NVLink, %d NUMA nodes, 2 host bridges and 8 switches each\n",
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

// writeFabricGPU places a GPU. The bits of its index are, from the lowest: the GPU on its switch, the switch, the root
// port, the host bridge; the rest is the socket, whose devices have a PCI domain of their own.
func writeFabricGPU(b *strings.Builder, i int) {
	gpu, leaf, port, bridge, socket := i&1, i>>1&1, i>>2&1, i>>3&1, i/fabricSocket
	root := 0x40 * bridge
	upper := root + 1 + 0x10*port
	lower := upper + 1 + 4*leaf
	fmt.Fprintf(b, "  - {bus: \"%04[1]x:%02[2]x:00.0\", numa: %[1]d, "+
		"pcie: \"pci%04[1]x:%02[3]x/%04[1]x:%02[3]x:%02[4]x.0/%04[1]x:%02[5]x:00.0/%04[1]x:%02[6]x:00.0\"}\n",
		socket, lower+1+gpu, root, 1+port, upper, lower)
}
