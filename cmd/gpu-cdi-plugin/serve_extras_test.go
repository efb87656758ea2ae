package main

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

// What a container gets besides GPUs follows the node: it is named while it is there, and then it is in a spec.
func TestServeGivesExtras(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "extras: [gds, gdrcopy, nvswitch]\nimex: {channels: [1]}\n")
	_, err := sim.Create(
		t.Context(),
		s.node.Root(),
		s.node.Machine(),
		sim.Options{Force: true, Extras: []string{"gds", "imex"}},
	)
	testenv.Must(t, err)
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 8, 0)
	uuid := s.node.Machine().GPUs[3].UUID
	names := s.allocate(e, uuid)
	want := []string{
		cdi.DefaultKind + "=" + uuid,
		"nvidia.com/gds=all",
		"nvidia.com/nvswitch=all",
		"nvidia.com/imex-channel=1",
	}
	if !slices.Equal(names, want) {
		t.Errorf("allocated %v, want %v", names, want)
	}
	s.offered(names...)

	testenv.Must(t, os.Remove(filepath.Join(s.node.Root(), "dev/nvidia-caps-imex-channels/channel1")))
	s.signal(syscall.SIGHUP)
	waitFor(t, "an allocation without the channel", func() bool {
		names, err := s.tryAllocate(e, uuid) // refused between the end of the channel's spec and that of its name
		return err == nil && slices.Equal(names, want[:3])
	})
	waitFor(t, "the end of the channel's spec", func() bool {
		_, err := os.Stat(filepath.Join(filepath.Dir(s.spec), "nvidia.com-imex-channel.json"))
		return os.IsNotExist(err)
	})

	// Without a required channel no device can be allocated, and serve does not start.
	s.configure("imex: {channels: [1], required: true}\n")
	if err := s.end(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	s.start()
	if err := <-s.done; err == nil {
		t.Error("it serves without the channel that is required")
	}
}

// Devices are named by index and the annotation has another prefix where that is configured, and engines find the
// names.
func TestServeNamesDevicesAsConfigured(t *testing.T) {
	t.Parallel()
	s := newServed(t, "mig-h100", `
extras: mofed
mig-strategy: mixed
strategy: cdi-cri,cdi-annotations,envvar
device-id-strategy: index
cdi-annotation-prefix: nvidia.cdi.k8s.io/
`)
	_, err := sim.Create(
		t.Context(),
		s.node.Root(),
		s.node.Machine(),
		sim.Options{Force: true, Extras: []string{"mofed"}},
	)
	testenv.Must(t, err)
	s.start()
	for _, c := range []struct {
		resource string
		devices  int
		id       string
		name     string
	}{
		{gpuResource, 2, s.node.Machine().GPUs[6].UUID, "6"},
		{"nvidia.com/mig-4g.40gb", 1, s.migDevices(5, "4g.40gb")[0], "5:0"},
	} {
		e := s.kubelet.WaitListed(c.resource, c.devices, 0)
		answer, err := e.Client.Allocate(t.Context(), &v1beta1.AllocateRequest{
			ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{c.id}}},
		})
		testenv.Must(t, err)
		got := answer.GetContainerResponses()[0]
		want := []string{cdi.DefaultKind + "=" + c.name, "nvidia.com/mofed=all"}
		var names []string
		for _, d := range got.GetCdiDevices() {
			names = append(names, d.GetName())
		}
		if !slices.Equal(names, want) {
			t.Errorf("the CDI names are %v, want %v", names, want)
		}
		s.offered(names...)
		annotations := got.GetAnnotations()
		maps.DeleteFunc(annotations, func(key, _ string) bool {
			return strings.HasPrefix(key, resource.ParentAnnotation(""))
		})
		for key, value := range annotations {
			if !strings.HasPrefix(key, "nvidia.cdi.k8s.io/gpu-cdi-plugin_") || value != strings.Join(want, ",") {
				t.Errorf("the annotation is %s: %s, want %v", key, value, want)
			}
		}
		if env := got.GetEnvs(); env["NVIDIA_VISIBLE_DEVICES"] != c.name || env["NVIDIA_MOFED"] != "enabled" ||
			len(annotations) != 1 {
			t.Errorf("the variables are %v, and there are %d annotations", env, len(annotations))
		}
	}
}
