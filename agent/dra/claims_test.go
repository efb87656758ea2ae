package dra

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/testing/protocmp"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/agent/apiserver"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/apiservertest"
	"gpu-cdi-plugin/test/lib/testenv"
)

var _ Ledger = (*ledger.Ledger)(nil)

// fakeLedger is a ledger of claims. It also knows the devices of pods of the device plugin.
type fakeLedger struct {
	mu     sync.Mutex
	pods   map[string]string           // the holders by UUID
	claims map[string][]ledger.Portion // by UID
	passes bool                        // whether TakeClaim waits

	used    bool  // whether a claim is not abandoned
	unknown error // the error of IsAbandoned
}

func newFakeLedger() *fakeLedger {
	return &fakeLedger{pods: map[string]string{}, claims: map[string][]ledger.Portion{}}
}

func (l *fakeLedger) TakeClaim(ctx context.Context, c ledger.Claim) error {
	for {
		err := l.take(c)
		if err == nil || !l.passes {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(time.Millisecond):
		}
	}
}

func (l *fakeLedger) take(c ledger.Claim) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	portions := slices.DeleteFunc(slices.Clone(c.Portions), func(p ledger.Portion) bool { return p.Admin })
	for _, p := range portions {
		if pod := l.pods[p.Device.UUID]; pod != "" {
			return fmt.Errorf("%s: %s holds it", p.Device.UUID, pod)
		}
		for other, theirs := range l.claims {
			if other != c.UID && slices.ContainsFunc(theirs, func(o ledger.Portion) bool {
				return o.Device.UUID == p.Device.UUID && (o.Memory == 0 || p.Memory == 0)
			}) {
				return fmt.Errorf("%s: the claim %s holds it", p.Device.UUID, other)
			}
		}
	}
	l.claims[c.UID] = portions
	return nil
}

func (l *fakeLedger) RestoreClaim(c ledger.Claim, _ time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.claims[c.UID] = slices.DeleteFunc(slices.Clone(c.Portions), func(p ledger.Portion) bool { return p.Admin })
}

// IsAbandoned implements Ledger.
func (l *fakeLedger) IsAbandoned(uid string) (bool, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.used && l.unknown == nil, l.unknown
}

func (l *fakeLedger) DropClaim(uid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.claims, uid)
}

// LoseRecord implements Ledger.
func (l *fakeLedger) LoseRecord(uid string) { l.DropClaim(uid) }

// held returns the devices that claims have, such as "GPU-0" or "GPU-0 1024" for a share of 1024 bytes.
func (l *fakeLedger) held() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var list []string
	for _, portions := range l.claims {
		for _, p := range portions {
			text := p.Device.UUID
			if p.Memory > 0 {
				text += fmt.Sprint(" ", p.Memory)
			}
			list = append(list, text)
		}
	}
	slices.Sort(list)
	return list
}

// claimNode is a node with a DRA driver, an API server and a kubelet's directory.
type claimNode struct {
	t      testing.TB
	server *apiservertest.Server
	ledger *fakeLedger
	root   string
	state  *node.State

	driver   *Driver
	preStart func(resourceName string, devices []*resource.Device, wish PreStart) error
	leaving  bool // see Options
	beside   bool // see Options
	patience time.Duration
	stop     func()
	log      *testenv.Log
	observed observed
	conn     *grpc.ClientConn
}

// newClaimNode returns a node with so many GPUs, whose driver runs.
func newClaimNode(t testing.TB, gpus int) *claimNode {
	t.Helper()
	root, err := os.MkdirTemp("", "dra") //nolint:usetesting // t.TempDir may be too long for the path of a socket
	testenv.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	n := &claimNode{
		t: t, server: apiservertest.New(t), root: root, state: nodeOf(t, gpus),
		ledger:   newFakeLedger(),
		patience: 50 * time.Millisecond,
		preStart: func(string, []*resource.Device, PreStart) error { return nil },
	}
	testenv.Must(t, os.Mkdir(filepath.Join(root, "registry"), 0o755))
	for i := range n.state.Resources {
		r := &n.state.Resources[i]
		r.Grant = &resource.Grant{CDIDevices: []string{"nvidia.com/gds=all"}}
		for j := range r.Devices {
			r.Devices[j].Grant = &resource.Grant{CDIDevices: []string{"nvidia.com/gpu=" + r.Devices[j].UUID}}
		}
	}
	n.boot("boot-1")
	n.start()
	n.publish()
	return n
}

// boot sets the kernel's boot ID.
func (n *claimNode) boot(id string) {
	dir := filepath.Join(n.root, "proc/sys/kernel/random")
	testenv.Must(n.t, os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "boot_id"), []byte(id+"\n"), 0o600))
}

func (n *claimNode) records() string { return filepath.Join(n.root, "claims") }

