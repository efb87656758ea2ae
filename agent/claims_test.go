package agent

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

const claimUID = "00000000-0000-0000-0000-000000000001"

var claimedSince = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// claim makes the record of a ResourceClaim team/train that an earlier process has prepared with devices.
func (f *fixture) claim(uuids ...string) {
	f.t.Helper()
	var devices []map[string]string
	for _, uuid := range uuids {
		devices = append(devices, map[string]string{"request": "gpu", "device": "x", "uuid": uuid, "parent": uuid})
	}
	record, err := json.Marshal(map[string]any{
		"version": 1, "namespace": "team", "name": "train", "uid": claimUID, "pool": "node", "devices": devices,
		"boot": host.ReadLine(f.opts.Host.Proc("sys", "kernel", "random", "boot_id")), "since": claimedSince,
	})
	testenv.Must(f.t, err)
	dir := claimRecords(&f.opts.Config)
	testenv.Must(f.t, os.MkdirAll(dir, 0o700))
	testenv.Must(f.t, os.WriteFile(filepath.Join(dir, claimUID+".json"), record, 0o600))
}

func withRegistry(t *testing.T) func(*config.Config) {
	return func(c *config.Config) { c.PluginsRegistryDir = t.TempDir() }
}

// claims returns who holds which devices.
func (f *fixture) claims() Claims {
	f.t.Helper()
	answer, err := f.send(control.Request{Act: control.Claims})
	testenv.Must(f.t, err)
	var c Claims
	testenv.Must(f.t, json.Unmarshal([]byte(answer), &c))
	return c
}

func TestClaims(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", withRegistry(t))
	const gone = "GPU-00000000-0000-0000-0000-00000000dead"
	f.claim(f.uuid(0), gone)
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 3, 1)
	f.kubelet.Pods.Set(
		kubelettest.PodWithClaim("team", "p", "main", "train",
			podresources.DeviceName(f.uuid(0)), podresources.DeviceName(gone)),
		kubelettest.Pod("ml", "late", "main", gpuResource, f.uuid(3)),
		kubelettest.Pod("ml", "early", "main", gpuResource, f.uuid(1)),
	)
	claim := func(index, uuid string) Holding {
		return Holding{index, config.DRADoor, ledger.Holding{
			UUID: uuid, GPU: uuid, Namespace: "team", Claim: "train", ClaimUID: claimUID, Since: claimedSince,
			Book:       ledger.Record,
			Containers: []ledger.Container{{Pod: "p", Container: "main"}},
			Forget:     claimUID + "/" + podresources.DeviceName(uuid),
		}}
	}
	pod := func(index int, name string) Holding {
		return Holding{fmt.Sprint(index), config.PluginDoor, ledger.Holding{
			UUID: f.uuid(index), GPU: f.uuid(index), Resource: gpuResource, Replicas: 1, Namespace: "ml",
			Book:       ledger.PodResources,
			Containers: []ledger.Container{{Pod: name, Container: "main"}},
		}}
	}
	want := Claims{Holders: []Holding{claim("0", f.uuid(0)), pod(1, "early"), pod(3, "late"), claim("", gone)}}
	if diff := cmp.Diff(want, f.claims()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}

	// A kubelet that does not answer does not hide what was known.
	f.kubelet.StopPods()
	got := f.claims()
	if got.Unknown == "" {
		t.Error("it is not said that the containers are unknown")
	}
	if diff := cmp.Diff(want.Holders, got.Holders); diff != "" {
		t.Errorf("without the kubelet, -want +got\n%s", diff)
	}
}

func TestNobodyHoldsADevice(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.start(Serve)
	if diff := cmp.Diff(Claims{Holders: []Holding{}}, f.claims()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// A claim's pod may hold its GPU without a process that uses it.
func TestAdministratorDoesNotResetAGPUOfAClaim(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", withRegistry(t))
	f.claim(f.uuid(1))
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 3, 1)
	const why = "GPU 1 is in use by ResourceClaim team/train; use --wait to wait until it is free"
	f.refuses(why, control.Request{Act: control.Reset, Device: "1"})
	f.refuses(why, control.Request{Act: control.Reset, Device: "1", Force: true})
}
