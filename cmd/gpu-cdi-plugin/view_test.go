package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/topology"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/api"
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

func TestViews(t *testing.T) {
	for name, v := range map[string]view{
		"devices":  devicesView(snapshot(), recordedStatuses, preparations, "nvidia.com/gpu"),
		"topology": topologyView(topology.Node{Snapshot: snapshot(), HoldersUnknown: "there is no kubelet"}),
	} {
		for _, format := range []string{"table", "wide", "json", "yaml", "name"} {
			if name == "topology" && (format == "wide" || format == "name") {
				continue
			}
			t.Run(name+" as "+format, func(t *testing.T) {
				var b bytes.Buffer
				if err := (&output{format: format}).print(&b, v); err != nil {
					t.Fatal(err)
				}
				golden(t, filepath.Join("testdata", "view", name+"."+format), b.String())
			})
		}
	}
}

// Plugins, drivers and files choose names. None of them controls the terminal that a table is read on, or its lines.
func TestTablesEscapeNames(t *testing.T) {
	for name, c := range map[string]struct{ in, want string }{
		"a title of the window":       {"d0\x1b]0;owned\a", `d0\x1b]0;owned\a`},
		"a C1 control character":      {"d0\u009b2J", `d0\u009b2J`},
		"a byte that is no character": {"d0\x9b2J", "d0\ufffd2J"},
		"text from right to left":     {"d0\u202e1", `d0\u202e1`},
		"another column":              {"d0\tHealthy", `d0\tHealthy`},
		"another line":                {"d0\nd1", "d0 d1"},
		"letters of any language":     {"GPU für ß 型", "GPU für ß 型"},
	} {
		t.Run(name, func(t *testing.T) {
			device := manager.Device{ID: c.in, Health: manager.Healthy}
			list := api.ResourceList{Items: []manager.Resource{{Name: "r", Devices: []manager.Device{device}}}}
			var b bytes.Buffer
			if err := (&output{format: "table", noHeaders: true}).print(&b, nodeDevicesView(list, nil)); err != nil {
				t.Fatal(err)
			}
			if want := "r   " + c.want + "   Healthy   -\n"; b.String() != want {
				t.Errorf("got %q, want %q", b.String(), want)
			}
		})
	}
	var b bytes.Buffer
	if err := (&table{legend: "why\n\x1b[2J\n"}).write(&b, false, false); err != nil || b.String() != "why\n\\x1b[2J\n" {
		t.Errorf("the text below a table: %q, %v", b.String(), err)
	}
}

func TestYAMLHasTheValuesOfJSON(t *testing.T) {
	v := map[string]any{
		"text": "13.0", "yes": "on", "null": "null", "line": "a\nb", "empty": "", "colon": "a: b", "number": 1.5,
		"whole": 1 << 53, "list": []any{"x"}, "none": []any{}, "map": map[string]any{"k": true}, "nothing": nil,
	}
	var asJSON, asYAML bytes.Buffer
	if err := errors.Join(printJSON(&asJSON, v), printYAML(&asYAML, v)); err != nil {
		t.Fatal(err)
	}
	var fromYAML any
	if err := yaml.Unmarshal(asYAML.Bytes(), &fromYAML); err != nil {
		t.Fatal(err)
	}
	again, err := json.MarshalIndent(fromYAML, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(asJSON.String(), string(again)+"\n"); diff != "" {
		t.Errorf("JSON and YAML differ (-json +yaml):\n%s\nYAML:\n%s", diff, &asYAML)
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