// start starts a new process of the driver, which knows nothing but the files.
func (n *claimNode) start() {
	n.t.Helper()
	if n.stop != nil {
		n.stop()
		n.ledger.mu.Lock()
		clear(n.ledger.claims)
		n.ledger.mu.Unlock()
	}
	h, err := host.New(n.root, "", "")
	testenv.Must(n.t, err)
	api, err := apiserver.New(apiserver.Options{
		Credentials: n.server.Dir, Env: n.server.Env(), Timeout: 10 * time.Second, KeepIdle: time.Minute,
	})
	testenv.Must(n.t, err)
	n.log = &testenv.Log{}
	n.driver = New(Options{
		Name: DefaultDriver, API: api, Host: h, Records: n.records(), RegistryDir: filepath.Join(n.root, "registry"),
		Ledger: n.ledger, Log: slog.New(slog.NewTextHandler(n.log, nil)),
		Changed: func() {}, Observer: &n.observed,
		Leaving: n.leaving, Beside: n.beside,
		Resets: func(_ string, wish PreStart) bool { return wish.Policy == "reset" },
		PreStart: func(_ context.Context, resourceName string, devices []*resource.Device, wish PreStart) error {
			return n.preStart(resourceName, devices, wish)
		},
	})
	n.driver.least, n.driver.claims.patience = 0, n.patience
	testenv.Must(n.t, n.driver.Restore(n.t.Context()))
	stopPublisher, stopServer := run(n.t, n.driver.Run), run(n.t, n.driver.Serve)
	n.stop = func() { stopPublisher(); stopServer() }
	n.conn, err = grpc.NewClient("unix:"+n.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(n.t, err)
	n.t.Cleanup(func() { _ = n.conn.Close() })
}

// publish publishes the state, and offers all of its devices.
func (n *claimNode) publish() { n.driver.Publish(*n.state, Offer{Resources: n.state.Resources}) }

func (n *claimNode) socket() string {
	name := DefaultDriver + "-reg.sock"
	if n.beside {
		name = DefaultDriver + "-reg-2.sock"
	}
	return filepath.Join(n.root, "registry", name)
}

// remove removes a claim from the API server.
func (n *claimNode) remove(i int) { n.server.SetClaim("team", fmt.Sprint("claim-", i), nil) }

// uid returns the UID of the claim with a number.
func uid(i int) string { return fmt.Sprintf("00000000-0000-0000-0000-%012d", i) }

// named is the claim with a number, as the kubelet names it.
func named(i int) *drav1.Claim {
	return &drav1.Claim{Namespace: "team", Name: fmt.Sprint("claim-", i), Uid: uid(i)}
}

// allocate stores the claim with a number, to which the scheduler gave devices.
func (n *claimNode) allocate(i int, results ...map[string]any) {
	for _, r := range results {
		for key, value := range map[string]any{"request": "gpus", "driver": DefaultDriver, "pool": apiservertest.Node} {
			if r[key] == nil {
				r[key] = value
			}
		}
	}
	n.server.SetClaim("team", named(i).GetName(), map[string]any{
		"metadata": map[string]any{"name": named(i).GetName(), "uid": uid(i)},
		"status":   map[string]any{"allocation": map[string]any{"devices": map[string]any{"results": results}}},
	})
}

func device(name string) map[string]any { return map[string]any{"device": name} }

// configure adds configurations to the claim with a number.
func (n *claimNode) configure(i int, configs ...map[string]any) {
	n.server.ChangeClaim("team", named(i).GetName(), func(claim map[string]any) {
		allocation := claim["status"].(map[string]any)["allocation"].(map[string]any)
		allocation["devices"].(map[string]any)["config"] = configs
	})
}

// policyOf is a configuration with a policy for requests.
func policyOf(source, policy string, requests ...string) map[string]any {
	return map[string]any{"source": source, "requests": requests, "opaque": map[string]any{
		"driver": DefaultDriver, "parameters": map[string]any{
			"apiVersion": "gpu-cdi-plugin/v1", "kind": "GPUConfig", "prestart": map[string]any{"policy": policy},
		},
	}}
}

// share is a share of a device, as the scheduler gives it.
func share(i int, name, memory string) map[string]any {
	return map[string]any{"device": name, "shareID": uid(i), "consumedCapacity": map[string]any{"memory": memory}}
}

func (n *claimNode) prepare(list ...*drav1.Claim) map[string]*drav1.NodePrepareResourceResponse {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Minute)
	defer cancel()
	answer, err := drav1.NewDRAPluginClient(n.conn).NodePrepareResources(
		ctx, &drav1.NodePrepareResourcesRequest{Claims: list}, grpc.WaitForReady(true))
	testenv.Must(n.t, err)
	return answer.GetClaims()
}

// mustPrepare prepares a claim and returns the names of its devices.
func (n *claimNode) mustPrepare(i int) []string {
	n.t.Helper()
	answer := n.prepare(named(i))[uid(i)]
	if answer.GetError() != "" || len(answer.GetDevices()) == 0 {
		n.t.Fatalf("claim %d: %v", i, answer)
	}
	var names []string
	for _, d := range answer.GetDevices() {
		names = append(names, d.GetDeviceName())
	}
	return names
}

func (n *claimNode) unprepare(i int) string {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), time.Minute)
	defer cancel()
	answer, err := drav1.NewDRAPluginClient(n.conn).NodeUnprepareResources(ctx,
		&drav1.NodeUnprepareResourcesRequest{Claims: []*drav1.Claim{named(i)}}, grpc.WaitForReady(true))
	testenv.Must(n.t, err)
	if len(answer.GetClaims()) != 1 || answer.GetClaims()[uid(i)] == nil {
		n.t.Fatalf("claim %d is not in the answer: %v", i, answer)
	}
	return answer.GetClaims()[uid(i)].GetError()
}

func (n *claimNode) wantHeld(uuids ...string) {
	n.t.Helper()
	if diff := cmp.Diff(uuids, n.ledger.held()); diff != "" {
		n.t.Errorf("held (-want +got)\n%s", diff)
	}
}

