package node

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// describedDevice is a GPU on NUMA node 1 that is not shared.
func describedDevice() resource.Device {
	return resource.Device{
		ID: "GPU-4", UUID: "GPU-4", Parent: "GPU-4", Index: 4, IndexName: "4",
		MIGIndex: resource.NoMIG, Replica: resource.NoReplica,
		NUMANode: 1, Healthy: true, Model: "NVIDIA H100 80GB HBM3", PCIBusID: "0000:05:00.0", MemoryBytes: 80 << 30,
	}
}

func TestADescriptorSaysWhatTheDeviceIsAndHowItIsShared(t *testing.T) {
	replicas := func(change func(*resource.Device)) []resource.Device {
		list := []resource.Device{describedDevice(), describedDevice()}
		for i := range list {
			list[i].ID, list[i].Replica = "GPU-4::"+string(rune('0'+i)), i
			change(&list[i])
		}
		return list
	}
	mig := describedDevice()
	mig.ID, mig.UUID, mig.MIGIndex, mig.Profile, mig.MemoryBytes = "MIG-1", "MIG-1", 2, "1g.10gb", 10<<30
	mig.IndexName = "4:2"
	alone := describedDevice()
	alone.NUMANode = gpu.NoNUMANode
	const whole = `"version":1,"uuid":"GPU-4","resource":"nvidia.com/gpu","index":"4","model":"NVIDIA H100 80GB HBM3",` +
		`"pciBusID":"0000:05:00.0","memoryBytes":85899345920`
	cases := map[string]struct {
		devices []resource.Device
		want    string
	}{
		"a GPU":                 {[]resource.Device{describedDevice()}, `{` + whole + `,"numaNode":1}`},
		"a GPU of no NUMA node": {[]resource.Device{alone}, `{` + whole + `}`},
		"a MIG device": {
			[]resource.Device{mig},
			`{"version":1,"uuid":"MIG-1","parent":"GPU-4","resource":"nvidia.com/gpu","index":"4:2",` +
				`"model":"NVIDIA H100 80GB HBM3","profile":"1g.10gb","pciBusID":"0000:05:00.0","numaNode":1,` +
				`"memoryBytes":10737418240}`,
		},
		"a time-sliced GPU": {
			replicas(func(*resource.Device) {}),
			`{` + whole + `,"numaNode":1,"sharing":{"replicas":2}}`,
		},
		"a GPU that is shared by MPS": {
			replicas(
				func(d *resource.Device) { d.MPS = &resource.MPSLimits{MemoryBytes: 40 << 30, ThreadPercent: 50} },
			),
			`{` + whole + `,"numaNode":1,"sharing":{"replicas":2,` +
				`"mps":{"memoryLimitBytes":42949672960,"activeThreadPercentage":50}}}`,
		},
		"an old GPU that is shared by MPS": {
			replicas(func(d *resource.Device) { d.MPS = &resource.MPSLimits{MemoryBytes: 40 << 30} }),
			`{` + whole + `,"numaNode":1,"sharing":{"replicas":2,"mps":{"memoryLimitBytes":42949672960}}}`,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			d := newDescriptors(filepath.Join(t.TempDir(), "devices"))
			t.Cleanup(func() { testenv.Must(t, d.lock.release()) })
			failed, err := d.write(describe([]resource.Resource{{Name: "nvidia.com/gpu", Devices: c.devices}}), nil)
			if err != nil || len(failed) > 0 {
				t.Fatal(failed, err)
			}
			path := d.path(c.devices[0].UUID)
			var got, want any
			testenv.Must(t, json.Unmarshal(read(t, path), &got))
			testenv.Must(t, json.Unmarshal([]byte(c.want), &want))
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("the descriptor (-want +got):\n%s", diff)
			}
			info, err := os.Stat(path)
			testenv.Must(t, err)
			if info.Mode().Perm() != 0o644 {
				t.Errorf("mode %o, want 644: not every container runs as root", info.Mode().Perm())
			}
		})
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	testenv.Must(t, err)
	return data
}

// newDescribedFixture is a node with four GPUs whose descriptors are in b.rec.descriptors.dir.
func newDescribedFixture(t *testing.T, change ...func(*Options)) *fixture {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "state", "devices")
	return newFixture(t, "pcie-quad", append(change, func(o *Options) { o.DescriptorDir = dir })...)
}

func (b *fixture) descriptorNames() []string {
	b.t.Helper()
	entries, err := os.ReadDir(b.rec.descriptors.dir)
	testenv.Must(b.t, err)
	var names []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			names = append(names, strings.TrimSuffix(e.Name(), ".json"))
		}
	}
	return names
}

