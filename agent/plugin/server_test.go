package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

func allocate(ids ...string) *v1beta1.AllocateRequest {
	return &v1beta1.AllocateRequest{ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}}}
}

func cdiNames(uuids ...string) []*v1beta1.CDIDevice {
	var all []*v1beta1.CDIDevice
	for _, u := range uuids {
		all = append(all, &v1beta1.CDIDevice{Name: gpus + "=" + u})
	}
	return all
}

// withNodes gives the devices of a resource the device nodes, mounts and variables that CDI edits have for them.
func withNodes(r resource.Resource) resource.Resource {
	node := func(path string) *specs.DeviceNode { return &specs.DeviceNode{Path: path, Permissions: "rw"} }
	r.Grant = &resource.Grant{WithoutCDI: specs.ContainerEdits{
		Env:         []string{"NVIDIA_VISIBLE_DEVICES=void"},
		DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidiactl", HostPath: "/driver/dev/nvidiactl"}},
		Mounts: []*specs.Mount{
			{
				ContainerPath: "/usr/lib/libcuda.so.1",
				HostPath:      "/driver/usr/lib/libcuda.so.1",
				Options:       []string{"ro", "nosuid"},
			},
			{ContainerPath: "/run/socket", HostPath: "/run/socket"},
		},
	}}
	for i := range r.Devices {
		g := *r.Devices[i].Grant
		g.WithoutCDI.DeviceNodes = []*specs.DeviceNode{node(fmt.Sprintf("/dev/nvidia%d", i)), node("/dev/dri/card0")}
		r.Devices[i].Grant = &g
	}
	return r
}

// withExtras gives every container GDS and two IMEX channels too.
func withExtras(r resource.Resource) resource.Resource {
	g := resource.Grant{}
	if r.Grant != nil {
		g = *r.Grant
	}
	g.CDIDevices = []string{"nvidia.com/gds=all", "nvidia.com/imex-channel=0", "nvidia.com/imex-channel=7"}
	for _, path := range []string{"/dev/nvidia-fs0", "/dev/channel0", "/dev/channel7"} {
		g.WithoutCDI.DeviceNodes = append(g.WithoutCDI.DeviceNodes, &specs.DeviceNode{Path: path, Permissions: "rw"})
	}
	g.WithoutCDI.Mounts = append(
		g.WithoutCDI.Mounts,
		&specs.Mount{ContainerPath: "/run/udev", HostPath: "/run/udev", Options: []string{"ro"}},
	)
	r.Grant = &g
	return r
}

// withDescriptors mounts a file for each device.
func withDescriptors(r resource.Resource) resource.Resource {
	for i := range r.Devices {
		g := *r.Devices[i].Grant
		g.Always.Mounts = []*specs.Mount{
			{
				HostPath:      "/state/" + r.Devices[i].UUID,
				ContainerPath: "/run/gpu/devices/" + r.Devices[i].UUID,
				Options:       []string{"ro"},
			},
		}
		g.Always.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=/pipe"}
		r.Devices[i].Grant = &g
	}
	return r
}

// byIndex names the CDI devices of a resource by index.
func byIndex(r resource.Resource) resource.Resource {
	for i := range r.Devices {
		r.Devices[i].Grant = grantOf(r.Devices[i].IndexName)
	}
	return r
}