func TestAKubeletRegistersTheDriver(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 2)
	kubelet := pluginregistration.NewRegistrationClient(n.conn)
	info, err := kubelet.GetInfo(t.Context(), &pluginregistration.InfoRequest{}, grpc.WaitForReady(true))
	testenv.Must(t, err)
	want := &pluginregistration.PluginInfo{
		Type: "DRAPlugin", Name: "gpu.nvidia.com", Endpoint: n.socket(),
		SupportedVersions: []string{"v1.DRAPlugin", "v1.DRAResourceHealth"},
	}
	if diff := cmp.Diff(want, info, protocmp.Transform()); diff != "" {
		t.Errorf("the driver's info (-want +got)\n%s", diff)
	}
	awaitPublished(t, n.server, slicesOf(n.state))
	notReady := func(part string) func() bool {
		return func() bool {
			err := n.driver.Ready()
			return err != nil && strings.Contains(err.Error(), part) && strings.Contains(n.driver.Summary(), part)
		}
	}
	notify := func(s *pluginregistration.RegistrationStatus) {
		_, err := kubelet.NotifyRegistrationStatus(t.Context(), s)
		testenv.Must(t, err)
	}
	testenv.Eventually(t, "the driver is not registered yet", notReady("the kubelet has not found its socket yet"))
	notify(&pluginregistration.RegistrationStatus{Error: "no room"})
	testenv.Eventually(t, "the refusal", notReady("the kubelet refused the registration: no room"))
	notify(&pluginregistration.RegistrationStatus{PluginRegistered: true})
	testenv.Eventually(t, "readiness", func() bool { return n.driver.Ready() == nil })
	if got := n.driver.Summary(); got != "gpu.nvidia.com: 2 devices offered, 0 claims prepared" {
		t.Error(got)
	}
	n.stop()
	if _, err := os.Lstat(n.socket()); err == nil {
		t.Error("the socket is left")
	}
	awaitPublished(t, n.server, slicesOf(n.state))
}

func TestTheSocketComesBack(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 1)
	n.allocate(1, device("gpu-0"))
	n.mustPrepare(1)
	testenv.Must(t, os.Remove(n.socket()))
	testenv.Eventually(t, "the socket is back", func() bool {
		_, err := os.Lstat(n.socket())
		return err == nil
	})
	n.mustPrepare(1)
	// Another instance does not take the socket.
	err := newSocket(filepath.Dir(n.socket()), DefaultDriver, false, slog.New(slog.DiscardHandler)).run(t.Context())
	if !errors.Is(err, fileio.ErrHeld) {
		t.Errorf("a second instance ends with %v", err)
	}
}

func TestPrepareAndUnprepare(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 3)
	n.allocate(1, device("gpu-2"), map[string]any{"device": "other", "driver": "nic.example.com", "request": "nics"},
		map[string]any{
			"device": "gpu-0", "request": "more/second", "shareID": uid(9),
			"consumedCapacity": map[string]any{"memory": "20Gi"},
		})
	share := uid(9)
	want := map[string]*drav1.NodePrepareResourceResponse{uid(1): {Devices: []*drav1.Device{
		{
			RequestNames: []string{"gpus"}, PoolName: "gpu-node-1", DeviceName: "gpu-2",
			CdiDeviceIds: []string{"nvidia.com/gds=all", "nvidia.com/gpu=GPU-2"},
		},
		{
			RequestNames: []string{"more"}, PoolName: "gpu-node-1", DeviceName: "gpu-0", ShareId: &share,
			CdiDeviceIds: []string{"nvidia.com/gds=all", "nvidia.com/gpu=GPU-0"},
		},
	}}}
	if diff := cmp.Diff(want, n.prepare(named(1)), protocmp.Transform()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	n.wantHeld("GPU-0 21474836480", "GPU-2")
	// The kubelet calls again, also when the API server is away or the claim is about to be deleted.
	n.server.SetClaim("team", "claim-1", nil)
	if diff := cmp.Diff(want, n.prepare(named(1)), protocmp.Transform()); diff != "" {
		t.Errorf("again (-want +got)\n%s", diff)
	}
	for range 2 {
		if text := n.unprepare(1); text != "" {
			t.Errorf("unprepare: %s", text)
		}
		n.wantHeld()
	}
	if left, err := filepath.Glob(n.records() + "/*.json"); err != nil || len(left) > 0 {
		t.Errorf("records are left: %v, %v", left, err)
	}
}

