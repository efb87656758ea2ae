package manager_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// answers has a plugin answer each Allocate with a response.
func answers(r *v1beta1.ContainerAllocateResponse) plugintest.Behaviour {
	return plugintest.Behaviour{
		Allocate: func(context.Context, []string) (*v1beta1.ContainerAllocateResponse, error) { return r, nil },
	}
}

func TestContainersGetRunOptions(t *testing.T) {
	n := newNode(t)
	n.pluginWith(gpu, answers(&v1beta1.ContainerAllocateResponse{
		Envs:        map[string]string{"A": "gpu", "B": "1"},
		Annotations: map[string]string{"note": "gpu"},
		Devices: []*v1beta1.DeviceSpec{
			{ContainerPath: "/dev/b", HostPath: "/dev/b", Permissions: "rw"},
			{ContainerPath: "/dev/a", HostPath: "/dev/host-a", Permissions: "rwm"},
		},
		Mounts:     []*v1beta1.Mount{{ContainerPath: "/lib", HostPath: "/lib-gpu", ReadOnly: true}},
		CdiDevices: []*v1beta1.CDIDevice{{Name: "example.com/gpu=1"}, {Name: "example.com/gpu=0"}},
	}), plugintest.Devices(1)...)
	n.pluginWith(nic, answers(&v1beta1.ContainerAllocateResponse{
		Envs:        map[string]string{"A": "nic", "B": "1", "C": "nic"},
		Annotations: map[string]string{"note": "nic"},
		Devices:     []*v1beta1.DeviceSpec{{ContainerPath: "/dev/b", HostPath: "/dev/other", Permissions: "rw"}},
		Mounts:      []*v1beta1.Mount{{ContainerPath: "/lib", HostPath: "/lib-gpu"}},
		CdiDevices:  []*v1beta1.CDIDevice{{Name: "example.com/gpu=0"}, {Name: "example.com/nic=0"}},
	}), plugintest.Devices(1)...)
	n.admit(
		pod("a", model.Container{Name: "main", Limits: map[string]int{nic: 1, gpu: 1}}, model.Container{Name: "plain"}),
	)
	got, err := n.m.Start(t.Context(), "a", "main")
	testenv.Must(t, err)
	want := model.RunOptions{
		Envs:        map[string]string{"A": "gpu", "B": "1", "C": "nic"},
		Annotations: map[string]string{"note": "gpu"},
		Devices: []model.DeviceNode{
			{ContainerPath: "/dev/a", HostPath: "/dev/host-a", Permissions: "rwm"},
			{ContainerPath: "/dev/b", HostPath: "/dev/b", Permissions: "rw"},
		},
		Mounts:     []model.Mount{{ContainerPath: "/lib", HostPath: "/lib-gpu", ReadOnly: true}},
		CDIDevices: []string{"example.com/gpu=1", "example.com/gpu=0", "example.com/nic=0"},
		Conflicts: []string{
			`the environment variable "A": "gpu" from example.com/gpu is used, and "nic" from example.com/nic is ignored`,
			`the annotation "note": "gpu" from example.com/gpu is used, and "nic" from example.com/nic is ignored`,
			`the device node "/dev/b": "/dev/b rw" from example.com/gpu is used, and "/dev/other rw" from ` +
				"example.com/nic is ignored",
			`the mount "/lib": "/lib-gpu ro" from example.com/gpu is used, and "/lib-gpu" from example.com/nic is ignored`,
		},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error("run options (-want +got):\n" + diff)
	}
	if got, err := n.m.Start(t.Context(), "a", "plain"); err != nil || !cmp.Equal(got, model.RunOptions{}) {
		t.Errorf("a container without devices gets %+v and %v", got, err)
	}
	n.restart() // the plugins are away
	if got, err := n.m.Start(t.Context(), "a", "main"); !errors.Is(err, manager.ErrRetry) {
		t.Errorf("before the plugins are back, the container gets %+v and %v", got, err)
	}
}

