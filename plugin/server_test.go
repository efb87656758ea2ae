package plugin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
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

// testSpec is a CDI spec of GPUs 0 and 1.
func testSpec() *specs.Spec {
	node := func(path string) *specs.DeviceNode { return &specs.DeviceNode{Path: path, Permissions: "rw"} }
	return &specs.Spec{
		ContainerEdits: specs.ContainerEdits{
			Env:         []string{"NVIDIA_VISIBLE_DEVICES=void"},
			DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidiactl", HostPath: "/driver/dev/nvidiactl"}},
			Mounts: []*specs.Mount{
				{ContainerPath: "/usr/lib/libcuda.so.1", HostPath: "/driver/usr/lib/libcuda.so.1", Options: []string{"ro", "nosuid"}},
				{ContainerPath: "/run/socket", HostPath: "/run/socket"},
			},
		},
		Devices: []specs.Device{
			{Name: uuid(0), ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{node("/dev/nvidia0"), node("/dev/dri/card0")}}},
			{Name: "0", ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{node("/dev/nvidia0")}}},
			{Name: uuid(1), ContainerEdits: specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{node("/dev/nvidia1")}}},
		},
	}
}

// testExtras are the specs of GDS and of two IMEX channels.
func testExtras() []*specs.Spec {
	device := func(name, node string, mounts ...*specs.Mount) specs.Device {
		return specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{
			DeviceNodes: []*specs.DeviceNode{{Path: node, Permissions: "rw"}}, Mounts: mounts,
		}}
	}
	udev := &specs.Mount{ContainerPath: "/run/udev", HostPath: "/run/udev", Options: []string{"ro"}}
	return []*specs.Spec{
		{Kind: "nvidia.com/gds", Devices: []specs.Device{device("all", "/dev/nvidia-fs0", udev)}},
		{Kind: "nvidia.com/imex-channel", Devices: []specs.Device{device("0", "/dev/channel0"), device("7", "/dev/channel7")}},
	}
}

// asked notes what it is asked for.
type asked struct{ names []string }

func (a *asked) SpecHas(names ...string) error {
	a.names = append(a.names, names...)
	return nil
}

func TestAllocateAsksForTheExtrasToo(t *testing.T) {
	specs := &asked{}
	a := answers(CDICRI)
	a.Specs, a.Extras = specs, testExtras
	_, err := serverOf(t, gpusOf(1), a).Allocate(t.Context(), allocate(uuid(0)))
	must(t, err)
	want := []string{gpus + "=" + uuid(0), "nvidia.com/gds=all", "nvidia.com/imex-channel=0", "nvidia.com/imex-channel=7"}
	if diff := cmp.Diff(want, specs.names); diff != "" {
		t.Errorf("asked for (-want +got):\n%s", diff)
	}
}