// A claim that cannot be prepared says why, and the others of the call are prepared.
func TestABadClaimFailsAlone(t *testing.T) {
	t.Parallel()
	const xid = "XID 79 (GPU has fallen off the bus)"
	for name, c := range map[string]struct {
		arrange func(*claimNode)
		want    string
	}{
		"a claim that is gone": {func(*claimNode) {}, `resourceclaims.resource.k8s.io "claim-1" not found`},
		"another claim of the same name": {func(n *claimNode) {
			n.server.SetClaim("team", "claim-1", map[string]any{"metadata": map[string]any{"uid": uid(7)}})
		}, "it was deleted: the claim of this name has the UID " + uid(7)},
		"a claim that is not allocated": {func(n *claimNode) {
			n.server.SetClaim("team", "claim-1", map[string]any{"metadata": map[string]any{"uid": uid(1)}})
		}, "it is not allocated"},
		"a configuration for another driver's type": {func(n *claimNode) {
			n.allocate(1, device("gpu-1"))
			n.configure(1, map[string]any{"opaque": map[string]any{"driver": DefaultDriver, "parameters": map[string]any{
				"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": map[string]any{},
			}}})
		}, "its configuration for gpu.nvidia.com: " +
			`its apiVersion is "resource.nvidia.com/v1beta1" and its kind "GpuConfig", want gpu-cdi-plugin/v1 and GPUConfig`},
		"two policies for a device": {func(n *claimNode) {
			n.allocate(1, device("gpu-1"))
			n.configure(1, policyOf("FromClaim", "check"), policyOf("FromClaim", "clean", "gpus"))
		}, "its configuration has prestart.policy twice for the request gpus: check and clean"},
		"a device of another node": {
			func(n *claimNode) { n.allocate(1, map[string]any{"device": "gpu-1", "pool": "gpu-node-2"}) },
			"its device gpu-1 belongs to the pool gpu-node-2",
		},
		"a device of another driver": {
			func(n *claimNode) { n.allocate(1, map[string]any{"device": "gpu-1", "driver": "other"}) },
			"it has no device of the driver gpu.nvidia.com",
		},
		"a device that does not exist": {
			func(n *claimNode) { n.allocate(1, device("gpu-9")) }, "the node has no device gpu-9 any more",
		},
		"an unhealthy device": {func(n *claimNode) {
			n.allocate(1, device("gpu-1"))
			n.setHealth(1, health.Unhealthy, xid)
		}, "GPU 1 (GPU-1) is not ready for a container: " + xid},
		"a taint that the claim does not tolerate": {func(n *claimNode) {
			n.allocate(1, map[string]any{
				"device": "gpu-1", "tolerations": []map[string]any{{"key": "gpu.nvidia.com/suspect", "operator": "Exists"}},
			})
			n.setHealth(1, health.Unhealthy, xid)
		}, "is not ready for a container: " + xid},
		"a device of a pod": {func(n *claimNode) {
			n.allocate(1, device("gpu-1"))
			n.ledger.pods["GPU-1"] = "team/old"
		}, "GPU-1: team/old holds it"},
		"a device of another claim": {func(n *claimNode) {
			n.allocate(3, device("gpu-1"))
			n.mustPrepare(3)
			n.allocate(1, device("gpu-0"), device("gpu-1"))
		}, "GPU-1: the claim " + uid(3) + " holds it"},
		"a share without an amount of memory": {func(n *claimNode) {
			n.allocate(1, map[string]any{"device": "gpu-1", "shareID": uid(8)})
		}, `read how much memory of the device gpu-1 it has: "" is no whole number of bytes`},
		"a share of nothing": {func(n *claimNode) {
			n.allocate(1, share(8, "gpu-1", "0"))
		}, "read how much memory of the device gpu-1 it has: it is 0"},
		"a share of a device that another claim has": {func(n *claimNode) {
			n.allocate(3, device("gpu-1"))
			n.mustPrepare(3)
			n.allocate(1, share(8, "gpu-1", "1Gi"))
		}, "GPU-1: the claim " + uid(3) + " holds it"},
		"a device that MPS shares": {func(n *claimNode) {
			n.allocate(1, device("gpu-1"))
			n.state.Resources[0].Devices[1].MPS = &resource.MPSLimits{}
			n.publish()
		}, "GPU 1 is not offered by DRA any more: it is shared by MPS, whose limits claims cannot get"},
		"a huge name of a device": {
			func(n *claimNode) { n.allocate(1, device(strings.Repeat("x", 1<<20))) },
			"the device of one of its devices has 1048576 bytes, more than 63",
		},
		"a huge name of a request": {func(n *claimNode) {
			n.allocate(1, map[string]any{"device": "gpu-1", "request": strings.Repeat("x", 1<<20)})
		}, "the request of one of its devices has 1048576 bytes, more than 127"},
		"a huge name of a pool": {func(n *claimNode) {
			n.allocate(1, map[string]any{"device": "gpu-1", "pool": strings.Repeat("x", 1<<20)})
		}, "the pool of one of its devices has 1048576 bytes, more than 253"},
		"a huge amount of memory": {func(n *claimNode) {
			n.allocate(1, share(8, "gpu-1", strings.Repeat("1", 100_000)))
		}, "the consumedCapacity of one of its devices has 100000 bytes, more than 64"},
		"a huge number in the place of a text": {func(n *claimNode) {
			n.allocate(1, map[string]any{"device": json.Number(strings.Repeat("1", 100_000))})
		}, "json: cannot unmarshal number"},
		"very many devices": {func(n *claimNode) {
			n.allocate(1, slices.Repeat([]map[string]any{device("gpu-1")}, maxItems+1)...)
		}, "a list has more than 1000 items"},
		"very many tolerations": {func(n *claimNode) {
			n.allocate(1, map[string]any{"device": "gpu-1", "tolerations": make([]struct{}, maxItems+1)})
		}, "a list has more than 1000 items"},
		"very many pods": {func(n *claimNode) {
			n.server.SetClaim("team", "claim-1", map[string]any{"status": map[string]any{
				"reservedFor": make([]struct{}, maxItems+1),
			}})
		}, "a list has more than 1000 items"},
		"a long type of a configuration": {func(n *claimNode) {
			n.allocate(1, device("gpu-1"))
			n.configure(1, map[string]any{"opaque": map[string]any{"driver": DefaultDriver, "parameters": map[string]any{
				"kind": strings.Repeat("x", 10_000),
			}}})
		}, `and its kind "xxx`},
		"a long policy": {func(n *claimNode) {
			n.allocate(1, device("gpu-1"))
			n.configure(1, policyOf("FromClaim", strings.Repeat("x", 10_000)))
		}, `prestart.policy is "xxx`},
		"a disk that is full": {func(n *claimNode) {
			n.allocate(1, device("gpu-1"))
			testenv.Must(n.t, os.Mkdir(recordPath(n.records(), uid(1)), 0o755))
		}, "record it: write "},
		"an API server that refuses": {func(n *claimNode) {
			n.server.SetClaim("team", "claim-1", "text")
		}, "read it: read the API server's answer"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newClaimNode(t, 3)
			c.arrange(n)
			n.allocate(2, device("gpu-2"))
			before := n.ledger.held()
			answer := n.prepare(named(1), named(2))
			got := answer[uid(1)]
			if !strings.Contains(got.GetError(), c.want) || len(got.GetDevices()) > 0 || len(got.GetError()) > 2<<10 {
				t.Errorf("%.2000v, want an error with %q and less than 2 KiB", got, c.want)
			}
			if got := answer[uid(2)]; got.GetError() != "" || len(got.GetDevices()) != 1 {
				t.Errorf("the other claim: %v", got)
			}
			n.wantHeld(append(before, "GPU-2")...)
			if !strings.Contains(n.log.String(), "ResourceClaim team/claim-1 is not prepared: ") {
				t.Errorf("the log:\n%s", n.log)
			}
		})
	}
}

