package dra

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// DefaultDriver is the default name of the driver. It is that of NVIDIA's, so that the same claims and DeviceClasses
// work with both.
const DefaultDriver = podresources.DRADriver

// Identity says whose slices they are.
type Identity struct {
	Driver string // such as DefaultDriver
	Node   string
}

// Slices returns the slices of a state, in which pool generations are 0, and the devices that are not in them, each
// with the reason. pcieRoots has the PCIe root of each GPU by PCI address, such as "pci0000:00".
//
// A device that cannot be allocated is in its slice and has a taint: claims may tolerate it, and a claim that has the
// device keeps it.
func Slices(id Identity, s *node.State, pcieRoots map[string]string) (list []Slice, omitted []string) {
	devices, omitted := devicesOf(id.Driver, s, pcieRoots)
	// A slice without taints may have more devices, but then a taint would move devices between slices.
	count := (len(devices) + maxDevices - 1) / maxDevices
	for i := range count {
		list = append(list, Slice{
			APIVersion: apiVersion, Kind: "ResourceSlice", Metadata: Metadata{Name: id.sliceName(i)},
			Spec: SliceSpec{
				Driver: id.Driver, NodeName: id.Node, Pool: Pool{Name: id.Node, SliceCount: count},
				Devices: devices[i*maxDevices : min((i+1)*maxDevices, len(devices))],
			},
		})
	}
	return list, omitted
}

// sliceName returns the name of a slice. Names are not generated, so a slice whose creation was not answered is not
// created twice.
func (id Identity) sliceName(i int) string {
	suffix := "-" + id.Driver + "-" + strconv.Itoa(i)
	return shortened(id.Node, maxObject-len(suffix)) + suffix
}

func devicesOf(driver string, s *node.State, pcieRoots map[string]string) (list []Device, omitted []string) {
	if s.Snapshot == nil {
		return nil, nil
	}
	groups := nvlinkGroups(s.Snapshot)
	for _, offered := range offers(s) {
		d := offered.device
		if why := offered.whyNot(); why != "" {
			omitted = append(omitted, offered.label+" is not offered by DRA: "+why)
			continue
		}
		one := Device{
			Name: offered.name, Attributes: map[string]Attribute{}, Capacity: map[string]Capacity{},
			Taints: taintsOf(driver, d, s.Health),
		}
		one.addAttributes(s.Snapshot, &offered, pcieRoots[d.PCIBusID], groups[d.UUID])
		if d.MemoryBytes >= 1<<10 {
			one.Capacity[memory] = Capacity{Value: quantity(d.MemoryBytes)}
		}
		if d.Shared() {
			one.share(&offered)
		}
		list = append(list, one)
	}
	return list, omitted
}

// offer is a device that the node offers under one or several resource names or replicas.
type offer struct {
	name     string // in the API
	label    string // for people
	device   *resource.Device
	resource *resource.Resource
	replicas int // 0 if the device is not shared
	gpu      *gpu.Device
	mig      *gpu.MIGDevice // nil for a whole GPU
}

// whyNot says why a device is not in slices, or is empty.
func (o *offer) whyNot() string {
	switch {
	case o.device.MPS != nil:
		return "it is shared by MPS, whose limits claims cannot get"
	case o.device.Shared() && o.defaultShare() < leastShare:
		return fmt.Sprintf("its memory cannot be divided among %d replicas", o.replicas)
	case len(o.name) > maxName || !dnsLabel.MatchString(o.name):
		return fmt.Sprintf("its UUID %q makes no name", o.device.UUID)
	}
	return ""
}

// offers returns the offered devices in the order of the snapshot. All replicas of a device are one.
func offers(s *node.State) []offer {
	byUUID := map[string]offer{}
	for i := range s.Resources {
		r := &s.Resources[i]
		for j := range r.Devices {
			d := &r.Devices[j]
			o, known := byUUID[d.UUID]
			if !known {
				o = offer{name: podresources.DeviceName(d.UUID), device: d, resource: r}
			}
			if d.Shared() {
				o.replicas++
			}
			byUUID[d.UUID] = o
		}
	}
	var list []offer
	for i := range s.Snapshot.Devices {
		for _, a := range s.Snapshot.Devices[i].Allocatables() {
			if o, offered := byUUID[a.UUID()]; offered && a.UUID() != "" {
				o.label, o.gpu, o.mig = a.Label(), a.GPU, a.MIG
				list = append(list, o)
			}
		}
	}
	return list
}

