package devicemanager

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	upstream "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"

	naming "gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The kubelet's package and ours read what the other one wrote, and write the same bytes.
func TestTheKubeletsCheckpoint(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same files in each run
	for i := range 1000 {
		ours := randomCheckpoint(random)
		entries := make([]upstream.PodDevicesEntry, 0, len(ours.PodDeviceEntries))
		for _, e := range ours.PodDeviceEntries {
			entries = append(entries, upstream.PodDevicesEntry{
				PodUID: e.PodUID, ContainerName: e.ContainerName, ResourceName: e.ResourceName,
				DeviceIDs: e.DeviceIDs, AllocResp: e.AllocResp,
			})
		}
		if ours.PodDeviceEntries == nil {
			entries = nil
		}
		want, err := upstream.New(entries, ours.RegisteredDevices).MarshalCheckpoint()
		testenv.Must(t, err)
		got, err := ours.Marshal()
		testenv.Must(t, err)
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Fatalf("file %d (-kubelet +ours):\n%s", i, diff)
		}
		parsed, err := naming.ParseCheckpoint(want)
		if err != nil {
			t.Fatalf("%s: %v", want, err)
		}
		if diff := cmp.Diff(ours, parsed); diff != "" {
			t.Fatalf("file %d read (-want +got):\n%s", i, diff)
		}
		if again, err := parsed.Marshal(); err != nil || string(again) != string(want) {
			t.Fatalf("file %d is written again as %s, %v, want %s", i, again, err, want)
		}
	}
}

// The kubelet loads a file that was written here, from its directory.
func TestTheKubeletLoadsOurCheckpoint(t *testing.T) {
	dir := t.TempDir()
	random := rand.New(rand.NewPCG(3, 4)) //nolint:gosec // the same files in each run
	ours := randomCheckpoint(random)
	data, err := ours.Marshal()
	testenv.Must(t, err)
	testenv.Must(t, os.WriteFile(filepath.Join(dir, naming.CheckpointName), data, 0o600))
	manager, err := checkpointmanager.NewCheckpointManager(dir)
	testenv.Must(t, err)
	loaded := upstream.New(nil, nil)
	testenv.Must(t, manager.GetCheckpoint(naming.CheckpointName, loaded))
	entries, registered := loaded.GetData()
	if diff := cmp.Diff(fmt.Sprint(ours.PodDeviceEntries), fmt.Sprint(entries)); diff != "" {
		t.Errorf("entries (-ours +kubelet):\n%s", diff)
	}
	if diff := cmp.Diff(ours.RegisteredDevices, registered); diff != "" {
		t.Errorf("registered devices (-ours +kubelet):\n%s", diff)
	}
	// And back: the kubelet writes the file, and we read it.
	testenv.Must(t, manager.CreateCheckpoint(naming.CheckpointName, loaded))
	written, err := os.ReadFile(filepath.Join(dir, naming.CheckpointName))
	testenv.Must(t, err)
	if diff := cmp.Diff(string(data), string(written)); diff != "" {
		t.Errorf("the file (-ours +kubelet):\n%s", diff)
	}
}

func randomCheckpoint(r *rand.Rand) *naming.Checkpoint {
	ids := func() []string {
		var ids []string // nil at times
		for range r.IntN(4) {
			ids = append(ids, fmt.Sprintf("<GPU> %d\n", r.IntN(100)))
		}
		if r.IntN(5) == 0 {
			return []string{}
		}
		return ids
	}
	c := &naming.Checkpoint{}
	for range r.IntN(5) {
		e := naming.Entry{
			PodUID: fmt.Sprint(
				r.IntN(10),
			), ContainerName: "é", ResourceName: fmt.Sprintf("example.com/r%d", r.IntN(20)),
		}
		for range r.IntN(14) {
			if e.DeviceIDs == nil {
				e.DeviceIDs = map[int64][]string{}
			}
			e.DeviceIDs[int64(r.IntN(130)-1)] = ids()
		}
		if r.IntN(3) > 0 {
			e.AllocResp = []byte(fmt.Sprint(r.Uint64()))[:r.IntN(2)]
		}
		c.PodDeviceEntries = append(c.PodDeviceEntries, e)
	}
	if r.IntN(3) > 0 {
		c.RegisteredDevices = map[string][]string{}
		for range r.IntN(30) {
			c.RegisteredDevices[fmt.Sprintf("example.com/r%d", r.IntN(100))] = ids()
		}
	}
	return c
}
