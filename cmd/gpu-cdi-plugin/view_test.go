package main

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/cmd/gpu-cdi-plugin/topology"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/test/lib/clitest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// snapshot returns a node with a GPU of each kind: a whole one, one in MIG mode, one that cannot be read.
func snapshot() *gpu.Snapshot {
	return &gpu.Snapshot{
		DriverVersion: "580.126.09",
		CUDAVersion:   "13.0",
		Devices: []gpu.Device{
			{
				Index: 0, UUID: "GPU-a", Name: "NVIDIA A", Minor: 4, PCIBusID: "0000:1b:00.0", NUMANode: 0,
				MemoryBytes: 80 << 30, ComputeCapability: "9.0",
			},
			{
				Index: 1, UUID: "GPU-b", Name: "NVIDIA A", Minor: 5, PCIBusID: "0000:1c:00.0", NUMANode: gpu.NoNUMANode,
				MemoryBytes: 80 << 30, ComputeCapability: "9.0", MIGEnabled: true,
				MIG: []gpu.MIGDevice{{
					UUID: "MIG-c", Profile: "1g.10gb", GPUInstance: 7, GPUInstanceCap: 66, ComputeInstanceCap: 67,
					MemoryBytes: 10200547328,
				}},
			},
			{Index: 2, Minor: gpu.NoMinor, NUMANode: gpu.NoNUMANode, Error: "GPU is lost"},
		},
		Links: []gpu.Link{{A: 0, B: 1, PCIe: gpu.PathSystem, NVLinks: 18, Switched: true}},
	}
}

// recordedStatuses and preparations are what serve has recorded of the snapshot's devices.
var (
	recordedStatuses = map[string]health.Status{
		"GPU-a": {
			UUID: "GPU-a", State: health.Healthy, Since: time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC),
			EventsMissed: "nvmlEventSetCreate: Unknown Error",
		},
		"MIG-c": {
			UUID: "MIG-c", State: health.Suspect, Reason: "process 4711 (python3, cgroup /) still uses it", Remedy: health.None,
			Since: time.Date(2026, 1, 2, 3, 5, 0, 0, time.UTC),
		},
	}
	preparations = map[string]prepare.Record{
		"GPU-a": {
			UUID: "GPU-a", Policy: prepare.Clean, Time: time.Date(2026, 1, 2, 4, 4, 5, 6, time.FixedZone("", 3600)),
			Duration: 12345 * time.Microsecond,
			Steps:    []prepare.Step{{Name: "settings", Result: prepare.OK, Note: "a clock", Duration: time.Millisecond}},
		},
		"MIG-c": {
			UUID: "MIG-c", Policy: prepare.Check, Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
			Duration: 5 * time.Second, Error: "MIG-c is not ready for a container (memory): 2048 MiB are in use",
			Steps: []prepare.Step{
				{Name: "health", Result: prepare.OK, Duration: time.Millisecond},
				{Name: "memory", Result: prepare.Failed, Note: "2048 MiB are in use", Duration: 4999 * time.Millisecond},
			},
		},
	}
)

// holders hold devices by both doors.
var holders = agent.Claims{Holders: []agent.Holding{
	{Index: "0", Door: config.PluginDoor, Holding: ledger.Holding{
		UUID: "GPU-a", GPU: "GPU-a", Resource: "nvidia.com/gpu.shared", Replicas: 2, Namespace: "ml",
		PodUID: "4b0c7d2e-0000-4000-8000-000000000003", Book: ledger.Checkpoint,
		Forget:     "4b0c7d2e-0000-4000-8000-000000000003/main/GPU-a::0",
		Containers: []ledger.Container{{Pod: "train", Container: "main"}},
	}},
	{Index: "0", Door: config.PluginDoor, Holding: ledger.Holding{
		UUID: "GPU-a", Resource: "nvidia.com/gpu.shared", Replicas: 1, State: ledger.Ending, Book: ledger.Checkpoint,
		Containers: []ledger.Container{{Container: "init"}}, PodUID: "4b0c7d2e-0000-4000-8000-000000000004",
	}},
	{Index: "0", Door: config.PluginDoor, Holding: ledger.Holding{
		UUID: "GPU-a", Resource: "nvidia.com/gpu.shared", Replicas: 1, State: ledger.Starting,
		Containers: []ledger.Container{}, Book: ledger.Allocated,
	}},
	{Index: "1:0", Door: config.DRADoor, Holding: ledger.Holding{
		UUID: "MIG-c", Namespace: "team", Claim: "infer-gpu-x7x2q", ClaimUID: "4b0c7d2e-0000-4000-8000-000000000001",
		Containers: []ledger.Container{{Pod: "infer", Container: "main"}, {Pod: "infer", Container: "sidecar"}},
		Since:      time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("", 3600)),
		Book:       ledger.Record, Forget: "4b0c7d2e-0000-4000-8000-000000000001/mig-c",
	}},
	{Index: "1:0", Door: config.DRADoor, Holding: ledger.Holding{
		UUID: "MIG-c", Namespace: "team", Claim: "monitor", AdminAccess: true, Book: ledger.Record,
		Containers: []ledger.Container{{Pod: "monitor", Container: "main"}},
	}},
	{Door: config.DRADoor, Holding: ledger.Holding{
		UUID: "MIG-gone", Namespace: "team", Claim: "old", ClaimUID: "4b0c7d2e-0000-4000-8000-000000000002",
		Containers: []ledger.Container{}, Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}},
}}

func TestViews(t *testing.T) {
	for name, v := range map[string]cli.View{
		"claims":   claimsView(holders),
		"devices":  devicesView(snapshot(), recordedStatuses, preparations, nil, "nvidia.com/gpu"),
		"topology": topologyView(topology.Node{Snapshot: snapshot(), HoldersUnknown: "there is no kubelet"}),
	} {
		for _, format := range []string{"table", "wide", "json", "yaml", "name"} {
			if name == "topology" && (format == "wide" || format == "name") || name == "claims" && format == "name" {
				continue
			}
			t.Run(name+" as "+format, func(t *testing.T) {
				var b bytes.Buffer
				testenv.Must(t, (&cli.Output{Format: format}).Print(&b, v))
				clitest.Golden(t, filepath.Join("testdata", "view", name+"."+format), b.String(), *update)
			})
		}
	}
}

type fullDisk struct{}

var errFull = errors.New("no space left on device")

func (fullDisk) Write([]byte) (int, error) { return 0, errFull }

func TestOutputThatCannotBeWrittenIsAnError(t *testing.T) {
	for _, args := range [][]string{
		{"version"},
		{"version", "-o", "json"},
		{"version", "-o", "yaml"},
		{"version", "-o", "name"},
		{"completion", "bash"},
		{"cdi", "list", "--root", t.TempDir()},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			var stderr bytes.Buffer
			code := run(context.Background(), args, nil, strings.NewReader(""), fullDisk{}, &stderr)
			if code != 1 || !strings.Contains(stderr.String(), errFull.Error()) {
				t.Errorf("exit %d, stderr %q", code, &stderr)
			}
		})
	}
}
