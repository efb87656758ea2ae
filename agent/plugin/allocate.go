package plugin

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/resource"
)

// AllocateOptions configure how containers get their devices.
type AllocateOptions struct {
	// Strategies are the ways in which a response has the devices; at least one of resource.Strategies.
	Strategies []resource.Strategy
	// AnnotationPrefix is the beginning of the annotations' keys. If it is empty, it is that of CDI, "cdi.k8s.io/".
	AnnotationPrefix string
	// Preference configures GetPreferredAllocation.
	Preference Preference
	// Take, if it is set, is called for the devices of a container before Allocate returns them. If it returns an
	// error, the container does not get them.
	Take func(ctx context.Context, resourceName string, devices []*resource.Device) error
	// Old, if it is set, returns a device that a container of a resource has under an ID that is not advertised any
	// more, or nil.
	Old func(resourceName, id string) *resource.Device
	// PreStart prepares a container's devices of a resource, each time before the container starts. If it returns an
	// error, the container does not start; it must return an error if devices stay unhealthy. If PreStart is nil, the
	// kubelet does not call PreStartContainer.
	PreStart func(ctx context.Context, resourceName string, devices []*resource.Device) error
}

const (
	cdiAnnotationPrefix = "cdi.k8s.io/"
	annotationName      = "gpu-cdi-plugin"

	// The variables that NVIDIA's container toolkit reads: the devices, the IMEX channels by number, and other extras
	// by class.
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	imexChannels   = "NVIDIA_IMEX_CHANNELS"
	imexClass      = "imex-channel"
)

var extraVariables = map[string]string{
	"gds":      "NVIDIA_GDS",
	"gdrcopy":  "NVIDIA_GDRCOPY",
	"mofed":    "NVIDIA_MOFED",
	"nvswitch": "NVIDIA_NVSWITCH",
}

func (o *AllocateOptions) has(s resource.Strategy) bool { return slices.Contains(o.Strategies, s) }

// Allocate returns what each container gets for its devices. It needs only the advertised list. The codes of its
// errors are
//
//	InvalidArgument     no device, a device twice, or more devices than the resource allows a container
//	NotFound            a device that is not advertised
//	FailedPrecondition  an unhealthy device, or one that Take refuses
func (s *server) Allocate(ctx context.Context, req *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	begin := time.Now()
	l, count := s.list.Load(), 0
	resp := &v1beta1.AllocateResponse{}
	for _, c := range req.GetContainerRequests() {
		devices, err := s.options.take(ctx, l, c.GetDevicesIds())
		if err != nil {
			s.log.Warn("an allocation was refused: " + status.Convert(err).Message())
			s.observer.Allocated(l.resource.Name, status.Code(err), 0, time.Since(begin))
			return nil, err
		}
		resp.ContainerResponses = append(resp.ContainerResponses, s.options.container(l, devices))
		count += len(c.GetDevicesIds())
	}
	s.observer.Allocated(l.resource.Name, codes.OK, count, time.Since(begin))
	return resp, nil
}

// take returns what list.take returns, if Take allows the devices.
func (o *AllocateOptions) take(ctx context.Context, l *list, ids []string) ([]*device, error) {
	devices, err := l.take(ids)
	if err != nil || o.Take == nil {
		return devices, err
	}
	taken := make([]*resource.Device, len(devices))
	for i, d := range devices {
		taken[i] = d.Device
	}
	if err := o.Take(ctx, l.resource.Name, taken); err != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "allocate %s: %v", l.resource.Name, err)
	}
	return devices, nil
}

// take returns the devices with these IDs. If they are too many, or some are not healthy, it returns an error that
// names them. Devices that are only in use are given: PreStart refuses them, except to a process that asks for a
// device that it uses itself. The kubelet asks for such devices only if their use began at the same time. So are
// devices that a container has which is ending: PreStart waits for its end. Other errors are those of find.
func (l *list) take(ids []string) ([]*device, error) {
	if limit := l.resource.Limit; limit > 0 && len(ids) > limit {
		return nil, status.Errorf(codes.InvalidArgument,
			"allocate %s: a container requests %d devices, but may have %d; %s",
			l.resource.Name, len(ids), limit, l.resource.LimitReason)
	}
	devices, err := l.find(ids)
	if err != nil {
		return nil, err
	}
	var unhealthy someOf
	for _, d := range devices {
		if !d.Healthy && !d.InUse && !d.Ending {
			unhealthy.add(d.ID, d.Reason)
		}
	}
	if len(unhealthy) > 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "allocate %s: unhealthy: %s", l.resource.Name, unhealthy)
	}
	return devices, nil
}

// find returns the devices with these IDs, in the order of the list. If some IDs are not advertised or given twice, it
// returns an error that names them.
func (l *list) find(ids []string) ([]*device, error) {
	name := l.resource.Name
	if len(ids) == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "allocate %s: a container requests no device", name)
	}
	devices := make([]*device, 0, len(ids))
	var unknown someOf
	for _, id := range ids {
		if d := l.devices[id]; d != nil {
			devices = append(devices, d)
		} else {
			unknown.add(id, "")
		}
	}
	if len(unknown) > 0 {
		return nil, status.Errorf(codes.NotFound, "allocate %s: no such device: %s", name, unknown)
	}
	slices.SortFunc(devices, func(a, b *device) int { return a.index - b.index })
	var twice someOf
	for i, d := range devices[1:] {
		if d == devices[i] {
			twice.add(d.ID, "")
		}
	}
	if len(twice) > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "allocate %s: listed twice: %s", name, twice)
	}
	return devices, nil
}