// setHealth publishes another health of a GPU.
func (n *claimNode) setHealth(i int, state health.State, reason string) {
	s := *n.state
	s.Resources = resource.MarkUnhealthy(s.Resources, func(d *resource.Device) string {
		if d.Index == i {
			return reason
		}
		return ""
	})
	uuid := fmt.Sprint("GPU-", i)
	s.Health = map[string]health.Status{uuid: {UUID: uuid, State: state, Reason: reason}}
	n.driver.Publish(s, Offer{Resources: s.Resources})
}

func TestClaimsThatMayHaveAnUnhealthyDevice(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]map[string]any{
		"one that tolerates its taint": {
			"tolerations": []map[string]any{{"key": "gpu.nvidia.com/unhealthy", "operator": "Exists", "effect": "NoSchedule"}},
		},
		"one that tolerates its reason": {
			"tolerations": []map[string]any{{"key": "gpu.nvidia.com/unhealthy", "operator": "Equal", "value": "XID-79"}},
		},
		"one that tolerates all taints": {"tolerations": []map[string]any{{"operator": "Exists"}}},
		"one with admin access":         {"adminAccess": true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newClaimNode(t, 1)
			n.setHealth(0, health.Unhealthy, "XID 79")
			c["device"] = "gpu-0"
			n.allocate(1, c)
			n.mustPrepare(1)
		})
	}
}

// Claims with admin access monitor devices that others use.
func TestAdminAccessHoldsNothing(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 1)
	for i := range 2 {
		n.allocate(i, map[string]any{"device": "gpu-0", "adminAccess": true})
		n.mustPrepare(i)
	}
	n.wantHeld()
	n.allocate(2, device("gpu-0"))
	n.mustPrepare(2)
	n.wantHeld("GPU-0")
}

// Several claims have shares of a device, and one claim can have two. A restart keeps them.
func TestShares(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 2)
	n.allocate(1, share(11, "gpu-0", "20Gi"))
	n.allocate(2, share(12, "gpu-0", "30Gi"), share(13, "gpu-0", "1Mi"), device("gpu-1"))
	var prepared []string
	n.preStart = func(_ string, devices []*resource.Device, _ PreStart) error {
		for _, d := range devices {
			prepared = append(prepared, fmt.Sprintf("%s, shared: %t", d.UUID, d.Shared()))
		}
		return nil
	}
	n.mustPrepare(1)
	answer := n.prepare(named(2))[uid(2)]
	var shares []string
	for _, d := range answer.GetDevices() {
		shares = append(shares, d.GetDeviceName()+" "+d.GetShareId())
	}
	want := []string{"gpu-0 " + uid(12), "gpu-0 " + uid(13), "gpu-1 "}
	if diff := cmp.Diff(want, shares); diff != "" {
		t.Errorf("the shares in the answer (-want +got)\n%s\n%v", diff, answer)
	}
	// The state does not say that GPU 0 is shared: the configuration has changed since the scheduler gave the shares.
	want = []string{"GPU-0, shared: true", "GPU-0, shared: true", "GPU-0, shared: true", "GPU-1, shared: false"}
	if diff := cmp.Diff(want, prepared); diff != "" {
		t.Errorf("prepared (-want +got)\n%s", diff)
	}
	held := []string{"GPU-0 1048576", "GPU-0 21474836480", "GPU-0 32212254720", "GPU-1"}
	n.wantHeld(held...)
	n.start()
	n.publish()
	n.wantHeld(held...)
	if text := n.unprepare(2); text != "" {
		t.Error(text)
	}
	n.wantHeld("GPU-0 21474836480")
}