func TestAllocate(t *testing.T) {
	nodes := []*v1beta1.DeviceSpec{
		{ContainerPath: "/dev/nvidia0", HostPath: "/dev/nvidia0", Permissions: "rw"},
		{ContainerPath: "/dev/dri/card0", HostPath: "/dev/dri/card0", Permissions: "rw"},
		{ContainerPath: "/dev/nvidia1", HostPath: "/dev/nvidia1", Permissions: "rw"},
		{ContainerPath: "/dev/nvidiactl", HostPath: "/driver/dev/nvidiactl", Permissions: "rwm"},
	}
	ofFirst := slices.Concat(nodes[:2], nodes[3:])
	mounts := []*v1beta1.Mount{
		{ContainerPath: "/usr/lib/libcuda.so.1", HostPath: "/driver/usr/lib/libcuda.so.1", ReadOnly: true},
		{ContainerPath: "/run/socket", HostPath: "/run/socket"},
	}
	annotation := map[string]string{
		"cdi.k8s.io/gpu-cdi-plugin_2f0a1db264dce49d": gpus + "=" + uuid(0) + "," + gpus + "=" + uuid(1),
	}
	cases := map[string]struct {
		r    resource.Resource
		o    AllocateOptions
		ids  []string
		want *v1beta1.ContainerAllocateResponse
	}{
		"CDI names are in the list's order, whatever the request's is": {
			gpusOf(8), by(resource.CDICRI),
			[]string{uuid(5), uuid(1)},
			&v1beta1.ContainerAllocateResponse{CdiDevices: cdiNames(uuid(1), uuid(5))},
		},
		"replicas of one GPU are one CDI device": {
			replicasOf(2, 3), by(resource.CDICRI),
			[]string{uuid(0) + "::2", uuid(1) + "::0", uuid(0) + "::0"},
			&v1beta1.ContainerAllocateResponse{CdiDevices: cdiNames(uuid(0), uuid(1))},
		},
		"MIG devices have their own UUIDs": {
			migOf(1), by(resource.CDICRI),
			[]string{"MIG-00000000-0000-0000-0000-000000000001"},
			&v1beta1.ContainerAllocateResponse{
				CdiDevices: cdiNames("MIG-00000000-0000-0000-0000-000000000001"),
				Annotations: map[string]string{
					"gpu-cdi-plugin/MIG-00000000-0000-0000-0000-000000000001": uuid(0),
				},
			},
		},
		"an annotation": {
			gpusOf(2), by(resource.CDIAnnotations),
			[]string{uuid(0), uuid(1)},
			&v1beta1.ContainerAllocateResponse{Annotations: annotation},
		},
		"a variable": {
			gpusOf(2), by(resource.Envvar),
			[]string{uuid(1), uuid(0)},
			&v1beta1.ContainerAllocateResponse{
				Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": uuid(0) + "," + uuid(1)},
			},
		},
		"device nodes and mounts": {
			withNodes(gpusOf(2)), by(resource.DeviceSpecs),
			[]string{uuid(1), uuid(0)},
			&v1beta1.ContainerAllocateResponse{
				Envs:    map[string]string{"NVIDIA_VISIBLE_DEVICES": "void"},
				Devices: nodes,
				Mounts:  mounts,
			},
		},
		"names by index": {
			byIndex(gpusOf(8)), by(resource.CDICRI, resource.Envvar),
			[]string{uuid(5), uuid(1)},
			&v1beta1.ContainerAllocateResponse{
				CdiDevices: []*v1beta1.CDIDevice{{Name: gpus + "=1"}, {Name: gpus + "=5"}},
				Envs:       map[string]string{"NVIDIA_VISIBLE_DEVICES": "1,5"},
			},
		},
		"names of MIG devices by index": {
			byIndex(migOf(2)), by(resource.CDICRI, resource.Envvar),
			[]string{migOf(2).Devices[3].ID},
			&v1beta1.ContainerAllocateResponse{
				CdiDevices: []*v1beta1.CDIDevice{
					{Name: gpus + "=1:1"},
				}, Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "1:1"},
				Annotations: map[string]string{"gpu-cdi-plugin/MIG-00000000-0000-0000-0001-000000000001": uuid(1)},
			},
		},
		"a device that is only in use, which its user asks for": {
			inUse(gpusOf(2)), by(resource.CDICRI), []string{uuid(1)}, &v1beta1.ContainerAllocateResponse{
				CdiDevices: cdiNames(uuid(1)),
			},
		},
		"an annotation with another prefix": {
			gpusOf(2), withPrefix("nvidia.cdi.k8s.io/x-", by(resource.CDIAnnotations)),
			[]string{uuid(0), uuid(1)},
			&v1beta1.ContainerAllocateResponse{Annotations: map[string]string{
				"nvidia.cdi.k8s.io/x-gpu-cdi-plugin_2f0a1db264dce49d": gpus + "=" + uuid(
					0,
				) + "," + gpus + "=" + uuid(
					1,
				),
			}},
		},
		"everything at once, and the variable wins over the spec's": {
			withNodes(gpusOf(2)), by(resource.DeviceSpecs, resource.CDICRI, resource.CDIAnnotations, resource.Envvar),
			[]string{uuid(0), uuid(1)},
			&v1beta1.ContainerAllocateResponse{
				Envs:    map[string]string{"NVIDIA_VISIBLE_DEVICES": uuid(0) + "," + uuid(1)},
				Devices: nodes, Mounts: mounts, Annotations: annotation, CdiDevices: cdiNames(uuid(0), uuid(1)),
			},
		},
		"extras by their CDI names": {
			withExtras(gpusOf(2)), by(resource.CDICRI),
			[]string{uuid(1)},
			&v1beta1.ContainerAllocateResponse{
				CdiDevices: append(
					cdiNames(uuid(1)),
					&v1beta1.CDIDevice{Name: "nvidia.com/gds=all"},
					&v1beta1.CDIDevice{
						Name: "nvidia.com/imex-channel=0",
					},
					&v1beta1.CDIDevice{Name: "nvidia.com/imex-channel=7"},
				),
			},
		},
		"extras in the annotation": {
			withExtras(gpusOf(2)), by(resource.CDIAnnotations),
			[]string{uuid(1)},
			&v1beta1.ContainerAllocateResponse{
				Annotations: map[string]string{"cdi.k8s.io/gpu-cdi-plugin_7801ddb31753e6c9": gpus + "=" + uuid(1) +
					",nvidia.com/gds=all,nvidia.com/imex-channel=0,nvidia.com/imex-channel=7"},
			},
		},
		"extras as nodes, mounts and variables": {
			withExtras(withNodes(gpusOf(1))), by(resource.DeviceSpecs, resource.Envvar),
			[]string{uuid(0)},
			&v1beta1.ContainerAllocateResponse{
				Envs: map[string]string{
					"NVIDIA_VISIBLE_DEVICES": uuid(0),
					"NVIDIA_GDS":             "enabled",
					"NVIDIA_IMEX_CHANNELS":   "0,7",
				},
				Devices: append(
					ofFirst,
					&v1beta1.DeviceSpec{
						ContainerPath: "/dev/nvidia-fs0",
						HostPath:      "/dev/nvidia-fs0",
						Permissions:   "rw",
					},
					&v1beta1.DeviceSpec{ContainerPath: "/dev/channel0", HostPath: "/dev/channel0", Permissions: "rw"},
					&v1beta1.DeviceSpec{ContainerPath: "/dev/channel7", HostPath: "/dev/channel7", Permissions: "rw"},
				),
				Mounts: append(
					slices.Clone(mounts),
					&v1beta1.Mount{ContainerPath: "/run/udev", HostPath: "/run/udev", ReadOnly: true},
				),
			},
		},
		"the variable has precedence in any order of the strategies": {
			withNodes(gpusOf(1)), by(resource.Envvar, resource.DeviceSpecs),
			[]string{uuid(0)},
			&v1beta1.ContainerAllocateResponse{
				Envs:    map[string]string{"NVIDIA_VISIBLE_DEVICES": uuid(0)},
				Devices: ofFirst,
				Mounts:  mounts,
			},
		},
	}
	cases["a mount and a variable of each device, whatever the strategy"] = struct {
		r    resource.Resource
		o    AllocateOptions
		ids  []string
		want *v1beta1.ContainerAllocateResponse
	}{
		withDescriptors(replicasOf(2, 2)), by(resource.CDICRI),
		[]string{uuid(1) + "::1", uuid(1) + "::0", uuid(0) + "::0"},
		&v1beta1.ContainerAllocateResponse{
			CdiDevices: cdiNames(uuid(0), uuid(1)),
			Mounts: []*v1beta1.Mount{
				{HostPath: "/state/" + uuid(0), ContainerPath: "/run/gpu/devices/" + uuid(0), ReadOnly: true},
				{HostPath: "/state/" + uuid(1), ContainerPath: "/run/gpu/devices/" + uuid(1), ReadOnly: true},
			},
			Envs: map[string]string{"CUDA_MPS_PIPE_DIRECTORY": "/pipe"},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			resp, err := allocated(serverOf(t, c.r, c.o), allocate(c.ids...))
			testenv.Must(t, err)
			want := []*v1beta1.ContainerAllocateResponse{c.want}
			if diff := cmp.Diff(want, resp.ContainerResponses, protocmp.Transform()); diff != "" {
				t.Errorf("the answer (-want +got):\n%s", diff)
			}
		})
	}
}