func TestAllocate(t *testing.T) {
	withSpec := func(a Answers) Answers {
		a.Spec = testSpec
		return a
	}
	withExtras := func(a Answers) Answers {
		a.Extras = testExtras
		return a
	}
	nodes := []*v1beta1.DeviceSpec{
		{ContainerPath: "/dev/nvidiactl", HostPath: "/driver/dev/nvidiactl", Permissions: "rwm"},
		{ContainerPath: "/dev/nvidia0", HostPath: "/dev/nvidia0", Permissions: "rw"},
		{ContainerPath: "/dev/dri/card0", HostPath: "/dev/dri/card0", Permissions: "rw"},
		{ContainerPath: "/dev/nvidia1", HostPath: "/dev/nvidia1", Permissions: "rw"},
	}
	mounts := []*v1beta1.Mount{
		{ContainerPath: "/usr/lib/libcuda.so.1", HostPath: "/driver/usr/lib/libcuda.so.1", ReadOnly: true},
		{ContainerPath: "/run/socket", HostPath: "/run/socket"},
	}
	annotation := map[string]string{"cdi.k8s.io/gpu-cdi-plugin_2f0a1db264dce49d": gpus + "=" + uuid(0) + "," + gpus + "=" + uuid(1)}
	cases := map[string]struct {
		r    resource.Resource
		a    Answers
		ids  []string
		want *v1beta1.ContainerAllocateResponse
	}{
		"CDI names are in the list's order, whatever the request's is": {
			gpusOf(8), answers(CDICRI),
			[]string{uuid(5), uuid(1)},
			&v1beta1.ContainerAllocateResponse{CdiDevices: cdiNames(uuid(1), uuid(5))},
		},
		"replicas of one GPU are one CDI device": {
			replicasOf(2, 3), answers(CDICRI),
			[]string{uuid(0) + "::2", uuid(1) + "::0", uuid(0) + "::0"},
			&v1beta1.ContainerAllocateResponse{CdiDevices: cdiNames(uuid(0), uuid(1))},
		},
		"MIG devices have their own UUIDs": {
			migOf(1), answers(CDICRI),
			[]string{"MIG-00000000-0000-0000-0000-000000000001"},
			&v1beta1.ContainerAllocateResponse{CdiDevices: cdiNames("MIG-00000000-0000-0000-0000-000000000001")},
		},
		"an annotation": {
			gpusOf(2), answers(CDIAnnotations),
			[]string{uuid(0), uuid(1)},
			&v1beta1.ContainerAllocateResponse{Annotations: annotation},
		},
		"a variable": {
			gpusOf(2), answers(Envvar),
			[]string{uuid(1), uuid(0)},
			&v1beta1.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": uuid(0) + "," + uuid(1)}},
		},
		"device nodes and mounts": {
			gpusOf(2), withSpec(answers(DeviceSpecs)),
			[]string{uuid(1), uuid(0)},
			&v1beta1.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "void"}, Devices: nodes, Mounts: mounts},
		},
		"names by index": {
			gpusOf(8), byIndex(answers(CDICRI, Envvar)),
			[]string{uuid(5), uuid(1)},
			&v1beta1.ContainerAllocateResponse{
				CdiDevices: []*v1beta1.CDIDevice{{Name: gpus + "=1"}, {Name: gpus + "=5"}},
				Envs:       map[string]string{"NVIDIA_VISIBLE_DEVICES": "1,5"},
			},
		},
		"names of MIG devices by index": {
			migOf(2), byIndex(answers(CDICRI, Envvar)),
			[]string{migOf(2).Devices[3].ID},
			&v1beta1.ContainerAllocateResponse{
				CdiDevices: []*v1beta1.CDIDevice{{Name: gpus + "=1:1"}}, Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "1:1"},
			},
		},
		"device nodes of devices that are named by index": {
			gpusOf(2), byIndex(withSpec(answers(DeviceSpecs))),
			[]string{uuid(1), uuid(0)},
			&v1beta1.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": "void"}, Devices: nodes, Mounts: mounts},
		},
		"an annotation with another prefix": {
			gpusOf(2), withPrefix("nvidia.cdi.k8s.io/x-", answers(CDIAnnotations)),
			[]string{uuid(0), uuid(1)},
			&v1beta1.ContainerAllocateResponse{Annotations: map[string]string{
				"nvidia.cdi.k8s.io/x-gpu-cdi-plugin_2f0a1db264dce49d": gpus + "=" + uuid(0) + "," + gpus + "=" + uuid(1),
			}},
		},
		"everything at once, and the variable wins over the spec's": {
			gpusOf(2), withSpec(answers(DeviceSpecs, CDICRI, CDIAnnotations, Envvar)),
			[]string{uuid(0), uuid(1)},
			&v1beta1.ContainerAllocateResponse{
				Envs:    map[string]string{"NVIDIA_VISIBLE_DEVICES": uuid(0) + "," + uuid(1)},
				Devices: nodes, Mounts: mounts, Annotations: annotation, CdiDevices: cdiNames(uuid(0), uuid(1)),
			},
		},
		"extras by their CDI names": {
			gpusOf(2), withExtras(answers(CDICRI)),
			[]string{uuid(1)},
			&v1beta1.ContainerAllocateResponse{CdiDevices: append(cdiNames(uuid(1)), &v1beta1.CDIDevice{Name: "nvidia.com/gds=all"},
				&v1beta1.CDIDevice{Name: "nvidia.com/imex-channel=0"}, &v1beta1.CDIDevice{Name: "nvidia.com/imex-channel=7"})},
		},
		"extras in the annotation": {
			gpusOf(2), withExtras(answers(CDIAnnotations)),
			[]string{uuid(1)},
			&v1beta1.ContainerAllocateResponse{Annotations: map[string]string{"cdi.k8s.io/gpu-cdi-plugin_7801ddb31753e6c9": gpus + "=" + uuid(1) +
				",nvidia.com/gds=all,nvidia.com/imex-channel=0,nvidia.com/imex-channel=7"}},
		},
		"extras as nodes, mounts and variables": {
			gpusOf(1), withExtras(withSpec(answers(DeviceSpecs, Envvar))),
			[]string{uuid(0)},
			&v1beta1.ContainerAllocateResponse{
				Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": uuid(0), "NVIDIA_GDS": "enabled", "NVIDIA_IMEX_CHANNELS": "0,7"},
				Devices: append([]*v1beta1.DeviceSpec{
					{ContainerPath: "/dev/nvidia-fs0", HostPath: "/dev/nvidia-fs0", Permissions: "rw"},
					{ContainerPath: "/dev/channel0", HostPath: "/dev/channel0", Permissions: "rw"},
					{ContainerPath: "/dev/channel7", HostPath: "/dev/channel7", Permissions: "rw"},
				}, nodes[:3]...),
				Mounts: append([]*v1beta1.Mount{{ContainerPath: "/run/udev", HostPath: "/run/udev", ReadOnly: true}}, mounts...),
			},
		},
		"the variable wins also if it is asked for first": {
			gpusOf(1), withSpec(answers(Envvar, DeviceSpecs)),
			[]string{uuid(0)},
			&v1beta1.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": uuid(0)}, Devices: nodes[:3], Mounts: mounts},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			resp, err := allocated(serverOf(t, c.r, c.a), allocate(c.ids...))
			must(t, err)
			if diff := cmp.Diff([]*v1beta1.ContainerAllocateResponse{c.want}, resp.ContainerResponses, protocmp.Transform()); diff != "" {
				t.Errorf("the answer (-want +got):\n%s", diff)
			}
		})
	}
}

