package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The request has the devices of its own resource already, so they must not be counted twice.
func TestUsedSlicesAreThoseOfOtherResources(t *testing.T) {
	own, other := migOf(2), migOf(2)
	other.Name = "nvidia.com/mig-2g.20gb"
	for i := range other.Devices {
		d := &other.Devices[i]
		d.UUID += "b"
		d.ID, d.Profile = d.UUID+"::0", "2g.20gb"
	}
	dir := t.TempDir()
	p := &Plugin{opts: Options{Dir: dir}, endpoints: map[string]*endpoint{
		own.Name: {
			server: serverOf(t, own, by(resource.CDICRI)),
		}, other.Name: {server: serverOf(t, other, by(resource.CDICRI))},
	}}
	entry := func(resource, id string) string {
		return fmt.Sprintf(`{"ResourceName":%q,"DeviceIDs":{"0":["%s"]}}`, resource, id)
	}
	content := fmt.Sprintf(`{"Data":{"PodDeviceEntries":[%s,%s,%s]}}`, entry(own.Name, own.Devices[0].ID),
		entry(other.Name, other.Devices[1].ID), entry("example.com/thing", own.Devices[2].ID))
	testenv.Must(t, os.WriteFile(filepath.Join(dir, kubelet.CheckpointName), []byte(content), 0o600))
	file := &Plugin{opts: Options{Dir: filepath.Join(dir, kubelet.CheckpointName)}}
	if _, err := file.usedSlices(own.Name); err == nil {
		t.Error("a checkpoint that cannot be read is no error")
	}
	got, err := p.usedSlices(own.Name)
	testenv.Must(t, err)
	if diff := cmp.Diff(map[string]int{uuid(0): 2}, got); diff != "" {
		t.Errorf("slices by GPU (-want +got):\n%s", diff)
	}
}