// container returns the response for a container: the grants of its devices, and the part that every container gets.
func (o *AllocateOptions) container(l *list, devices []*device) *v1beta1.ContainerAllocateResponse {
	resp := &v1beta1.ContainerAllocateResponse{Envs: map[string]string{}, Annotations: map[string]string{}}
	var names []string
	// Replicas of one GPU or MIG device are next to each other, and have the same grant, which is added once.
	for _, d := range slices.CompactFunc(devices, func(a, b *device) bool { return a.UUID == b.UUID }) {
		merge(resp, d.response)
		names = append(names, d.names...)
		if d.UUID != d.Parent {
			resp.Annotations[resource.ParentAnnotation(d.UUID)] = d.Parent
		}
	}
	merge(resp, l.common.response)
	if o.has(resource.Envvar) {
		resp.Envs[visibleDevices] = strings.Join(unqualified(names), ",")
	}
	if o.has(resource.CDIAnnotations) {
		// A container with devices of several resources gets an annotation for each resource. So the key depends on
		// the resource and on the devices.
		value := strings.Join(append(names, l.common.names...), ",")
		sum := sha256.Sum256([]byte(l.resource.Name + "\n" + value))
		key := cmp.Or(o.AnnotationPrefix, cdiAnnotationPrefix) + annotationName + "_" + hex.EncodeToString(sum[:8])
		resp.Annotations[key] = value
	}
	return resp
}

// part is the part of a response that comes from one grant.
type part struct {
	names    []string // names of CDI devices
	response *v1beta1.ContainerAllocateResponse
}

// partOf converts a grant, which may be nil. Variables and annotations that name the devices of several grants are not
// in the result.
func (o *AllocateOptions) partOf(g *resource.Grant) part {
	resp := &v1beta1.ContainerAllocateResponse{Envs: map[string]string{}}
	if g == nil {
		return part{response: resp}
	}
	if o.has(resource.CDICRI) {
		for _, name := range g.CDIDevices {
			resp.CdiDevices = append(resp.CdiDevices, &v1beta1.CDIDevice{Name: name})
		}
	}
	addEdits(resp, &g.Always)
	if o.has(resource.DeviceSpecs) {
		addEdits(resp, &g.WithoutCDI)
	}
	return part{g.CDIDevices, resp}
}

// commonPart converts the grant that every container of the resource gets, besides the grants of its devices.
func (o *AllocateOptions) commonPart(g *resource.Grant) part {
	common := o.partOf(g)
	if !o.has(resource.Envvar) {
		return common
	}
	var channels []string
	for _, name := range common.names {
		kind, device, _ := strings.Cut(name, "=")
		_, class, _ := strings.Cut(kind, "/")
		if class == imexClass {
			channels = append(channels, device)
		} else if variable := extraVariables[class]; variable != "" {
			common.response.Envs[variable] = "enabled"
		}
	}
	if len(channels) > 0 {
		common.response.Envs[imexChannels] = strings.Join(channels, ",")
	}
	return common
}

// merge adds the response `from` to the response `to`. If `to` already has a path or a variable, it stays as it is.
func merge(to, from *v1beta1.ContainerAllocateResponse) {
	to.CdiDevices = append(to.CdiDevices, from.GetCdiDevices()...)
	for _, n := range from.GetDevices() {
		same := func(d *v1beta1.DeviceSpec) bool { return d.ContainerPath == n.ContainerPath }
		if !slices.ContainsFunc(to.Devices, same) {
			to.Devices = append(to.Devices, n)
		}
	}
	for _, m := range from.GetMounts() {
		same := func(o *v1beta1.Mount) bool { return o.ContainerPath == m.ContainerPath }
		if !slices.ContainsFunc(to.Mounts, same) {
			to.Mounts = append(to.Mounts, m)
		}
	}
	for name, value := range from.GetEnvs() {
		if _, set := to.Envs[name]; !set {
			to.Envs[name] = value
		}
	}
}

// addEdits adds the device nodes, mounts and variables of CDI edits.
func addEdits(to *v1beta1.ContainerAllocateResponse, edits *specs.ContainerEdits) {
	for _, n := range edits.DeviceNodes {
		to.Devices = append(to.Devices, &v1beta1.DeviceSpec{ // with CDI's defaults
			ContainerPath: n.Path, HostPath: cmp.Or(n.HostPath, n.Path), Permissions: cmp.Or(n.Permissions, "rwm"),
		})
	}
	for _, m := range edits.Mounts {
		to.Mounts = append(to.Mounts, &v1beta1.Mount{
			ContainerPath: m.ContainerPath, HostPath: m.HostPath, ReadOnly: slices.Contains(m.Options, "ro"),
		})
	}
	for _, e := range edits.Env {
		name, value, _ := strings.Cut(e, "=")
		to.Envs[name] = value
	}
}

// unqualified returns CDI names without their kind.
func unqualified(names []string) []string {
	devices := make([]string, len(names))
	for i, name := range names {
		_, devices[i], _ = strings.Cut(name, "=")
	}
	return devices
}

// someOf is a list of names that come from a caller. A message shows only the first few names, and shortens long ones.
// Real device IDs are shorter.
type someOf []string

const (
	namesInMessage = 8
	nameInMessage  = 80
)

func (s *someOf) add(name, reason string) {
	text := strconv.Quote(wording.Shorten(name, nameInMessage))
	if reason != "" {
		text += " (" + reason + ")"
	}
	*s = append(*s, text)
}

// String returns the first names, and how many others there are.
func (s someOf) String() string { return wording.ShortenList(s, namesInMessage, ", ") }