func byIndex(a Answers) Answers {
	a.ByIndex = true
	return a
}

func withPrefix(prefix string, a Answers) Answers {
	a.AnnotationPrefix = prefix
	return a
}

// specsThat answers every question with the error.
type specsThat struct{ err error }

func (s specsThat) SpecHas(...string) error { return s.err }

func TestWhatAllocateRefuses(t *testing.T) {
	ill := gpusOf(4)
	ill.Devices[2].Healthy, ill.Devices[2].Reason = false, "fell off the bus"
	limited := replicasOf(2, 4)
	limited.Limit, limited.LimitReason = 1, "more replicas give no more of a GPU"
	many := make([]string, 20)
	for i := range many {
		many[i] = strings.Repeat("y", 200)
	}
	lacking := answers(CDICRI)
	lacking.Specs = specsThat{errors.New("the spec lacks it")}
	unasked := answers(Envvar)
	unasked.Specs = lacking.Specs
	nodes := answers(DeviceSpecs)
	nodes.Spec = testSpec
	noSpec := answers(DeviceSpecs)
	noSpec.Spec = func() *specs.Spec { return nil }
	blocked := answers(CDICRI)
	blocked.AllocationDir = filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(blocked.AllocationDir, nil, 0o600))
	cases := map[string]struct {
		r    resource.Resource
		a    Answers
		ids  []string
		code codes.Code
		says string
	}{
		"no device":                       {ill, answers(CDICRI), nil, codes.InvalidArgument, "asks for no device"},
		"unknown devices":                 {ill, answers(CDICRI), []string{"a", uuid(0), "b"}, codes.NotFound, `no such device: "a", "b"`},
		"an empty ID":                     {ill, answers(CDICRI), []string{""}, codes.NotFound, `no such device: ""`},
		"an unhealthy device":             {ill, answers(CDICRI), []string{uuid(1), uuid(2)}, codes.FailedPrecondition, `unhealthy: "` + uuid(2) + `" (fell off the bus)`},
		"a device twice":                  {ill, answers(CDICRI), []string{uuid(1), uuid(0), uuid(1)}, codes.InvalidArgument, `asked for twice: "` + uuid(1) + `"`},
		"more than a container may have":  {limited, answers(CDICRI), []string{uuid(0) + "::0", uuid(1) + "::0"}, codes.InvalidArgument, "asks for 2 devices, and may have 1"},
		"a flood of long names":           {ill, answers(CDICRI), many, codes.NotFound, "and 12 more"},
		"what the spec lacks":             {ill, lacking, []string{uuid(0)}, codes.Unavailable, "the spec lacks it"},
		"nodes that the spec lacks":       {ill, nodes, []string{uuid(0), uuid(3)}, codes.Unavailable, "no device " + uuid(3)},
		"nodes without a spec":            {ill, noSpec, []string{uuid(0)}, codes.Unavailable, "no CDI spec"},
		"an allocation that has no place": {ill, blocked, []string{uuid(0)}, codes.Internal, "not a directory"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			resp, err := serverOf(t, c.r, c.a).Allocate(t.Context(), allocate(c.ids...))
			if resp != nil || status.Code(err) != c.code || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), c.r.Name) {
				t.Errorf("%v and %v, want %s and %q", resp, err, c.code, c.says)
			}
			if len(err.Error()) > 2000 {
				t.Errorf("the message has %d bytes", len(err.Error()))
			}
		})
	}
	if _, err := serverOf(t, ill, unasked).Allocate(t.Context(), allocate(uuid(0))); err != nil {
		t.Errorf("without CDI names the spec does not matter, but: %v", err)
	}
}

