package plugin

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/config"
	"gpu-cdi-plugin/resource"
)

// AllocateOptions are how containers are given devices.
type AllocateOptions struct {
	// Strategies are how a response names the devices; at least one.
	Strategies []config.Strategy
	// AnnotationPrefix begins the keys of annotations; empty is that of CDI, "cdi.k8s.io/".
	AnnotationPrefix string
	// Preference is which devices GetPreferredAllocation recommends.
	Preference Preference
}

const (
	cdiAnnotationPrefix = "cdi.k8s.io/"
	annotationName      = "gpu-cdi-plugin"

	// What NVIDIA's container toolkit reads: the devices, the IMEX channels by number, and other extras by class.
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

func (o *AllocateOptions) has(s config.Strategy) bool { return slices.Contains(o.Strategies, s) }

// validate returns all that is wrong.
func (o *AllocateOptions) validate() error {
	var errs []error
	known := strings.Join(config.Strategies(), ", ")
	if len(o.Strategies) == 0 {
		errs = append(errs, fmt.Errorf("no strategy: want some of %s", known))
	}
	for _, s := range o.Strategies {
		if !slices.Contains(config.Strategies(), string(s)) {
			errs = append(errs, fmt.Errorf("strategy %q: want one of %s", s, known))
		}
	}
	return errors.Join(errs...)
}

// Allocate returns what each container gets for its devices, from the advertised list alone. The codes of its errors
// are
//
//	InvalidArgument     no device, a device twice, or more devices than the resource allows a container
//	NotFound            a device that is not advertised
//	FailedPrecondition  an unhealthy device
func (s *server) Allocate(_ context.Context, req *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	begin := time.Now()
	l, count := s.list.Load(), 0
	resp := &v1beta1.AllocateResponse{}
	for _, c := range req.GetContainerRequests() {
		devices, err := l.find(c.GetDevicesIds())
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

// container returns the response for a container: what it gets for each of its devices, and the resource's extras.
func (o *AllocateOptions) container(l *list, devices []*device) *v1beta1.ContainerAllocateResponse {
	resp := &v1beta1.ContainerAllocateResponse{}
	var names []string
	for _, d := range distinct(devices) {
		merge(resp, d.response)
		names = append(names, cdiDevices(d.Grant)...)
	}
	merge(resp, l.response)
	if o.has(config.Envvar) {
		setEnv(resp, visibleDevices, strings.Join(unqualified(names), ","))
	}
	if o.has(config.CDIAnnotations) {
		key, value := o.annotation(l.resource.Name, append(names, cdiDevices(l.resource.Grant)...))
		resp.Annotations = map[string]string{key: value}
	}
	return resp
}

// response is what a container gets for one grant. Variables and annotations that name the devices of several grants
// are not in it.
func (o *AllocateOptions) response(g *resource.Grant) *v1beta1.ContainerAllocateResponse {
	resp := &v1beta1.ContainerAllocateResponse{}
	if g == nil {
		return resp
	}
	if o.has(config.CDICRI) {
		for _, name := range g.CDIDevices {
			resp.CdiDevices = append(resp.CdiDevices, &v1beta1.CDIDevice{Name: name})
		}
	}
	addEdits(resp, &g.Always)
	if o.has(config.DeviceSpecs) {
		addEdits(resp, &g.WithoutCDI)
	}
	return resp
}

// extrasResponse is what every container gets besides its devices.
func (o *AllocateOptions) extrasResponse(g *resource.Grant) *v1beta1.ContainerAllocateResponse {
	resp := o.response(g)
	if !o.has(config.Envvar) {
		return resp
	}
	var channels []string
	for _, name := range cdiDevices(g) {
		kind, device, _ := strings.Cut(name, "=")
		_, class, _ := strings.Cut(kind, "/")
		if class == imexClass {
			channels = append(channels, device)
		} else if variable := extraVariables[class]; variable != "" {
			setEnv(resp, variable, "enabled")
		}
	}
	if len(channels) > 0 {
		setEnv(resp, imexChannels, strings.Join(channels, ","))
	}
	return resp
}

// annotation names the CDI devices for a runtime that reads annotations. A container with devices of several resources
// gets an annotation for each, so the key depends on the resource and on the devices.
func (o *AllocateOptions) annotation(resourceName string, names []string) (key, value string) {
	value = strings.Join(names, ",")
	sum := sha256.Sum256([]byte(resourceName + "\n" + value))
	return cmp.Or(o.AnnotationPrefix, cdiAnnotationPrefix) + annotationName + "_" + hex.EncodeToString(sum[:8]), value
}

// merge adds one response to another. Paths and variables that the other already has stay as they are.
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
			setEnv(to, name, value)
		}
	}
}