func TestEveryPublishedDeviceHasItsDescriptorMounted(t *testing.T) {
	b := newDescribedFixture(t)
	b.start()
	uuids := slices.Sorted(slices.Values(b.uuids()))
	if got := b.descriptorNames(); !slices.Equal(got, uuids) {
		t.Errorf("descriptors of %v, want %v", got, uuids)
	}
	s := b.rec.State()
	b.wantDevices(s, count{healthy: 4})
	for _, d := range s.Resources[0].Devices {
		mounts := d.Grant.Always.Mounts
		if len(mounts) != 1 || mounts[0].HostPath != b.rec.descriptors.path(d.UUID) ||
			mounts[0].ContainerPath != "/run/gpu/devices/"+d.UUID+".json" || !slices.Contains(mounts[0].Options, "ro") {
			t.Errorf("%s has the mounts %+v", d.UUID, mounts)
		}
	}
}

func TestDescriptorsFollowTheDevices(t *testing.T) {
	b := newDescribedFixture(t)
	b.start()
	other := filepath.Join(b.rec.descriptors.dir, "notes.txt")
	testenv.Must(t, os.WriteFile(other, nil, 0o600))
	gone := b.uuids()[3]
	testenv.Must(t, b.node.Remove(3))
	b.wantDevices(b.reconcile(), count{healthy: 3})
	if names := b.descriptorNames(); slices.Contains(names, gone) || !slices.Contains(names, "notes.txt") {
		t.Errorf("after %s is gone there are %v", gone, names)
	}
}

// What uses a device is written before the device is published as unhealthy, for the host only, and only while nothing
// else is wrong with the device.
func TestTheUseOfADeviceIsInAFile(t *testing.T) {
	b := newDescribedFixture(t)
	b.start()
	uuid, gone := b.uuids()[0], b.uuids()[3]
	path := filepath.Join(b.rec.descriptors.dir, uuid+".use")
	is := func(act, want string, healthy int) {
		t.Helper()
		b.wantDevices(b.rec.State(), count{healthy: healthy, unhealthy: 4 - healthy})
		got, err := os.ReadFile(path)
		if string(got) != want || want == "" && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %q, want %q, error %v", act, got, want, err)
		}
	}
	b.rec.SetInUse(uuid, "process 7 uses it", []int{7})
	is("it is in use", `{"reason":"process 7 uses it","pids":[7]}`+"\n", 3)
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("the file is %v, error %v", info.Mode(), err)
	}
	for _, d := range b.rec.State().Resources[0].Devices {
		if d.InUse != (d.UUID == uuid) {
			t.Errorf("%s: in use only is %t", d.UUID, d.InUse)
		}
	}
	b.rec.SetInUse(uuid, "process 8 uses it", []int{7})
	is("another process uses it", `{"reason":"process 8 uses it","pids":[7]}`+"\n", 3)
	testenv.Must(t, b.rec.Monitor().Cordon(uuid, "x"))
	is("it has just been cordoned", "", 3)
	b.rec.SetInUse(uuid, "process 8 uses it", []int{7})
	is("it is cordoned too", "", 3)
	testenv.Must(t, b.rec.Monitor().Uncordon(uuid))
	b.rec.SetInUse(uuid, "process 8 uses it", []int{7})
	is("it is in use only", `{"reason":"process 8 uses it","pids":[7]}`+"\n", 3)
	b.rec.SetInUse(uuid, "", []int{7})
	is("it is not in use", "", 4)
	b.rec.SetInUse(uuid, "", []int{7})
	is("it is still not in use", "", 4)

	b.rec.SetInUse(gone, "process 7 uses it", []int{7})
	testenv.Must(t, b.node.Remove(3))
	b.reconcile()
	if names := b.descriptorNames(); slices.Contains(names, gone+".use") {
		t.Errorf("after %s is gone there are %v", gone, names)
	}
}

// A container that has the GPU may have to start again, and the spec has the GPU still.
func TestAGPUThatIsNoLongerOfferedKeepsItsDescriptor(t *testing.T) {
	b := newDescribedFixture(t)
	b.start()
	b.config.GPUs.Exclude = []resource.Selector{"2"}
	b.wantDevices(b.reconcile(), count{healthy: 3})
	if uuid := b.uuids()[2]; !slices.Contains(b.descriptorNames(), uuid) || !slices.Contains(b.disk(), uuid) {
		t.Errorf("%s has no descriptor any more, or is not in the spec", uuid)
	}
}

