package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	grpcinsecure "google.golang.org/grpc/credentials/insecure"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/test/lib/apiservertest"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// claimed is a plugin that also serves claims, with an API server.
type claimed struct {
	*served
	api  *apiservertest.Server
	name string // of the socket
}

func newClaimed(t *testing.T, machine, config string) *claimed {
	t.Helper()
	s := &claimed{newServed(t, machine, config), apiservertest.New(t), "gpu.nvidia.com-reg.sock"}
	testenv.Must(t, os.Mkdir(s.registry(), 0o755))
	return s
}

func (s *claimed) registry() string {
	return filepath.Join(filepath.Dir(s.kubelet.Dir), "plugins_registry")
}

func (s *claimed) socket() string { return filepath.Join(s.registry(), s.name) }

// restart ends the process, if there is one, and starts it with a door.
func (s *claimed) restart(door string) {
	s.t.Helper()
	if s.process != nil {
		testenv.Must(s.t, s.end(syscall.SIGTERM))
	}
	s.configure("door: " + door + "\nplugins-registry-dir: " + s.registry() + "\nservice-account-dir: " + s.api.Dir)
	s.start(s.api.Env()...)
}

// slices waits for ResourceSlices with these devices: the numbers of GPUs, with the taint of each.
func (s *claimed) published(want ...string) {
	s.t.Helper()
	var got []string
	waitFor(s.t, "the slices "+strings.Join(want, ", "), func() bool {
		var list []struct {
			Spec struct {
				Devices []struct {
					Name   string
					Taints []struct{ Key string }
				}
			}
		}
		s.api.Slices(&list)
		got = nil
		for _, slice := range list {
			for _, d := range slice.Spec.Devices {
				text := fmt.Sprint(slices.IndexFunc(s.uuids(), func(uuid string) bool { return d.Name == deviceName(uuid) }))
				for _, taint := range d.Taints {
					text += " " + taint.Key
				}
				got = append(got, text)
			}
		}
		return slices.Equal(got, want)
	})
}

func deviceName(uuid string) string { return strings.ToLower(uuid) }

func claimUID(i int) string { return fmt.Sprintf("00000000-0000-0000-0000-%012d", i) }

func claimOf(i int) *drav1.Claim {
	return &drav1.Claim{Namespace: "team", Name: fmt.Sprint("claim-", i), Uid: claimUID(i)}
}

// dial connects to the DRA driver, as the kubelet does.
func (s *claimed) dial() (drav1.DRAPluginClient, func()) {
	conn, err := grpc.NewClient("unix:"+s.socket(), grpc.WithTransportCredentials(grpcinsecure.NewCredentials()))
	testenv.Must(s.t, err)
	return drav1.NewDRAPluginClient(conn), func() { _ = conn.Close() }
}

// prepare has the claim i prepared with GPUs, and returns the CDI names or the error.
func (s *claimed) prepare(i int, gpus ...int) string {
	s.t.Helper()
	client, done := s.dial()
	defer done()
	return s.prepareBy(client, i, gpus...)
}

// prepareBy does the same on a connection.
func (s *claimed) prepareBy(client drav1.DRAPluginClient, i int, gpus ...int) string {
	s.t.Helper()
	var results []map[string]any
	for _, g := range gpus {
		results = append(results, map[string]any{
			"request": "gpu", "driver": "gpu.nvidia.com", "pool": apiservertest.Node, "device": deviceName(s.uuids()[g]),
		})
	}
	s.api.SetClaim("team", claimOf(i).GetName(), map[string]any{
		"metadata": map[string]any{"uid": claimUID(i)},
		"status":   map[string]any{"allocation": map[string]any{"devices": map[string]any{"results": results}}},
	})
	ctx, cancel := context.WithTimeout(s.t.Context(), prompt)
	defer cancel()
	answer, err := client.NodePrepareResources(ctx,
		&drav1.NodePrepareResourcesRequest{Claims: []*drav1.Claim{claimOf(i)}}, grpc.WaitForReady(true))
	testenv.Must(s.t, err)
	one := answer.GetClaims()[claimUID(i)]
	if one.GetError() != "" {
		return one.GetError()
	}
	var names []string
	for _, d := range one.GetDevices() {
		names = append(names, d.GetCdiDeviceIds()...)
	}
	return strings.Join(names, " ")
}