// addEdits adds the device nodes, mounts and variables of CDI edits.
func addEdits(to *v1beta1.ContainerAllocateResponse, edits *specs.ContainerEdits) {
	from := &v1beta1.ContainerAllocateResponse{}
	for _, n := range edits.DeviceNodes {
		from.Devices = append(from.Devices, &v1beta1.DeviceSpec{ // with CDI's defaults
			ContainerPath: n.Path, HostPath: cmp.Or(n.HostPath, n.Path), Permissions: cmp.Or(n.Permissions, "rwm"),
		})
	}
	for _, m := range edits.Mounts {
		from.Mounts = append(from.Mounts, &v1beta1.Mount{
			ContainerPath: m.ContainerPath, HostPath: m.HostPath, ReadOnly: slices.Contains(m.Options, "ro"),
		})
	}
	for _, e := range edits.Env {
		name, value, _ := strings.Cut(e, "=")
		setEnv(from, name, value)
	}
	merge(to, from)
}

func setEnv(resp *v1beta1.ContainerAllocateResponse, name, value string) {
	if resp.Envs == nil {
		resp.Envs = map[string]string{}
	}
	resp.Envs[name] = value
}

func cdiDevices(g *resource.Grant) []string {
	if g == nil {
		return nil
	}
	return g.CDIDevices
}

// unqualified returns CDI names without their kind.
func unqualified(names []string) []string {
	devices := make([]string, len(names))
	for i, name := range names {
		_, devices[i], _ = strings.Cut(name, "=")
	}
	return devices
}

// find returns the devices of the IDs in the order of the list, or an error that names every ID that cannot be
// allocated.
func (l *list) find(ids []string) ([]*device, error) {
	name, limit := l.resource.Name, l.resource.Limit
	if len(ids) == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "allocate %s: a container requests no device", name)
	}
	if limit > 0 && len(ids) > limit {
		return nil, status.Errorf(codes.InvalidArgument,
			"allocate %s: a container requests %d devices, and may have %d; %s",
			name, len(ids), limit, l.resource.LimitReason)
	}
	devices, err := l.healthyDevices(ids)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(devices, func(a, b *device) int { return a.index - b.index })
	var twice someOf
	for i := 1; i < len(devices); i++ {
		if devices[i] == devices[i-1] {
			twice.add(devices[i].ID, "")
		}
	}
	if twice.n > 0 {
		return nil, status.Errorf(codes.InvalidArgument, "allocate %s: requested twice: %s", name, &twice)
	}
	return devices, nil
}

func (l *list) healthyDevices(ids []string) ([]*device, error) {
	devices := make([]*device, 0, len(ids))
	var unknown, unhealthy someOf
	for _, id := range ids {
		switch d := l.devices[id]; {
		case d == nil:
			unknown.add(id, "")
		case !d.Healthy:
			unhealthy.add(id, d.Reason)
		default:
			devices = append(devices, d)
		}
	}
	switch {
	case unknown.n > 0:
		return nil, status.Errorf(codes.NotFound, "allocate %s: no such device: %s", l.resource.Name, &unknown)
	case unhealthy.n > 0:
		return nil, status.Errorf(codes.FailedPrecondition, "allocate %s: unhealthy: %s", l.resource.Name, &unhealthy)
	}
	return devices, nil
}

// distinct returns one device for each GPU or MIG device: the first of its replicas, which are adjacent in a list.
func distinct(devices []*device) []*device {
	return slices.CompactFunc(slices.Clone(devices), func(a, b *device) bool { return a.UUID == b.UUID })
}

// someOf is a list of names for a message: the first few, and how many there are.
type someOf struct {
	n    int
	text strings.Builder
}

// The caller chooses the names, so a message has only a few of them, and only the beginning of a long one. Real device
// IDs are shorter.
const (
	namesInMessage = 8
	nameInMessage  = 80
)

func (s *someOf) add(name, reason string) {
	s.n++
	if s.n > namesInMessage {
		return
	}
	if s.n > 1 {
		s.text.WriteString(", ")
	}
	if len(name) > nameInMessage {
		name = name[:nameInMessage] + "..."
	}
	fmt.Fprintf(&s.text, "%q", name)
	if reason != "" {
		s.text.WriteString(" (" + reason + ")")
	}
}

func (s *someOf) String() string {
	if more := s.n - namesInMessage; more > 0 {
		return fmt.Sprintf("%s and %d more", s.text.String(), more)
	}
	return s.text.String()
}
