package kubelet

import (
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
)

// checksum returns the kubelet's checksum: 32-bit FNV-1a over the text of dump.
func checksum(dump []byte) uint64 {
	h := fnv.New32a()
	_, _ = h.Write(dump) // never fails
	return uint64(h.Sum32())
}

// dump returns the text that the checksum covers: the value as github.com/davecgh/go-spew prints it with %#v, with the
// kubelet's type names.
func (c *Checkpoint) dump() []byte {
	var p printer
	p.print("(checkpoint.checkpointData){PodDeviceEntries:([]checkpoint.PodDevicesEntry)")
	printList(&p, c.PodDeviceEntries, func(e Entry) {
		p.entry(e.PodUID, e.ContainerName, e.ResourceName, "(checkpoint.DevicesPerNUMA)", e.AllocResp, func() {
			printMap(&p, e.DeviceIDs, func(node int64) { p.print(strconv.FormatInt(node, 10)) })
		})
	})
	p.registered(c.RegisteredDevices)
	return p.text
}

// printer builds the text that the checksum covers.
type printer struct{ text []byte }

func (p *printer) print(s string) { p.text = append(p.text, s...) }

// entry prints an entry. `idsType` is the type of its device IDs, which the old format has differently.
func (p *printer) entry(uid, container, resource, idsType string, resp []byte, printIDs func()) {
	p.print("{PodUID:(string)" + uid + " ContainerName:(string)" + container + " ResourceName:(string)" + resource)
	p.print(" DeviceIDs:" + idsType)
	printIDs()
	p.print(" AllocResp:([]uint8)")
	printList(p, resp, func(b byte) { p.text = strconv.AppendUint(p.text, uint64(b), 10) })
	p.print("}")
}

// registered prints the registered devices and the end of the text.
func (p *printer) registered(devices map[string][]string) {
	p.print(" RegisteredDevices:(map[string][]string)")
	printMap(p, devices, p.print)
	p.print("}")
}

func (p *printer) ids(ids []string) { printList(p, ids, p.print) }

func printList[T any](p *printer, list []T, printItem func(T)) {
	if list == nil {
		p.print("<nil>")
		return
	}
	p.print("[")
	for i, item := range list {
		if i > 0 {
			p.print(" ")
		}
		printItem(item)
	}
	p.print("]")
}

func printMap[K int64 | string](p *printer, ids map[K][]string, printKey func(K)) {
	if ids == nil {
		p.print("<nil>")
		return
	}
	p.print("map[")
	for i, key := range slices.Sorted(maps.Keys(ids)) {
		if i > 0 {
			p.print(" ")
		}
		printKey(key)
		p.print(":")
		p.ids(ids[key])
	}
	p.print("]")
}