func (s *claimed) unprepare(i int) {
	s.t.Helper()
	client, done := s.dial()
	defer done()
	ctx, cancel := context.WithTimeout(s.t.Context(), prompt)
	defer cancel()
	answer, err := client.NodeUnprepareResources(ctx,
		&drav1.NodeUnprepareResourcesRequest{Claims: []*drav1.Claim{claimOf(i)}}, grpc.WaitForReady(true))
	testenv.Must(s.t, err)
	if text := answer.GetClaims()[claimUID(i)].GetError(); text != "" {
		s.t.Error(text)
	}
}

// A node goes from the device plugin to DRA and back, and what runs keeps its GPU.
func TestServeMovesANodeBetweenTheDoors(t *testing.T) {
	t.Parallel()
	s := newClaimed(t, "pcie-quad", "")
	s.api.SetAllocatable(map[string]string{gpuResource: "4"})
	s.restart("plugin")
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.kubelet.Pods.Set(kubelettest.Pod("ml", "train", "main", gpuResource, s.uuids()[0]))

	s.restart("dra")
	s.kubelet.WaitListed(gpuResource, 0, 0)
	s.logs("the Node still has 4 allocatable nvidia.com/gpu of a device plugin")
	s.published()
	s.api.SetAllocatable(map[string]string{gpuResource: "0"})
	s.published("0 gpu.nvidia.com/unavailable", "1", "2", "3")
	if text := s.prepare(1, 0); !strings.Contains(text, "another pod has it") || strings.Contains(text, "train") {
		t.Errorf("a claim gets the GPU of a pod: %s", text)
	}
	s.logs("ResourceClaim team/claim-1 is not prepared: " + s.uuids()[0] + ": container main of pod ml/train holds it")
	s.kubelet.Pods.Set()
	s.restart("dra") // a new process need not wait for the end of a pod that it has not seen
	s.published("0", "1", "2", "3")
	if text := s.prepare(1, 0); text != "nvidia.com/gpu="+s.uuids()[0] {
		t.Errorf("a claim gets %s", text)
	}
	s.unprepare(1)
	if text := s.prepare(2, 1, 2); text != "nvidia.com/gpu="+s.uuids()[1]+" nvidia.com/gpu="+s.uuids()[2] {
		t.Errorf("a claim gets %s", text)
	}

	// Claims can be allocated until the slices are gone, so the plugin has no devices yet.
	s.api.Instead(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
	s.restart("plugin")
	s.kubelet.WaitListed(gpuResource, 0, 0)
	s.logs("the ResourceSlices of the node are not published; retrying: list the ResourceSlices")
	s.api.Instead(nil)
	e := s.kubelet.WaitListed(gpuResource, 2, 2)
	s.published()
	if _, err := s.tryAllocate(e, s.uuids()[1]); err == nil ||
		!strings.Contains(err.Error(), "ResourceClaim team/claim-2, which is ending, holds it") {
		t.Errorf("a container gets the GPU of a claim: %v", err)
	}
	s.unprepare(2)
	s.kubelet.WaitListed(gpuResource, 4, 0)

	s.restart("plugin")
	s.kubelet.WaitListed(gpuResource, 4, 0)
	for _, text := range []string{"which the node does not offer", "level=ERROR"} {
		if strings.Contains(s.log.String(), text) {
			t.Errorf("%s: it is logged", text)
		}
	}
	testenv.Must(t, s.end(syscall.SIGTERM))
	if left, err := os.ReadDir(s.registry()); err != nil || len(left) > 0 {
		t.Errorf("left in plugins_registry: %v, %v", left, err)
	}
}

// With both doors each has its own GPUs.
func TestServeOpensBothDoors(t *testing.T) {
	t.Parallel()
	s := newClaimed(t, "pcie-quad", "")
	s.api.SetAllocatable(map[string]string{gpuResource: "2"})
	s.restart("both\ndra-gpus: [1, 3]")
	e := s.kubelet.WaitListed(gpuResource, 2, 0)
	s.published("1", "3")
	uuids := s.uuids()
	if _, err := s.tryAllocate(e, uuids[1]); err == nil {
		t.Error("a container gets a GPU of DRA")
	}
	s.allocate(e, uuids[0])
	if text := s.prepare(1, 3); text != "nvidia.com/gpu="+uuids[3] {
		t.Errorf("a claim gets %s", text)
	}
	if text := s.prepare(2, 0); !strings.Contains(text, "another pod has it") {
		t.Errorf("a claim gets the GPU of a container: %s", text)
	}
}

// The old instance removes its socket when the kubelet has registered the new one, and answers until the kubelet has
// closed its connection. Then the new one answers, and knows what the old one has prepared.
func TestServeHandsClaimsOver(t *testing.T) {
	t.Parallel()
	s := newClaimed(t, "pcie-quad", "")
	s.restart("dra\ntake-over: true")
	s.published("0", "1", "2", "3")
	s.registers()
	kubelet, leave := s.dial()
	gets := func(text string, gpu int) {
		t.Helper()
		if text != "nvidia.com/gpu="+s.uuids()[gpu] {
			t.Errorf("the claim of GPU %d gets %s", gpu, text)
		}
	}
	gets(s.prepareBy(kubelet, 0, 0), 0)

	next := &claimed{s.beside(), s.api, "gpu.nvidia.com-reg-2.sock"}
	next.start(s.api.Env()...)
	next.logs("the kubelet watches " + gpuResource)
	gets(s.prepareBy(kubelet, 1, 1), 1)
	if strings.Contains(s.log.String(), "the plugin stopped") {
		t.Error("the old instance ends before the kubelet has registered the new one")
	}
	next.registers()
	waitFor(t, "the old socket is gone", func() bool { _, err := os.Lstat(s.socket()); return err != nil })
	gets(s.prepareBy(kubelet, 2, 2), 2)
	leave()
	s.logs("this one waits for its end")
	if text := next.prepare(3, 2); !strings.Contains(text, "another pod has it") {
		t.Errorf("two claims have a GPU: %s", text)
	}
	gets(next.prepare(4, 3), 3)
	s.signal(syscall.SIGTERM)
	testenv.Must(t, s.ended())
	next.unprepare(2)
	gets(next.prepare(3, 2), 2)
	testenv.Must(t, next.end(syscall.SIGTERM))
	if left, err := os.ReadDir(s.registry()); err != nil || len(left) > 0 {
		t.Errorf("left in plugins_registry: %v, %v", left, err)
	}
}

// Without the credentials of a pod claims cannot be read.
func TestServeWithoutCredentialsOpensNoDRADoor(t *testing.T) {
	t.Parallel()
	s := newClaimed(t, "pcie-quad", "door: dra\n")
	s.start()
	if err := s.ended(); err == nil {
		t.Error("it ended well")
	}
	s.logs("door dra needs the API server: the environment variable KUBERNETES_SERVICE_HOST is not set")
}

// registers tells the driver that the kubelet has registered it.
func (s *claimed) registers() {
	s.t.Helper()
	conn, err := grpc.NewClient("unix:"+s.socket(), grpc.WithTransportCredentials(grpcinsecure.NewCredentials()))
	testenv.Must(s.t, err)
	defer conn.Close()
	_, err = pluginregistration.NewRegistrationClient(conn).NotifyRegistrationStatus(s.t.Context(),
		&pluginregistration.RegistrationStatus{PluginRegistered: true}, grpc.WaitForReady(true))
	testenv.Must(s.t, err)
}

func TestServeShowsWhoHoldsWhatByBothDoors(t *testing.T) {
	t.Parallel()
	s := newClaimed(t, "pcie-quad", "")
	s.restart("plugin")
	s.kubelet.WaitListed(gpuResource, 4, 0)
	stdout, stderr := s.claims()
	if stdout != "" || stderr != "no container and no ResourceClaim holds a device\n" {
		t.Errorf("nobody holds a device, and claims prints %q and %q", stdout, stderr)
	}
	devices := s.devices()

	s.kubelet.Pods.Set(kubelettest.Pod("ml", "train", "main", gpuResource, s.uuids()[0]))
	s.restart("dra\nlisten: 127.0.0.1:0\npod-metrics: true")
	s.published("0 gpu.nvidia.com/unavailable", "1", "2", "3")
	if body, status := s.ask("/readyz"); status == http.StatusOK ||
		!strings.Contains(body, "the DRA driver is not registered with the kubelet: ") {
		t.Errorf("a driver that is not registered is ready: %d, %s", status, body)
	}
	s.registers()
	waitFor(t, "readiness", func() bool { _, status := s.ask("/readyz"); return status == http.StatusOK })
	if text := s.prepare(1, 2, 1); !strings.HasPrefix(text, "nvidia.com/gpu=") {
		t.Fatal(text)
	}
	s.prepare(2, 0) // in vain
	s.kubelet.Pods.Set(
		kubelettest.Pod("ml", "train", "main", gpuResource, s.uuids()[0]),
		kubelettest.PodWithClaim("team", "infer", "main", "claim-1",
			strings.ToLower(s.uuids()[1]), strings.ToLower(s.uuids()[2])),
	)
	var got []string
	stdout, _ = s.claims("--no-headers")
	for line := range strings.Lines(stdout) {
		fields := strings.Fields(line)
		if since, err := time.Parse(time.RFC3339, fields[6]); err == nil && time.Since(since) < time.Hour {
			fields[6] = "now"
		}
		got = append(got, strings.Join(fields, " "))
	}
	want := []string{
		"0 " + s.uuids()[0] + " plugin ml - train/main -",
		"1 " + s.uuids()[1] + " dra team claim-1 infer/main now",
		"2 " + s.uuids()[2] + " dra team claim-1 infer/main now",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("claims (-want +got)\n%s", diff)
	}
	if diff := cmp.Diff(devices, s.devices()); diff != "" {
		t.Errorf("devices (-by the plugin +by DRA)\n%s", diff)
	}
	waitFor(t, "the metrics of claims", func() bool {
		page, _ := s.ask("/metrics")
		for _, line := range []string{
			`dra_prepared_claims 1`,
			`dra_requests_total{operation="prepare",result="success"} 1`,
			`dra_requests_total{operation="prepare",result="error"} 1`,
			`dra_request_duration_seconds_count{operation="prepare"} 2`,
			`device_held{container="main",dra_claim_name="claim-1",namespace="team",pod="infer",resource="",uuid="` +
				s.uuids()[1] + `"} 1`,
		} {
			if !strings.Contains(page, "\ngpu_cdi_plugin_"+line+"\n") {
				return false
			}
		}
		return true
	})

	// What a claim holds is known while the kubelet is not.
	s.kubelet.StopPods()
	code, stdout, stderr := s.begin("claims", "--runtime-dir", filepath.Join(s.dir, "run"), "--no-headers").wait()
	if code != 3 || strings.Count(stdout, "\n") != 3 ||
		!strings.Contains(stderr, "it is unknown which containers hold devices: ") {
		t.Errorf("without the kubelet: exit %d, %q and %q", code, stdout, stderr)
	}
}

// A serve that leaves offers nothing by any door, and unprepares the claims of an earlier one.
func TestServeLeaves(t *testing.T) {
	t.Parallel()
	s := newClaimed(t, "pcie-quad", "")
	s.api.SetAllocatable(map[string]string{gpuResource: "2"})
	s.restart("both\ndra-gpus: [2, 3]")
	s.kubelet.WaitListed(gpuResource, 2, 0)
	s.published("2", "3")
	s.prepare(1, 2)
	s.kubelet.Pods.Set(
		kubelettest.Pod("ml", "train", "main", gpuResource, s.uuids()[0]),
		kubelettest.PodWithClaim("team", "infer", "main", "claim-1", strings.ToLower(s.uuids()[2])),
	)

	s.restart("both\ndra-gpus: [2, 3]\nleave: unused\nlisten: 127.0.0.1:0")
	s.kubelet.WaitListed(gpuResource, 0, 0)
	s.published()
	container, claim := "container main of pod ml/train ("+s.uuids()[0]+")",
		"ResourceClaim team/claim-1 of pod team/infer ("+s.uuids()[2]+")"
	s.logs("no devices are offered any more, and this program waits: these have devices, so end their pods: " + claim +
		", " + container)
	if body, status := s.ask("/readyz"); status == http.StatusOK || !strings.Contains(body, claim+", "+container) {
		t.Errorf("/readyz answers %d, %s", status, body)
	}
	s.offered("nvidia.com/gpu="+s.uuids()[0], "nvidia.com/gpu="+s.uuids()[2])
	s.kubelet.Pods.Set(kubelettest.Pod("ml", "train", "main", gpuResource, s.uuids()[0]))
	s.unprepare(1)
	s.logs("so end their pods: " + container)
	if err := s.end(syscall.SIGTERM); err == nil {
		t.Error("it ended well before the devices were free, so that the node would be cleaned up")
	}
}

func TestServeLeavesWhenNobodyHasADevice(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "leave: unused")
	s.start()
	s.kubelet.WaitListed(gpuResource, 0, 0)
	if err := s.ended(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	s.logs("no container and no ResourceClaim has a device any more: this program ends")
	s.offered("nvidia.com/gpu=" + s.uuids()[0])
}