var dnsLabel = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// addAttributes adds attributes under the names of NVIDIA's DRA driver and of Kubernetes. Unknown values are left out:
// a selector with an empty value would match them.
func (d *Device) addAttributes(s *gpu.Snapshot, o *offer, pcieRoot, nvlinkGroup string) {
	kind := "gpu"
	if o.mig != nil {
		kind = "mig"
		d.addString("profile", o.mig.Profile)
		d.addString("parentUUID", o.gpu.UUID)
	}
	d.addString("type", kind)
	d.addString("uuid", o.device.UUID)
	if len(o.resource.Name) <= maxValue { // a part of a name would be another name
		d.addString("resourceName", o.resource.Name)
	}
	d.addString("productName", o.gpu.Name)
	d.addString("architecture", o.gpu.Architecture())
	d.addVersion("cudaComputeCapability", o.gpu.ComputeCapability)
	d.addVersion("driverVersion", s.DriverVersion)
	d.addVersion("cudaDriverVersion", s.CUDAVersion)
	d.addString("resource.kubernetes.io/pciBusID", o.gpu.PCIBusID)
	d.addString("resource.kubernetes.io/pcieRoot", pcieRoot)
	if n := int64(o.gpu.NUMANode); n != gpu.NoNUMANode {
		d.Attributes["resource.kubernetes.io/numaNode"] = Attribute{Int: &n}
	}
	if o.mig == nil { // MIG devices do not use NVLinks
		d.addString("nvlinkGroup", nvlinkGroup)
	}
}

func (d *Device) addString(name, value string) {
	if value != "" {
		value = wording.Shorten(value, maxValue)
		d.Attributes[name] = Attribute{String: &value}
	}
}

func (d *Device) addVersion(name, value string) {
	if v := semver(value); v != "" {
		d.Attributes[name] = Attribute{Version: &v}
	}
}

// semver returns a version of one to three numbers, such as "580.126.09", in the form of semver.org: "580.126.9". For
// anything else it returns "".
func semver(version string) string {
	parts := strings.Split(version, ".")
	if len(parts) > 3 {
		return ""
	}
	var numbers [3]uint64
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 10, 32)
		if err != nil {
			return ""
		}
		numbers[i] = n
	}
	return fmt.Sprintf("%d.%d.%d", numbers[0], numbers[1], numbers[2])
}

// taintsOf returns the taint of a device that containers must not get, with the state of its health as the key and the
// reason as the value. Other reasons have the key "unavailable" and no value: they can name the pods of others, and
// more users may read slices than pods.
func taintsOf(driver string, d *resource.Device, states map[string]health.Status) []Taint {
	status, known := states[d.UUID]
	switch {
	case known && status.State != health.Healthy:
		since := status.Since.UTC().Truncate(time.Second)
		return []Taint{{
			Key: driver + "/" + string(status.State), Value: labelValue(status.Reason), Effect: noSchedule, TimeAdded: &since,
		}}
	case !d.Healthy:
		return []Taint{{Key: driver + "/unavailable", Effect: noSchedule}}
	}
	return nil
}

var notInLabels = regexp.MustCompile(`[^A-Za-z0-9_.]+`)

// labelValue returns a text as the value of a label: "XID 95 (uncontained ECC error)" becomes
// "XID-95-uncontained-ECC-error".
func labelValue(text string) string {
	value := notInLabels.ReplaceAllString(text, "-")
	value = strings.TrimLeft(value, "-_.")
	return strings.TrimRight(value[:min(len(value), maxLabel)], "-_.")
}

// nvlinkGroups returns the group of each GPU that NVLinks join with others, by UUID. Any two GPUs of a group are
// joined. A group is named after its first GPU.
//
// In a mesh, groups could overlap. A GPU joins the first group with which it is completely joined, which gives the two
// halves of a DGX-1.
func nvlinkGroups(s *gpu.Snapshot) map[string]string {
	var groups [][]*gpu.Device
	for i := range s.Devices {
		d := &s.Devices[i]
		at := -1
		for j, group := range groups {
			if joinedWithAll(s, d, group) {
				at = j
				break
			}
		}
		if at < 0 {
			groups = append(groups, nil)
			at = len(groups) - 1
		}
		groups[at] = append(groups[at], d)
	}
	byUUID := map[string]string{}
	for _, group := range groups {
		for _, d := range group {
			if len(group) > 1 {
				byUUID[d.UUID] = podresources.DeviceName(group[0].UUID)
			}
		}
	}
	return byUUID
}

func joinedWithAll(s *gpu.Snapshot, d *gpu.Device, group []*gpu.Device) bool {
	for _, other := range group {
		if link, known := s.Link(d.Index, other.Index); !known || link.NVLinks == 0 {
			return false
		}
	}
	return true
}

// shortened returns a name with at most so many bytes. A hash of a longer one takes the place of its end.
func shortened(name string, most int) string {
	if len(name) <= most {
		return name
	}
	sum := sha256.Sum256([]byte(name))
	hash := "-" + hex.EncodeToString(sum[:8])
	return strings.TrimRight(name[:most-len(hash)], "-.") + hash
}