func TestAFailedStartLeavesNoDescriptor(t *testing.T) {
	b := newDescribedFixture(t)
	b.foreign(b.path, "0")
	edit(t, b.path, "nvidia.com/gpu", "example.com/gpu")
	if err := b.rec.Start(t.Context(), b.publish); !isType[*KindError](err) {
		t.Fatal(err)
	}
	if got := b.descriptorNames(); len(got) > 0 {
		t.Errorf("there are descriptors: %v", got)
	}
}

// A lost GPU can come back, and a container that has it starts again with its descriptor.
func TestALostGPUKeepsItsDescriptor(t *testing.T) {
	b := newDescribedFixture(t)
	b.start()
	b.source.set(nil, 2)
	b.wantDevices(b.reconcile(), count{healthy: 3, unhealthy: 1})
	if uuid := b.uuids()[2]; !slices.Contains(b.descriptorNames(), uuid) {
		t.Errorf("the descriptor of %s is gone", uuid)
	}
}

func TestADamagedDescriptorIsWrittenAgain(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"removed":      os.Remove,
		"edited":       func(p string) error { return os.WriteFile(p, []byte("{}"), 0o644) },
		"made private": func(p string) error { return os.Chmod(p, 0o600) },
		"given to another user": func(p string) error {
			testenv.Root(t)
			return os.Chown(p, 1000, 1000)
		},
		// What a runtime makes of a path to mount that is missing.
		"an empty directory": func(p string) error {
			if err := os.Remove(p); err != nil {
				return err
			}
			return os.Mkdir(p, 0o755)
		},
		"with its directory": func(p string) error { return os.Rename(filepath.Dir(p), filepath.Dir(p)+".old") },
	} {
		t.Run(name, func(t *testing.T) {
			b := newDescribedFixture(t, func(o *Options) { o.Interval = 20 * time.Millisecond })
			b.start()
			path := b.rec.descriptors.path(b.uuids()[1])
			want := string(read(t, path))
			b.run()
			testenv.Must(t, damage(path))
			testenv.Eventually(t, "it is written again", func() bool {
				info, err := os.Stat(path)
				data, _ := os.ReadFile(path)
				return err == nil && info.Mode() == 0o644 && string(data) == want && !othersCanChange(path)
			})
		})
	}
}

func TestAnUnchangedDescriptorIsNotWrittenAgain(t *testing.T) {
	b := newDescribedFixture(t)
	b.start()
	path := b.rec.descriptors.path(b.uuids()[0])
	before := fileio.IDOf(path)
	b.reconcile()
	if fileio.IDOf(path) != before {
		t.Error("it was written again")
	}
}

// A full disk passes, so it is no reason not to start.
func TestADeviceWithoutItsDescriptorIsUnhealthy(t *testing.T) {
	b := newDescribedFixture(t)
	path := b.rec.descriptors.path(b.uuids()[1])
	testenv.Must(t, os.MkdirAll(filepath.Join(path, "in the way"), 0o755))
	b.start()
	s := b.rec.State()
	b.wantDevices(s, count{healthy: 3, unhealthy: 1})
	if reason := reasons(s)[b.uuids()[1]]; !strings.Contains(reason, "write the descriptor of "+b.uuids()[1]) {
		t.Errorf("it is unhealthy for the reason %q", reason)
	}
	testenv.Must(t, os.RemoveAll(path))
	b.wantDevices(b.reconcile(), count{healthy: 4})
}

func TestTwoInstancesDoNotWriteTheSameDescriptors(t *testing.T) {
	b := newDescribedFixture(t)
	b.start()
	o := b.rec.opts
	o.Path = ""
	if err := New(o).Start(t.Context(), func(State) {}); err == nil ||
		!strings.Contains(err.Error(), "write the device descriptors: lock ") {
		t.Errorf("a second instance starts with the error %v", err)
	}
}

func TestOnlyAClientOfMPSGetsWhatItsDaemonShares(t *testing.T) {
	b := newFixture(t, "pcie-quad", func(o *Options) {
		o.MPSClient = func(uuid string) specs.ContainerEdits {
			return specs.ContainerEdits{Env: []string{"PIPE=/run/" + uuid}}
		}
	})
	b.config.Sharing.MPS.Resources = []resource.SharingRule{
		{Name: "nvidia.com/gpu", Devices: []resource.Selector{"1"}, Replicas: 2},
	}
	b.start()
	shared := b.uuids()[1]
	for _, d := range b.rec.State().Resources[0].Devices {
		var want []string
		if d.UUID == shared {
			want = []string{"PIPE=/run/" + shared}
		}
		if got := d.Grant.Always.Env; !slices.Equal(got, want) {
			t.Errorf("%s has the variables %q, want %q", d.ID, got, want)
		}
	}
}