// inUse has something use the last device of a resource.
func inUse(r resource.Resource) resource.Resource {
	d := &r.Devices[len(r.Devices)-1]
	d.Healthy, d.Reason, d.Fault, d.InUse = false, "process 7 uses it", true, true
	return r
}

func withPrefix(prefix string, o AllocateOptions) AllocateOptions {
	o.AnnotationPrefix = prefix
	return o
}

func TestWhatAllocateRefuses(t *testing.T) {
	ill := gpusOf(4)
	ill.Devices[2].Healthy, ill.Devices[2].Reason = false, "fell off the bus"
	limited := replicasOf(2, 4)
	limited.Limit, limited.LimitReason = 1, "more replicas give no more of a GPU"
	many := make([]string, 20)
	for i := range many {
		many[i] = strings.Repeat("y", 200)
	}
	cases := map[string]struct {
		r    resource.Resource
		o    AllocateOptions
		ids  []string
		code codes.Code
		text string
	}{
		"no device": {ill, by(resource.CDICRI), nil, codes.InvalidArgument, "requests no device"},
		"unknown devices": {
			ill,
			by(resource.CDICRI),
			[]string{"a", uuid(0), "b"},
			codes.NotFound,
			`no such device: "a", "b"`,
		},
		"an empty ID": {ill, by(resource.CDICRI), []string{""}, codes.NotFound, `no such device: ""`},
		"an unhealthy device": {
			ill,
			by(resource.CDICRI),
			[]string{uuid(1), uuid(2)},
			codes.FailedPrecondition,
			`unhealthy: "` + uuid(2) + `" (fell off the bus)`,
		},
		"a device twice": {
			ill,
			by(resource.CDICRI),
			[]string{uuid(1), uuid(0), uuid(1)},
			codes.InvalidArgument,
			`listed twice: "` + uuid(1) + `"`,
		},
		"more than a container may have": {
			limited,
			by(resource.CDICRI),
			[]string{uuid(0) + "::0", uuid(1) + "::0"},
			codes.InvalidArgument,
			"requests 2 devices, but may have 1",
		},
		"a flood of long names": {ill, by(resource.CDICRI), many, codes.NotFound, "and 12 more"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			resp, err := serverOf(t, c.r, c.o).Allocate(t.Context(), allocate(c.ids...))
			if resp != nil || status.Code(err) != c.code || !strings.Contains(err.Error(), c.text) ||
				!strings.Contains(err.Error(), c.r.Name) {
				t.Errorf("%v and %v, want %s and %q", resp, err, c.code, c.text)
			}
			if len(err.Error()) > 2000 {
				t.Errorf("the message has %d bytes", len(err.Error()))
			}
		})
	}
}