func TestOnlyContainersOfPlacedPodsStart(t *testing.T) {
	n := newNode(t)
	n.plugin(gpu, plugintest.Devices(1)...)
	n.admit(pod("a", wants("main", gpu, 1)))
	n.release("a")
	n.admit(pod("b", wants("main", gpu, 1)))
	for name, at := range map[string][2]string{
		"a pod that was released":        {"a", "main"},
		"a pod that was never placed":    {"c", "main"},
		"a container that the pod lacks": {"b", "other"},
	} {
		if _, err := n.m.Start(t.Context(), at[0], at[1]); !errors.Is(err, manager.ErrNotFound) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestPluginsPrepareDevices(t *testing.T) {
	n := newNode(t)
	var prepared []string
	broken := errors.New("cannot reset")
	p := n.pluginWith(gpu, plugintest.Behaviour{
		Options: &v1beta1.DevicePluginOptions{PreStartRequired: true},
		PreStart: func(_ context.Context, ids []string) error {
			prepared = append(prepared, ids...)
			return broken
		},
	}, plugintest.Devices(3)...)
	n.admit(pod("a", wants("main", gpu, 2), wants("none", gpu, 0)))
	_, err := n.m.Start(t.Context(), "a", "main")
	if !errors.Is(err, manager.ErrRetry) ||
		!strings.Contains(err.Error(), "device plugin PreStartContainer rpc failed with err: cannot reset") {
		t.Error("a failure of the plugin:", err)
	}
	broken = nil
	for range 2 { // each start
		if _, err := n.m.Start(t.Context(), "a", "main"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := n.m.Start(t.Context(), "a", "none"); err != nil {
		t.Fatal(err)
	}
	two := []string{"gpu-0000", "gpu-0001"}
	if want := slices.Concat(two, two, two); !slices.Equal(prepared, want) {
		t.Errorf("prepared were %v, want %v", prepared, want)
	}
	p.EndStreams(broken)
	p.Stop()
	n.awaitCount(gpu, manager.Count{Capacity: 3, Allocatable: 0})
	if _, err := n.m.Start(t.Context(), "a", "main"); !errors.Is(err, manager.ErrRetry) ||
		!strings.Contains(err.Error(), "endpoint example.com/gpu has been stopped") {
		t.Error("a plugin that is away:", err)
	}
}

// A plugin that does not answer PreStartContainer delays only this start, up to the deadline. The pod keeps its
// devices.
func TestAPluginThatHangsInPreStart(t *testing.T) {
	n := newNode(t, func(o *manager.Options) { o.Deadlines.PreStart = 3 * time.Second })
	options := &v1beta1.DevicePluginOptions{PreStartRequired: true}
	preparing := make(chan struct{})
	p := n.pluginWith(gpu, plugintest.Behaviour{
		Options: options,
		PreStart: func(ctx context.Context, _ []string) error {
			close(preparing)
			return plugintest.Hang(ctx)
		},
	}, plugintest.Devices(2)...)
	n.pluginWith(nic, plugintest.Behaviour{Options: options}, plugintest.Devices(1)...)
	stuck := n.admit(pod("stuck", wants("main", gpu, 1)))
	started := make(chan error, 1)
	go func() {
		_, err := n.m.Start(context.Background(), "stuck", "main")
		started <- err
	}()
	<-preparing
	n.admit(pod("same", wants("main", gpu, 1)))
	n.admit(pod("other", wants("main", nic, 1)))
	if _, err := n.m.Start(t.Context(), "other", "main"); err != nil {
		t.Error("the start of a container with another resource:", err)
	}
	err := <-started
	if !errors.Is(err, manager.ErrRetry) || !strings.Contains(err.Error(),
		"device plugin PreStartContainer rpc failed with err: the device plugin did not answer in time") {
		t.Error("the start that hung:", err)
	}
	have, placed := n.m.Pod("stuck")
	if diff := cmp.Diff(stuck, have); diff != "" || !placed || !n.resource(gpu).Connected {
		t.Errorf("the pod is placed: %t, its plugin is connected: %t (-before +after):\n%s",
			placed, n.resource(gpu).Connected, diff)
	}
	p.Behave(plugintest.Behaviour{Options: options})
	for _, uid := range []string{"stuck", "same"} {
		if _, err := n.m.Start(t.Context(), uid, "main"); err != nil {
			t.Errorf("pod %s when the plugin answers again: %v", uid, err)
		}
	}
}

func TestContainersStartWithoutPluginsThatPrepareNothing(t *testing.T) {
	n := newNode(t)
	p := n.plugin(gpu, plugintest.Devices(1)...)
	n.admit(pod("a", wants("main", gpu, 1)))
	p.Stop()
	n.awaitCount(gpu, manager.Count{Capacity: 1, Allocatable: 0})
	if got, err := n.m.Start(t.Context(), "a", "main"); err != nil || got.Envs["DEVICES"] != "1" {
		t.Errorf("got %+v and %v", got, err)
	}
}

// A plugin may be preparing a device: it must not be given to another pod meanwhile.
func TestReleaseWaitsForStart(t *testing.T) {
	n := newNode(t)
	preparing, finish := make(chan struct{}), make(chan struct{})
	n.pluginWith(gpu, plugintest.Behaviour{
		Options: &v1beta1.DevicePluginOptions{PreStartRequired: true},
		PreStart: func(context.Context, []string) error {
			close(preparing)
			<-finish
			return nil
		},
	}, plugintest.Devices(1)...)
	n.admit(pod("a", wants("main", gpu, 1)))
	started := make(chan error, 1)
	go func() {
		_, err := n.m.Start(context.Background(), "a", "main")
		started <- err
	}()
	<-preparing
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.m.Release(ctx, "a"); !errors.Is(err, context.Canceled) {
		t.Error("the release during the start:", err)
	}
	close(finish)
	if err := <-started; err != nil {
		t.Error(err)
	}
	n.release("a")
}

// A plugin can answer with anything. Neither the API nor a container gets it, and the plugin is not asked to prepare
// it.
func TestWhatNoContainerCanHaveIsRefused(t *testing.T) {
	n := newNode(t)
	hostile := answers(&v1beta1.ContainerAllocateResponse{
		Mounts:  []*v1beta1.Mount{{ContainerPath: "/x", HostPath: "../.."}},
		Devices: []*v1beta1.DeviceSpec{{ContainerPath: "/dev/x", HostPath: "/dev/x", Permissions: "rwx"}},
	})
	hostile.Options = &v1beta1.DevicePluginOptions{PreStartRequired: true}
	p := n.pluginWith(gpu, hostile, plugintest.Devices(1)...)
	n.pluginWith(nic, answers(&v1beta1.ContainerAllocateResponse{}), plugintest.Devices(1)...)
	n.admit(pod("a", model.Container{Name: "main", Limits: map[string]int{nic: 1, gpu: 1}}))
	got, err := n.m.Start(t.Context(), "a", "main")
	want := `start container "main" of pod "a": the plugin of example.com/gpu returned an invalid response to Allocate: ` +
		`permissions of a device node "rwx": want some of r, w and m` + "\n" +
		`host path of a mount "../..": want an absolute path`
	if !errors.Is(err, manager.ErrBadResponse) || err.Error() != want || !cmp.Equal(got, model.RunOptions{}) ||
		p.Calls().PreStart != 0 {
		t.Errorf("got %+v and %v after %d calls of PreStartContainer, want %s", got, err, p.Calls().PreStart, want)
	}
}
