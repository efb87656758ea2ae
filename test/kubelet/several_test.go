package kubelet

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	core "gpu-cdi-plugin/node"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestDevicesOfTwoResources runs pods with devices of two resources. Both are in the container, and both are described.
func TestDevicesOfTwoResources(t *testing.T) {
	const small, large, shared = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb", gpuName + ".shared"
	for name, test := range map[string]struct {
		machine, flag string
		offered       func(f *fixture, t *testing.T) Devices
	}{
		"two MIG profiles": {"mig-h100", "--mig-strategy=mixed", func(f *fixture, t *testing.T) Devices {
			return Devices{small: f.migByProfile(t)["1g.10gb"], large: f.migByProfile(t)["3g.40gb"]}
		}},
		"a whole GPU and a share of one": {"pcie-quad", writeConfig(t, `
sharing: {time-slicing: {rename-by-default: true, resources: [{name: nvidia.com/gpu, devices: [0], replicas: 2}]}}
`), func(f *fixture, t *testing.T) Devices {
			all := f.uuids(t)
			return Devices{gpuName: all[1:], shared: {all[0] + "::0", all[0] + "::1"}}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			f := setUp(t, test.machine, test.flag)
			p := newPod("both", "", 0)
			p.Limits = map[string]int{}
			for resource, devices := range test.offered(f, t) {
				f.awaitDevices(t, resource, devices)
				p.Limits[resource] = 1
			}
			s := f.launch(t, p)
			f.check(t, p, s)
			pods, err := f.Assigned(t.Context())
			testenv.Must(t, err)
			f.checkDescriptors(t, s, pods[p.Name])
		})
	}
}

// checkDescriptors expects a descriptor in the container for each GPU or MIG device that it was given, and no other.
func (f *fixture) checkDescriptors(t *testing.T, s PodStatus, given Devices) {
	t.Helper()
	want, got := map[string]string{}, map[string]string{}
	for resource, ids := range given {
		for _, id := range ids {
			uuid, _, _ := strings.Cut(id, "::")
			want[uuid] = resource
		}
	}
	for file := range strings.FieldsSeq(f.inPod(t, s, "ls", core.DescriptorsPath)) {
		var d core.Descriptor
		testenv.Must(t, json.Unmarshal([]byte(f.inPod(t, s, "cat", core.DescriptorsPath+"/"+file)), &d))
		if d.UUID+".json" != file {
			t.Errorf("%s describes %s", file, d.UUID)
		}
		got[d.UUID] = d.Resource
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the resources of the descriptors in the container, by UUID (-given +described):\n%s", diff)
	}
}

// TestExtras configures what else of the node pods get besides GPUs.
func TestExtras(t *testing.T) {
	gpus := simtest.Node(t, "dgx-h100", simtest.Extras("gdrcopy", "gds", "imex"))
	// A channel that does not exist is left out.
	f := setUpOn(t, gpus, writeConfig(t, "{extras: [gds, gdrcopy, nvswitch], imex: {channels: [0, 1, 7]}}"))
	patterns := []string{"gdrdrv", "nvidia-caps-imex-channels/channel*", "nvidia-fs*", "nvidia-nvswitch*"}
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := newPod("extras", gpuName, 1)
	s := f.launch(t, p)
	f.check(t, p, s)
	const script = `cd /dev
		ls -d gdrdrv nvidia-fs* nvidia-nvswitch* nvidia-caps-imex-channels/* 2>/dev/null || :`
	nodes := strings.Fields(f.inPod(t, s, "sh", "-c", script))
	if diff := cmp.Diff(f.globDevices(t, patterns), nodes); diff != "" {
		t.Errorf("device nodes (-host +container):\n%s", diff)
	}
	f.inPod(t, s, "sh", "-c", "[ -e /etc/cufile.json ]")
	if none := newPod("none", "", 0); strings.Contains(f.inPod(t, f.launch(t, none), "ls", "/dev"), "nvidia") {
		t.Error("a pod without a GPU has nodes of the driver")
	}
}

// globDevices returns the machine's device nodes of these patterns, relative to /dev and sorted.
func (f *fixture) globDevices(t *testing.T, patterns []string) (list []string) {
	t.Helper()
	dev := filepath.Join(f.gpus.Root(), "dev")
	for _, pattern := range patterns {
		found, err := filepath.Glob(filepath.Join(dev, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("the machine has no %s: %v", pattern, err)
		}
		for _, path := range found {
			list = append(list, strings.TrimPrefix(path, dev+"/"))
		}
	}
	slices.Sort(list)
	return list
}