// A container starts again on devices that it has: whether it may is decided by who prepares them.
func TestPreStartOfAnUnhealthyDevice(t *testing.T) {
	r := gpusOf(2)
	r.Devices[1].Healthy, r.Devices[1].Reason = false, "XID 95"
	o := by(resource.CDICRI)
	var asked []string
	var refused error
	o.PreStart = func(_ context.Context, resourceName string, devices []*resource.Device) error {
		for _, d := range devices {
			asked = append(asked, fmt.Sprint(resourceName, " ", d.ID, " ", d.Reason))
		}
		return refused
	}
	prepare := func(ids ...string) error {
		_, err := serverOf(t, r, o).PreStartContainer(t.Context(), &v1beta1.PreStartContainerRequest{DevicesIds: ids})
		return err
	}
	testenv.Must(t, prepare(uuid(1)))
	if want := []string{r.Name + " " + uuid(1) + " XID 95"}; !slices.Equal(asked, want) {
		t.Errorf("asked for %q, want %q", asked, want)
	}
	refused = errors.New("it is cordoned")
	if err := prepare(uuid(0)); status.Code(err) != codes.FailedPrecondition ||
		!strings.Contains(err.Error(), "it is cordoned") {
		t.Errorf("error %v", err)
	}
	asked = nil
	if err := prepare("GPU-that-is-gone"); status.Code(err) != codes.NotFound || asked != nil {
		t.Errorf("error %v, asked for %q", err, asked)
	}
}

