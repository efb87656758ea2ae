package ledger

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	whole  = "nvidia.com/gpu"
	shared = "nvidia.com/gpu.shared"
	driver = "gpu.nvidia.com"
)

// fakeKubelet is a kubelet that answers what a test sets, with the processes of its node.
type fakeKubelet struct {
	mu      sync.Mutex
	holders []podresources.Holder
	err     error
	stopped bool // whether no kubelet runs
	// unwatched says that it does not watch the plugin.
	unwatched bool
	entries   []kubelet.Entry
	names     map[string][]string // RegisteredDevices
	version   uint64              // of the checkpoint; 0: it does not exist
	writes    bool                // whether it writes the checkpoint at a message
	damaged   error               // the error of the checkpoint
	claims    []kubelet.Claim
	pods      []string // that have processes
	partial   bool
	blind     bool
	messages  int // how often the devices were sent again
}

var _ Kubelet = (*fakeKubelet)(nil)

// newKubelet returns a kubelet that has written its checkpoint, and lists containers.
func newKubelet(holders ...podresources.Holder) *fakeKubelet {
	return &fakeKubelet{holders: holders, version: 1, writes: true, names: map[string][]string{}}
}

// List implements Kubelet.
func (k *fakeKubelet) List(context.Context) (podresources.Answer, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stopped {
		return podresources.Answer{}, nil
	}
	if k.err != nil {
		return podresources.Answer{}, k.err
	}
	return podresources.Answer{Holders: slices.Clone(k.holders), Runs: true}, nil
}

// Checkpoint implements Kubelet.
func (k *fakeKubelet) Checkpoint() (*kubelet.Checkpoint, podresources.Version, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.version == 0 {
		return nil, podresources.Version{}, nil
	}
	version := podresources.Version{Inode: k.version}
	if k.damaged != nil {
		return nil, version, k.damaged
	}
	return &kubelet.Checkpoint{PodDeviceEntries: slices.Clone(k.entries), RegisteredDevices: k.names}, version, nil
}

// Claims implements Kubelet.
func (k *fakeKubelet) Claims() ([]kubelet.Claim, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.claims), nil
}

func (k *fakeKubelet) resend() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stopped || k.unwatched {
		return false
	}
	k.messages++
	if k.writes {
		k.version++
	}
	return true
}

func (k *fakeKubelet) running() (proc.Pods, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	pods := proc.Pods{UIDs: map[string]bool{}, Partial: k.partial}
	for _, uid := range k.pods {
		pods.UIDs[uid] = true
	}
	return pods, !k.blind
}

// set changes the kubelet, which writes its checkpoint.
func (k *fakeKubelet) set(change func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	change()
	k.version++
}

// ledger returns a ledger of the kubelet's node. It has not read anything.
func (k *fakeKubelet) ledger() *Ledger {
	return New(Options{
		Kubelet: k, Driver: driver, Resend: k.resend, Pods: k.running, Changed: wake.New(),
		Log: slog.New(slog.DiscardHandler),
	})
}

// refreshed returns a ledger that has refreshed the books twice.
func (k *fakeKubelet) refreshed(t testing.TB) *Ledger {
	t.Helper()
	l := k.ledger()
	refresh(t, l)
	refresh(t, l)
	return l
}

func refresh(t testing.TB, l *Ledger) {
	t.Helper()
	testenv.Must(t, l.refresh(t.Context()))
}

func read(t testing.TB, l *Ledger) {
	t.Helper()
	_, err := l.Read(t.Context())
	testenv.Must(t, err)
}

// soon returns a context in which a call waits for nothing.
func soon(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	t.Cleanup(cancel)
	return ctx
}

// listed returns a container that PodResources lists with devices of a resource.
func listed(pod, resourceName string, ids ...string) podresources.Holder {
	return podresources.Holder{
		Namespace: "default", Pod: pod, Container: "main", Devices: ids,
		ByResource: map[string][]string{resourceName: ids},
	}
}

// recorded returns an entry of the checkpoint. A container is "POD" or "POD/CONTAINER"; the pod's UID is its name.
// The ID of a MIG device can be followed by "@" and its GPU, as the answer to Allocate says it.
func recorded(container, resourceName string, ids ...string) kubelet.Entry {
	pod, name, found := strings.Cut(container, "/")
	if !found {
		name = "main"
	}
	e := kubelet.Entry{PodUID: pod, ContainerName: name, ResourceName: resourceName, DeviceIDs: map[int64][]string{}}
	resp := &v1beta1.ContainerAllocateResponse{Annotations: map[string]string{}}
	for _, id := range ids {
		id, parent, _ := strings.Cut(id, "@")
		if parent != "" {
			resp.Annotations[resource.ParentAnnotation(resource.UUIDOf(id))] = parent
		}
		e.DeviceIDs[0] = append(e.DeviceIDs[0], id)
	}
	e.AllocResp, _ = proto.Marshal(resp)
	return e
}

// offer returns a resource with devices. The UUID of a device is its ID up to "::". MIG devices have their GPU after
// "@".
func offer(resourceName string, ids ...string) resource.Resource {
	r := resource.Resource{Name: resourceName}
	for _, id := range ids {
		id, parent, _ := strings.Cut(id, "@")
		uuid := resource.UUIDOf(id)
		if parent == "" {
			parent = uuid
		}
		r.Devices = append(r.Devices, resource.Device{ID: id, UUID: uuid, Parent: parent, Healthy: true})
	}
	return r
}

// devicesOf returns pointers to the devices of an offer.
func devicesOf(ids ...string) []*resource.Device {
	r := offer(whole, ids...)
	var list []*resource.Device
	for i := range r.Devices {
		list = append(list, &r.Devices[i])
	}
	return list
}

// reasonOf returns why the device plugin must not give a device, or "".
func reasonOf(l *Ledger, d *resource.Device) string {
	why, ending := l.Reason(d)
	if ending {
		return why + " (ending)"
	}
	return why
}

func expect(t *testing.T, l *Ledger, d *resource.Device, want string) {
	t.Helper()
	if got := reasonOf(l, d); (got == "") != (want == "") || !strings.Contains(got, want) {
		t.Errorf("%s: the reason is %q, want %q", d.ID, got, want)
	}
}