func TestADeviceThatLeftTheListIsNotAllocated(t *testing.T) {
	s := serverOf(t, gpusOf(2), answers(CDICRI))
	must(t, s.update(gpusOf(1)))
	if _, err := s.Allocate(t.Context(), allocate(uuid(1))); status.Code(err) != codes.NotFound {
		t.Errorf("%v, want %s", err, codes.NotFound)
	}
}

func TestAListLikeTheOneBeforeIsNotSent(t *testing.T) {
	s := serverOf(t, gpusOf(2), answers(CDICRI))
	replaced := s.list.Load().replaced
	same := gpusOf(2)
	same.Limit = 1
	must(t, s.update(same))
	select {
	case <-replaced:
		t.Error("the kubelet is told of nothing new")
	default:
	}
	if _, err := s.Allocate(t.Context(), allocate(uuid(0), uuid(1))); status.Code(err) != codes.InvalidArgument {
		t.Errorf("the new limit does not hold: %v", err)
	}
	must(t, s.update(gpusOf(1)))
	<-replaced
}

// FuzzRequests gives the server whatever a caller could: a value or an error comes back, never both, never neither.
func FuzzRequests(f *testing.F) {
	for _, m := range []proto.Message{
		allocate(uuid(0)), allocate(uuid(0), uuid(0), "x"), prefer([]string{uuid(0), uuid(1)}, []string{uuid(1)}, 2), prefer(nil, nil, -1),
	} {
		data, err := proto.Marshal(m)
		must(f, err)
		f.Add(data)
	}
	s := serverOf(f, gpusOf(2), answers(CDICRI, Envvar, CDIAnnotations))
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

// A list of exactly the size that the kubelet reads can be served, and one of a byte more cannot.
func TestTheLargestList(t *testing.T) {
	const each = 2 + 2 + resource.MaxID + 2 + len(v1beta1.Healthy) // a device in the message: two tags, ID, health
	r := resource.Resource{Name: gpus}
	add := func(idSize int) {
		d := resource.Device{ID: fmt.Sprintf("%0*d", idSize, len(r.Devices)), Healthy: true, NUMANode: gpu.NoNUMANode}
		r.Devices = append(r.Devices, d)
	}
	room := resource.MaxList
	for ; room >= 2*each; room -= each {
		add(resource.MaxID)
	}
	add(resource.MaxID - (each - room/2))
	add(resource.MaxID - (each - (room - room/2)))
	s, err := newServer(r, answers(CDICRI), quiet, nobody{})
	must(t, err)
	if size := proto.Size(s.list.Load().message); size != resource.MaxList {
		t.Fatalf("the list has %d bytes, want %d", size, resource.MaxList)
	}
	r.Devices[len(r.Devices)-1].ID += "x"
	if _, err := newServer(r, answers(CDICRI), quiet, nobody{}); err == nil {
		t.Error("a list of a byte more is served")
	}
}