// A reload changes the IDs of devices, and how many a container may have, while containers have them.
func TestPreStartOfDevicesFromBeforeAReload(t *testing.T) {
	r := gpusOf(2)
	r.Limit, r.LimitReason = 1, "sharing does not isolate"
	o := by(resource.CDICRI)
	o.Old = func(resourceName, id string) *resource.Device {
		if resourceName != r.Name || id != uuid(0)+"::1" {
			return nil
		}
		d := gpuAt(0)
		d.ID = id
		return &d
	}
	var prepared []string
	o.PreStart = func(_ context.Context, _ string, devices []*resource.Device) error {
		for _, d := range devices {
			prepared = append(prepared, d.ID)
		}
		return nil
	}
	for name, c := range map[string]struct {
		ids  []string
		want codes.Code
	}{
		"an ID that a container has":             {[]string{uuid(0) + "::1"}, codes.OK},
		"with an ID that is advertised":          {[]string{uuid(0) + "::1", uuid(1)}, codes.OK},
		"more devices than a container may have": {[]string{uuid(0), uuid(1)}, codes.OK},
		"an ID that no container has":            {[]string{uuid(0) + "::2"}, codes.NotFound},
		"both":                                   {[]string{uuid(0) + "::1", uuid(0) + "::2"}, codes.NotFound},
		"no ID":                                  {nil, codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			prepared = nil
			s := serverOf(t, r, o)
			_, err := s.PreStartContainer(t.Context(), &v1beta1.PreStartContainerRequest{DevicesIds: c.ids})
			if status.Code(err) != c.want || err == nil && !slices.Equal(prepared, c.ids) || err != nil && prepared != nil {
				t.Errorf("error %v, prepared %q", err, prepared)
			}
		})
	}
	if _, err := allocated(serverOf(t, r, o), allocate(uuid(0)+"::1")); status.Code(err) != codes.NotFound {
		t.Errorf("Allocate of an ID from before the reload: %v", err)
	}
}

func TestOneCallForSeveralContainers(t *testing.T) {
	s := serverOf(t, withExtras(gpusOf(3)), by(resource.CDICRI))
	want := &v1beta1.AllocateResponse{}
	ask := &v1beta1.AllocateRequest{}
	for i := range 3 {
		one, err := allocated(s, allocate(uuid(i)))
		testenv.Must(t, err)
		want.ContainerResponses = append(want.ContainerResponses, one.GetContainerResponses()...)
		ask.ContainerRequests = append(ask.ContainerRequests, allocate(uuid(i)).GetContainerRequests()...)
	}
	for range 2 { // a call does not change what the next one gets
		got, err := allocated(s, ask)
		testenv.Must(t, err)
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("the response (-want +got):\n%s", diff)
		}
	}
}