func TestARestartKeepsClaims(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 3)
	for i := range 2 {
		n.allocate(i, device(fmt.Sprint("gpu-", i)))
		n.mustPrepare(i)
	}
	n.ledger.used = true // so that the claim stays when it is gone below
	n.start()
	n.wantHeld("GPU-0", "GPU-1")
	if answer := n.prepare(named(0))[uid(0)]; answer.GetError() != "the GPUs have not been read yet" {
		t.Errorf("before the first state: %v", answer)
	}
	n.publish()
	n.server.SetClaim("team", "claim-0", nil)
	n.mustPrepare(0)
	n.allocate(5, device("gpu-1"))
	if answer := n.prepare(named(5))[uid(5)]; !strings.Contains(answer.GetError(), "GPU-1: the claim "+uid(1)) {
		t.Errorf("a device that is held: %v", answer)
	}
	if text := n.unprepare(1); text != "" {
		t.Error(text)
	}
	n.mustPrepare(5)
}

// After a reboot the kubelet prepares the claims of its pods again. Until then they keep their devices.
func TestAReboot(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 2)
	n.allocate(1, device("gpu-1"))
	n.mustPrepare(1)
	n.boot("boot-2")
	n.start()
	n.publish()
	n.wantHeld("GPU-1")
	n.allocate(2, device("gpu-1"))
	if answer := n.prepare(named(2))[uid(2)]; !strings.Contains(answer.GetError(), "GPU-1: the claim "+uid(1)) {
		t.Errorf("another claim gets the device: %v", answer)
	}
	prepares := n.preStart
	n.preStart = func(string, []*resource.Device, PreStart) error { return errors.New("it is in use") }
	if answer := n.prepare(named(1))[uid(1)]; answer.GetError() != "it is in use" {
		t.Errorf("a device that cannot be prepared: %v", answer)
	}
	n.wantHeld("GPU-1")
	n.preStart = prepares
	n.allocate(1, device("gpu-0")) // the API server decides, not the record
	if got := n.mustPrepare(1); !slices.Equal(got, []string{"gpu-0"}) {
		t.Errorf("devices %v", got)
	}
	n.start()
	n.wantHeld("GPU-0")
}

func TestRemarksAboutClaims(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 2)
	for i := range 2 {
		n.allocate(i, device(fmt.Sprint("gpu-", i)))
		n.mustPrepare(i)
	}
	testenv.Must(t, os.WriteFile(recordPath(n.records(), uid(0)), []byte(`{"version":`), 0o600),
		os.WriteFile(filepath.Join(n.records(), "notes.json"), []byte(`x`), 0o600))
	n.start()
	n.wantHeld("GPU-1") // what the other one has, the kubelet says
	one := nodeOf(t, 1) // GPU 1 is gone
	n.driver.Publish(*one, Offer{Resources: one.Resources})
	texts := func() []string {
		var list []string
		for _, r := range n.driver.claims.remarks() {
			list = append(list, r.Text)
		}
		return list
	}
	want := []string{
		"it is unknown which devices the claim with the UID " + uid(0) +
			" has, since its record cannot be read: unexpected EOF",
		"ResourceClaim team/claim-1 has GPU-1, which the node does not offer any more",
	}
	if diff := cmp.Diff(want, texts()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	if answer := n.prepare(named(1))[uid(1)]; answer.GetError() != "the node has no device gpu-1 any more" {
		t.Errorf("a claim whose device is gone: %v", answer)
	}
	for i := range 2 {
		if text := n.unprepare(i); text != "" {
			t.Error(text)
		}
	}
	if got := texts(); got != nil {
		t.Errorf("remarks are left: %v", got)
	}
}

// A UID is part of a file's name.
func TestUIDsThatAreNone(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 1)
	for _, bad := range []string{"", "../../etc/x", strings.ToUpper("abcdef00-0000-0000-0000-000000000000")} {
		answer := n.prepare(&drav1.Claim{Namespace: "team", Name: "x", Uid: bad})
		if text := answer[bad].GetError(); !strings.Contains(text, "is no UID") {
			t.Errorf("%q: %q", bad, text)
		}
	}
}

// Two pods that share a claim start at the same time, and other claims do not wait for a slow one.
func TestConcurrentCalls(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 8)
	var list []*drav1.Claim
	for i := range 8 {
		n.allocate(i, device(fmt.Sprint("gpu-", i)))
		list = append(list, named(i))
	}
	unlock, err := n.driver.claims.lock(t.Context(), uid(0))
	testenv.Must(t, err)
	var calls sync.WaitGroup
	for range 4 {
		calls.Go(func() {
			for id, answer := range n.prepare(list...) {
				if answer.GetError() != "" || len(answer.GetDevices()) != 1 {
					t.Errorf("%s: %v", id, answer)
				}
			}
		})
	}
	testenv.Eventually(t, "the others are prepared", func() bool { return len(n.ledger.held()) == 7 })
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := n.driver.claims.lock(short, uid(0)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the lock is not bounded: %v", err)
	}
	unlock()
	calls.Wait()
	if got := strings.Count(n.log.String(), "is prepared"); got != 8 {
		t.Errorf("%d claims were prepared, want each once", got)
	}
}

func FuzzParseRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"uid":"u","devices":[{"device":"gpu-0","uuid":"GPU-0"}]}`))
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := parseRecord(data, "u")
		if (r == nil) == (err == nil) {
			t.Fatalf("%v and the error %v, want exactly one", r, err)
		}
		if err == nil && (r.Version != 1 || r.UID != "u") {
			t.Errorf("accepted %+v", r)
		}
	})
}

func TestRecordsThatAreNone(t *testing.T) {
	for data, want := range map[string]string{
		"":                          "EOF",
		`{"version":1,"uid":"x"}`:   `it is the record of the claim "x"`,
		`{"version":2,"uid":"u"}`:   "its version is 2, not 1",
		`{"version":1,"more":true}`: `unknown field "more"`,
		`{"version":1,"uid":"u"}{}`: "there is more after the record",
		`{"version":1,"uid":"u","devices":[{"device":"gpu-0"}]}`: "it has a device without a name or UUID",
	} {
		if _, err := parseRecord([]byte(data), "u"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with %q", data, err, want)
		}
	}
}

// The time of Prepare with its record on disk, and without the request to the API server.
func BenchmarkPrepare(b *testing.B) {
	n := newClaimNode(b, 1)
	n.allocate(1, device("gpu-0"))
	read := &claim{}
	testenv.Must(b, n.driver.claims.api.Get(b.Context(), apiPath+"/namespaces/team/resourceclaims/claim-1", read))
	state, _ := n.driver.claims.state.get()
	for b.Loop() {
		list, err := read.devices(uid(1), n.driver.id, state)
		testenv.Must(b, err)
		_, err = n.driver.claims.give(b.Context(), b.Context(), n.driver.claims.newRecord(named(1), nil), list, state)
		testenv.Must(b, err)
	}
}

// The time in which eight claims of eight GPUs are prepared by calls over the socket, with the request to an API server
// in the same process. At once should be no slower than one after the other. The floor is eight files that are written
// and synced one after the other.
func BenchmarkPrepareEight(b *testing.B) {
	n := newClaimNode(b, 8)
	var list []*drav1.Claim
	for i := range 8 {
		n.allocate(i, device(fmt.Sprint("gpu-", i)))
		list = append(list, named(i))
	}
	prepare := func(list ...*drav1.Claim) {
		for id, answer := range n.prepare(list...) {
			if answer.GetError() != "" {
				b.Errorf("%s: %s", id, answer.GetError())
			}
		}
	}
	for _, way := range []struct {
		name string
		run  func()
	}{
		{"one after the other", func() {
			for _, k := range list {
				prepare(k)
			}
		}},
		{"in one call", func() { prepare(list...) }},
		{"in eight calls at once", func() {
			var calls sync.WaitGroup
			for _, k := range list {
				calls.Go(func() { prepare(k) })
			}
			calls.Wait()
		}},
		{"floor", func() {
			for i := range list {
				f, err := os.Create(filepath.Join(n.root, fmt.Sprint("floor-", i)))
				testenv.Must(b, err)
				_, err = f.Write(make([]byte, 512))
				testenv.Must(b, err, f.Sync(), f.Close())
			}
		}},
	} {
		b.Run(way.name, func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				for i := range list {
					_ = n.unprepare(i)
					_ = os.Remove(filepath.Join(n.root, fmt.Sprint("floor-", i)))
				}
				b.StartTimer()
				way.run()
			}
		})
	}
}

// As for a container of the device plugin, the policy of the resource decides.
func TestDevicesArePreparedBeforeTheirClaim(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 3)
	var mu sync.Mutex
	var prepared []string
	refuse := ""
	n.preStart = func(resourceName string, devices []*resource.Device, _ PreStart) error {
		mu.Lock()
		defer mu.Unlock()
		for _, d := range devices {
			if d.UUID == refuse {
				return errors.New(refuse + " is in use by process 42")
			}
			prepared = append(prepared, resourceName+" "+d.UUID)
		}
		return nil
	}
	n.allocate(1, device("gpu-0"), device("gpu-1"))
	n.mustPrepare(1)
	n.mustPrepare(1) // a running container has them
	want := []string{"nvidia.com/gpu GPU-0", "nvidia.com/gpu GPU-1"}
	if diff := cmp.Diff(want, prepared); diff != "" {
		t.Errorf("prepared (-want +got)\n%s", diff)
	}

	refuse = "GPU-2"
	n.allocate(2, device("gpu-2"))
	if answer := n.prepare(named(2))[uid(2)]; answer.GetError() != "GPU-2 is in use by process 42" {
		t.Errorf("a device that cannot be prepared: %v", answer)
	}
	n.wantHeld("GPU-0", "GPU-1")
	if _, err := os.Lstat(recordPath(n.records(), uid(2))); err == nil {
		t.Error("a record is left")
	}
	n.allocate(3, map[string]any{"device": "gpu-2", "adminAccess": true}) // others may have it
	n.mustPrepare(3)

	refuse = ""
	n.mustPrepare(2)
	testenv.Must(t, os.WriteFile(recordPath(n.records(), uid(2)), nil, 0o600))
	n.start()
	refuse = "GPU-2"
	n.prepare(named(2))          // a container may have what it had
	n.wantHeld("GPU-0", "GPU-1") // what the other one had, the kubelet says
	if _, err := os.Lstat(recordPath(n.records(), uid(2))); err != nil {
		t.Error(err)
	}
}

// The DeviceClass sets the policy, and the claim can ask for a more thorough one.
func TestTheConfigurationSaysHowDevicesArePrepared(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 4)
	got := map[string]PreStart{}
	n.preStart = func(_ string, devices []*resource.Device, wish PreStart) error {
		for _, d := range devices {
			got[d.UUID] = wish
		}
		return nil
	}
	var results []map[string]any
	for i, request := range []string{"a", "b/large", "b/small", "c"} {
		results = append(results, map[string]any{"device": fmt.Sprint("gpu-", i), "request": request})
	}
	n.allocate(1, results...)
	n.configure(1, policyOf("FromClass", "reset", "a", "b"), policyOf("FromClaim", "clean", "b/small", "c"),
		map[string]any{"opaque": map[string]any{"driver": "nic.example.com", "parameters": 3}})
	n.mustPrepare(1)
	want := map[string]PreStart{
		"GPU-0": {Policy: "reset"}, "GPU-1": {Policy: "reset"}, "GPU-2": {Policy: "reset", Least: "clean"},
		"GPU-3": {Least: "clean"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// A node that has left DRA serves until no claim has a device, and then nothing shows that it was there.
func TestANodeLeaves(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 2)
	n.allocate(1, device("gpu-0"))
	n.mustPrepare(1)
	n.leaving = true
	n.start()
	if !n.driver.Offered() {
		t.Error("it is unknown that there may be slices")
	}
	n.driver.Publish(*n.state, Offer{})
	awaitPublished(t, n.server, nil)
	n.driver.Leave(t.Context())
	if n.driver.Offered() {
		t.Error("there are slices after it has left")
	}
	n.mustPrepare(1) // the kubelet has started again
	n.allocate(2, device("gpu-1"))
	n.mustPrepare(2) // the scheduler was faster
	for i := range 2 {
		if text := n.unprepare(i + 1); text != "" {
			t.Error(text)
		}
	}
	testenv.Eventually(t, "nothing is left", func() bool {
		_, records := os.Lstat(n.records())
		_, socket := os.Lstat(n.socket())
		return records != nil && socket != nil
	})
}

// While the API server is away, a node waits a while for the deletion of its slices.
func TestANodeLeavesWithoutTheAPIServer(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 1)
	n.leaving = true
	n.server.Instead(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
	n.start()
	n.driver.Publish(*n.state, Offer{})
	begun := time.Now()
	n.driver.Leave(t.Context())
	if took := time.Since(begun); took < withdrawLimit || n.driver.Offered() {
		t.Errorf("it left after %v, and there may be slices: %t", took, n.driver.Offered())
	}
}

// A call that fails costs the pod the kubelet's whole sync period.
func TestPrepareWaitsForWhatPassesByItself(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		before, passes func(*claimNode)
		want           string // the error if it does not pass
	}{
		"a pod that is ending has the device": {
			func(n *claimNode) { n.ledger.passes, n.ledger.pods["GPU-0"] = true, "team/old" },
			func(n *claimNode) {
				n.ledger.mu.Lock()
				defer n.ledger.mu.Unlock()
				delete(n.ledger.pods, "GPU-0")
			}, "GPU-0: team/old holds it",
		},
		"the GPUs have not been read": {
			(*claimNode).start, (*claimNode).publish, "the GPUs have not been read yet",
		},
		"the API server fails": {
			func(n *claimNode) {
				n.server.Instead(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
			},
			func(n *claimNode) { n.server.Instead(nil) }, "answers 500",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newClaimNode(t, 1)
			n.allocate(0, device("gpu-0"))
			c.before(n)
			if answer := n.prepare(named(0))[uid(0)]; !strings.Contains(answer.GetError(), c.want) {
				t.Errorf("when the time is over: %v, want an error with %q", answer, c.want)
			}
			n.driver.claims.patience = time.Minute
			answers := make(chan *drav1.NodePrepareResourceResponse)
			go func() { answers <- n.prepare(named(0))[uid(0)] }()
			testenv.Eventually(t, "the call waits", func() bool { return n.driver.claims.isBusy(uid(0)) })
			select {
			case answer := <-answers:
				t.Errorf("it does not wait: %v", answer)
			case <-time.After(10 * time.Millisecond): // a call that does not wait may take longer, and is found at another time
			}
			c.passes(n)
			if answer := <-answers; answer.GetError() != "" {
				t.Errorf("afterwards: %v", answer)
			}
		})
	}
}

// isBusy reports whether a call works on a claim.
func (c *claims) isBusy(uid string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.busy[uid] != nil
}

// A node that was made new does not unprepare the claims that it had.
func TestClaimsThatAreGoneAtTheStart(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		harm  func(*claimNode)
		stays bool
	}{
		"a claim that is there": {harm: func(*claimNode) {}, stays: true},
		"a claim that is gone":  {},
		"another claim has its name": {harm: func(n *claimNode) {
			n.server.SetClaim("team", "claim-0", map[string]any{"metadata": map[string]any{"uid": uid(9)}})
		}},
		"a claim that is gone, and a pod still has the GPU": {
			harm: func(n *claimNode) { n.remove(0); n.ledger.used = true }, stays: true,
		},
		"a claim that is gone, and processes that cannot be seen": {
			harm: func(n *claimNode) { n.remove(0); n.ledger.unknown = errors.New("they cannot be seen") }, stays: true,
		},
		"no answer": {harm: func(n *claimNode) {
			n.server.Instead(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) })
		}, stays: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newClaimNode(t, 2)
			n.allocate(0, device("gpu-0"))
			n.mustPrepare(0)
			if c.harm == nil {
				n.remove(0)
			} else {
				c.harm(n)
			}
			n.start()
			if c.stays {
				ctx, cancel := context.WithTimeout(t.Context(), time.Second) // it asks again without an answer
				defer cancel()
				n.driver.claims.dropGone(ctx)
				n.wantHeld("GPU-0")
				return
			}
			testenv.Eventually(t, "the GPU is free", func() bool { return len(n.ledger.held()) == 0 })
		})
	}
}