func TestAllocateFollowsTheLastUpdate(t *testing.T) {
	s := serverOf(t, gpusOf(1), by(resource.CDICRI))
	for _, r := range []resource.Resource{withExtras(gpusOf(1)), gpusOf(1), byIndex(gpusOf(1))} {
		testenv.Must(t, s.update(r, nil))
		want := slices.Clone(r.Devices[0].Grant.CDIDevices)
		if r.Grant != nil {
			want = append(want, r.Grant.CDIDevices...)
		}
		resp, err := allocated(s, allocate(uuid(0)))
		testenv.Must(t, err)
		var got []string
		for _, d := range resp.GetContainerResponses()[0].GetCdiDevices() {
			got = append(got, d.GetName())
		}
		if !slices.Equal(got, want) {
			t.Errorf("CDI devices %v, want %v", got, want)
		}
	}
}

func TestADeviceThatLeftTheListIsNotAllocated(t *testing.T) {
	s := serverOf(t, gpusOf(2), by(resource.CDICRI))
	testenv.Must(t, s.update(gpusOf(1), nil))
	if _, err := s.Allocate(t.Context(), allocate(uuid(1))); status.Code(err) != codes.NotFound {
		t.Errorf("%v, want %s", err, codes.NotFound)
	}
}

func TestAnEqualListIsNotSent(t *testing.T) {
	s := serverOf(t, gpusOf(2), by(resource.CDICRI))
	replaced := s.list.Load().replaced
	same := gpusOf(2)
	same.Limit = 1
	testenv.Must(t, s.update(same, nil))
	select {
	case <-replaced:
		t.Error("an equal list is sent")
	default:
	}
	if _, err := s.Allocate(t.Context(), allocate(uuid(0), uuid(1))); status.Code(err) != codes.InvalidArgument {
		t.Errorf("the new limit does not hold: %v", err)
	}
	testenv.Must(t, s.update(gpusOf(1), nil))
	<-replaced
}

// FuzzRequests gives the server whatever a caller could: a value or an error comes back, never both, never neither.
func FuzzRequests(f *testing.F) {
	for _, m := range []proto.Message{
		allocate(uuid(0)), allocate(uuid(0), uuid(0), "x"),
		prefer([]string{uuid(0), uuid(1)}, []string{uuid(1)}, 2), prefer(nil, nil, -1),
	} {
		data, err := proto.Marshal(m)
		testenv.Must(f, err)
		f.Add(data)
	}
	s := serverOf(f, gpusOf(2), by(resource.CDICRI, resource.Envvar, resource.CDIAnnotations))
	f.Fuzz(func(t *testing.T, data []byte) {
		var a v1beta1.AllocateRequest
		if proto.Unmarshal(data, &a) == nil {
			resp, err := allocated(s, &a)
			oneOf(t, resp != nil, err)
			if err == nil && len(resp.ContainerResponses) != len(a.ContainerRequests) {
				t.Errorf("%d answers to %d containers", len(resp.ContainerResponses), len(a.ContainerRequests))
			}
		}
		var p v1beta1.PreferredAllocationRequest
		if proto.Unmarshal(data, &p) == nil {
			resp, err := s.GetPreferredAllocation(t.Context(), &p)
			oneOf(t, resp != nil, err)
			for i, c := range resp.GetContainerResponses() {
				if want := int(p.ContainerRequests[i].AllocationSize); len(c.DeviceIDs) != want {
					t.Errorf("%d devices are preferred, want %d", len(c.DeviceIDs), want)
				}
			}
		}
	})
}

func oneOf(t *testing.T, value bool, err error) {
	t.Helper()
	if value == (err != nil) {
		t.Errorf("value: %t, error: %v", value, err)
	}
}
