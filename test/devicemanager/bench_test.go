package devicemanager

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"

	"gpu-cdi-plugin/manager/admission"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
	managertest "gpu-cdi-plugin/test/manager"
	"gpu-cdi-plugin/test/manager/behaviour"
)

// contender is a device manager in the comparison, with a plugin that has registered with it.
type contender struct {
	behaviour.Manager
	b      *testing.B
	plugin *behaviour.Plugin
	close  func()
}

var constructors = map[string]func(testing.TB, behaviour.Config) behaviour.Manager{
	"here": managertest.New, "kubelet": NewKubelet,
}

// newContender boots a device manager.
func newContender(b *testing.B, name string) *contender {
	b.Helper()
	dir := makeBenchDirectory(b)
	registry := filepath.Join(dir, "registry")
	testenv.Must(b, os.Mkdir(registry, 0o750))
	c := &contender{b: b}
	c.Manager = constructors[name](b, behaviour.Config{
		Dir: dir, Registry: registry, NUMANodes: []int{0, 1}, Policy: "none", Scope: "container",
	})
	testenv.Must(c.b, c.Boot(behaviour.Boot{}))
	c.plugin = behaviour.NewPlugin(gpuName, filepath.Join(dir, "gpu.sock"))
	c.plugin.Behave(plugintest.Behaviour{Allocate: answerAsAGPU})
	ctx, cancel := context.WithCancel(b.Context())
	go func() { // nothing else takes the announcements
		for {
			select {
			case <-c.HealthChanges():
			case <-ctx.Done():
				return
			}
		}
	}()
	c.close = func() {
		c.plugin.Stop()
		testenv.Must(c.b, c.Stop())
		cancel()
	}
	return c
}

func makeBenchDirectory(b *testing.B) string {
	b.Helper()
	dir, err := os.MkdirTemp("", "dm") //nolint:usetesting // the kubelet writes into it after it was stopped
	testenv.Must(b, err)
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// answerAsAGPU is what a plugin answers for a GPU: 339 bytes in the encoding of protobuf.
func answerAsAGPU(_ context.Context, ids []string) (*v1beta1.ContainerAllocateResponse, error) {
	r := &v1beta1.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(ids, ",")}}
	for _, path := range []string{
		"/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset",
	} {
		r.Devices = append(r.Devices, &v1beta1.DeviceSpec{ContainerPath: path, HostPath: path, Permissions: "rw"})
	}
	for _, id := range ids {
		r.CdiDevices = append(r.CdiDevices, &v1beta1.CDIDevice{Name: gpuName + "=" + id})
	}
	return r, nil
}

// manyGPUs is a list of devices with the health.
func manyGPUs(count int, health string) (list []*v1beta1.Device) {
	for i := range count {
		list = append(list, &v1beta1.Device{
			ID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", i), Health: health,
			Topology: &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: int64(i % 2)}}},
		})
	}
	return list
}

// plug registers the plugin with devices and returns when the manager counts them.
func (c *contender) plug(count int) time.Duration {
	c.plugin.SetDevices(manyGPUs(count, v1beta1.Healthy)...)
	c.plugin.Stop()
	testenv.Must(c.b, c.plugin.Serve())
	begin := time.Now()
	testenv.Must(c.b, c.plugin.Register(c.b.Context(), filepath.Dir(c.plugin.Socket)))
	c.await(count)
	return time.Since(begin)
}

// await waits until so many devices are allocatable. It asks every 20 microseconds.
func (c *contender) await(allocatable int) {
	for begin := time.Now(); c.Counts(gpuName).Allocatable != allocatable; time.Sleep(20 * time.Microsecond) {
		if time.Since(begin) > time.Minute {
			c.b.Fatalf("%+v", c.Counts(gpuName))
		}
	}
}

func gpuPod(i int) model.Pod {
	return model.Pod{
		UID: fmt.Sprintf("6ba7b810-9dad-11d1-80b4-%012d", i), Namespace: "default", Name: fmt.Sprintf("pod-%d", i),
		Containers: []model.Container{{Name: "main", Limits: map[string]int{gpuName: 1}}},
	}
}

// place admits pods with one GPU each: the kubelet takes one at a time.
func (c *contender) place(name string, count int) {
	callers := 64
	if name == "kubelet" {
		callers = 1
	}
	next := make(chan int)
	var running sync.WaitGroup
	for range callers {
		running.Go(func() {
			for i := range next {
				if err := c.Admit(context.Background(), gpuPod(i)); err != nil {
					c.b.Error(err)
				}
			}
		})
	}
	for i := range count {
		next <- i
	}
	close(next)
	running.Wait()
}

// samples are durations of one thing.
type samples []time.Duration

func (s samples) percentile(p int) time.Duration {
	sorted := slices.Sorted(slices.Values(s))
	return sorted[min(len(sorted)-1, len(sorted)*p/100)]
}

func (s samples) ms(p int) string {
	return strconv.FormatFloat(float64(s.percentile(p))/float64(time.Millisecond), 'g', 3, 64)
}

func (s samples) ratio(other samples) string {
	if len(s) == 0 || len(other) == 0 {
		return ""
	}
	return strconv.FormatFloat(float64(s.percentile(50))/float64(other.percentile(50)), 'g', 2, 64)
}

// BenchmarkManagers prints a table of this project's device manager beside the kubelet's, in one run. The contenders
// take turns, so that other load on the machine slows all of them.
func BenchmarkManagers(b *testing.B) {
	klog.SetLogger(klog.New(nil))
	fmt.Print("\nMilliseconds. The floor is one Allocate RPC and one write and fsync of 4 KiB.\n\n")
	t := &table{}
	t.row(
		"",
		"here p50",
		"p99",
		"kubelet p50",
		"p99",
		"kubelet / here",
		"floor p50",
		"here / floor",
		"written here",
		"kubelet",
	)
	sizes := []int{8, 128, 1000}
	alone, floor, bytes := admitAlone(b, sizes)
	for i, placed := range sizes {
		t.times(fmt.Sprintf("admit a pod with %d placed, without the kubelet", placed), alone[i], nil, floor, bytes[i])
	}
	for _, placed := range sizes {
		here, kubelet, bytes := admitBeside(b, placed)
		t.times(fmt.Sprintf("admit a pod with %d placed", placed), here, kubelet, nil, bytes...)
	}
	both := func(do func(*testing.B, string) samples) (here, kubelet samples) {
		return do(b, "here"), do(b, "kubelet")
	}
	here, kubelet := both(healthFlips)
	t.times("1,000 devices of 1,000 pods turn unhealthy, until seen", here, kubelet, nil)
	here, kubelet = compareHints(b)
	t.times("topology hints, 128 devices on 16 NUMA nodes", here, kubelet, nil)
	here, kubelet = both(restartsWithPods)
	t.times("restart with 1,000 placed pods", here, kubelet, nil)
	for _, devices := range []int{8, 128, 1000} {
		here, kubelet = both(func(b *testing.B, name string) samples { return registrations(b, name, devices) })
		t.times(fmt.Sprintf("registration until the capacity is seen, %d devices", devices), here, kubelet, nil)
	}
	b.ReportMetric(0, "ns/op")
}

const admissions = 200

// admitAlone measures managers with different numbers of placed pods, and the floor, in turn. No kubelet is beside
// them: its writes would slow whatever comes after them.
func admitAlone(b *testing.B, sizes []int) (here []samples, floors samples, bytes []int64) {
	var all []*contender
	for _, placed := range sizes {
		c := newContender(b, "here")
		defer c.close()
		c.plug(placed + 1)
		c.place("here", placed)
		all = append(all, c)
	}
	floor := newFloor(b, all[0].plugin.Socket)
	here, bytes = make([]samples, len(all)), make([]int64, len(all))
	for range admissions {
		for _, i := range rand.Perm(len(all) + 1) {
			if i == len(all) {
				floors = append(floors, timed(func() { testenv.Must(b, floor.run()) }))
				continue
			}
			all[i].admitOneMore(sizes[i], &here[i], &bytes[i])
		}
	}
	return here, floors, bytes
}

// admitBeside measures a manager and the kubelet's in turn.
func admitBeside(b *testing.B, placed int) (here, kubelet samples, bytes []int64) {
	names := []string{"here", "kubelet"}
	all, times := make([]*contender, 2), make([]samples, 2)
	bytes = make([]int64, 2)
	for i, name := range names {
		all[i] = newContender(b, name)
		defer all[i].close()
		all[i].plug(placed + 1)
		all[i].place(name, placed)
	}
	for range admissions {
		for _, i := range rand.Perm(2) {
			all[i].admitOneMore(placed, &times[i], &bytes[i])
		}
	}
	return times[0], times[1], bytes
}

// admitOneMore admits a pod beside those that are placed, and releases it. The release is not part of the time, nor is
// that the kubelet forgets the pod. bytes gets a share of what was written.
func (c *contender) admitOneMore(placed int, times *samples, bytes *int64) {
	p := gpuPod(placed)
	before := written(c.b)
	*times = append(*times, timed(func() { testenv.Must(c.b, c.Admit(c.b.Context(), p)) }))
	*bytes += (written(c.b) - before) / admissions
	testenv.Must(c.b, c.Release(p))
	if k, ok := c.Manager.(*Kubelet); ok {
		k.UpdateAllocatedDevices(klog.Background())
	}
}

func timed(do func()) time.Duration {
	begin := time.Now()
	do()
	return time.Since(begin)
}

// written is how much the process has written to disks so far, in bytes.
func written(b *testing.B) int64 {
	b.Helper()
	data, err := os.ReadFile("/proc/self/io")
	testenv.Must(b, err)
	_, rest, _ := strings.Cut(string(data), "\nwrite_bytes: ")
	line, _, _ := strings.Cut(rest, "\n")
	n, err := strconv.ParseInt(line, 10, 64)
	testenv.Must(b, err)
	return n
}

// floor is what no durable admission can do without.
type floor struct {
	client v1beta1.DevicePluginClient
	file   *os.File
	data   []byte
}

func newFloor(b *testing.B, socket string) *floor {
	b.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(b, err)
	file, err := os.Create(filepath.Join(makeBenchDirectory(b), "floor"))
	testenv.Must(b, err)
	b.Cleanup(func() { _, _ = conn.Close(), file.Close() })
	return &floor{client: v1beta1.NewDevicePluginClient(conn), file: file, data: make([]byte, 4096)}
}

func (f *floor) run() error {
	_, err := f.client.Allocate(context.Background(), &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: []string{"GPU-0"}}},
	})
	if err != nil {
		return err
	}
	if _, err := f.file.WriteAt(f.data, 0); err != nil {
		return err
	}
	return f.file.Sync()
}

// healthFlips has all devices turn unhealthy and healthy again.
func healthFlips(b *testing.B, name string) (s samples) {
	const placed = 1000
	c := newContender(b, name)
	defer c.close()
	c.plug(placed)
	c.place(name, placed)
	healthy, unhealthy := manyGPUs(placed, v1beta1.Healthy), manyGPUs(placed, v1beta1.Unhealthy)
	for range 11 {
		s = append(s, timed(func() {
			c.plugin.SetDevices(unhealthy...)
			c.await(0)
		}))
		c.plugin.SetDevices(healthy...)
		c.await(placed)
		time.Sleep(300 * time.Millisecond) // the kubelet still writes its checkpoint
	}
	return s
}

// restartsWithPods stops and starts a manager.
func restartsWithPods(b *testing.B, name string) (s samples) {
	const placed = 1000
	c := newContender(b, name)
	defer c.close()
	c.plug(placed)
	c.place(name, placed)
	for range 11 {
		c.plugin.Stop()
		testenv.Must(c.b, c.Stop())
		s = append(s, timed(func() { testenv.Must(c.b, c.Boot(behaviour.Boot{})) }))
	}
	if ids := c.Devices(gpuPod(placed-1), "main")[gpuName]; len(ids) != 1 {
		b.Fatalf("the last pod has %v", ids)
	}
	return s
}

// registrations has plugins register with fresh managers.
func registrations(b *testing.B, name string, devices int) (s samples) {
	for range 30 {
		c := newContender(b, name)
		s = append(s, c.plug(devices))
		c.close()
	}
	return s
}

// compareHints computes the hints for a device, 8 devices on each of 16 NUMA nodes, which must be the same.
func compareHints(b *testing.B) (here, kubelet samples) {
	const nodes, devices = 16, 128
	var ids []int
	list := manyGPUs(devices, v1beta1.Healthy)
	resource := model.Resource{Name: gpuName, Connected: true}
	for i := range nodes {
		ids = append(ids, i)
	}
	for i, d := range list {
		d.Topology.Nodes[0].ID = int64(i % nodes)
		resource.Devices = append(resource.Devices, model.Device{ID: d.ID, Healthy: true, NUMA: []int{i % nodes}})
	}
	c := newContender(b, "kubelet")
	defer c.close()
	k := c.Manager.(*Kubelet)
	testenv.Must(c.b, c.Stop())
	k.config.NUMANodes = ids
	testenv.Must(c.b, c.Boot(behaviour.Boot{}))
	c.plugin.SetDevices(list...)
	testenv.Must(c.b, c.plugin.Serve())
	testenv.Must(c.b, c.plugin.Register(b.Context(), filepath.Dir(c.plugin.Socket)))
	c.await(devices)
	pool := admission.NewPool(gpuName)
	pool.Set(resource)
	pod := convert(gpuPod(0))
	for range 3 {
		var want, got []string
		var theirs []topologymanager.TopologyHint
		kubelet = append(kubelet, timed(func() {
			container := &pod.Spec.Containers[0]
			theirs = k.GetTopologyHints(klog.Background(), pod, container, lifecycle.AddOperation)[gpuName]
		}))
		for _, h := range theirs {
			want = append(want, fmt.Sprint(h.NUMANodeAffinity.GetBits(), h.Preferred))
		}
		var hints []admission.Hint
		topology := admission.Topology{Policy: admission.PolicyBestEffort, Machine: admission.NodesOf(ids...)}
		here = append(here, timed(func() {
			var err error
			hints, err = pool.Hints(topology, admission.Request{Count: 1})
			testenv.Must(c.b, err)
		}))
		for _, h := range hints {
			got = append(got, fmt.Sprint(h.Nodes.IDs(), h.Preferred))
		}
		slices.Sort(want)
		slices.Sort(got)
		if !slices.Equal(want, got) {
			b.Fatalf("%d hints, the kubelet makes %d others", len(got), len(want))
		}
	}
	return here, kubelet
}

// table prints a table in Markdown, row by row.
type table struct{ begun bool }

func (t *table) row(cells ...string) {
	fmt.Println("| " + strings.Join(cells, " | ") + " |")
	if !t.begun {
		fmt.Println(strings.Repeat("|---", len(cells)) + "|")
	}
	t.begun = true
}

// times is a row with the times of both, and the bytes that each has written.
func (t *table) times(what string, here, kubelet, floor samples, written ...int64) {
	cells := []string{what, here.ms(50), here.ms(99), "", "", kubelet.ratio(here), "", "", "", ""}
	if len(kubelet) > 0 {
		cells[3], cells[4] = kubelet.ms(50), kubelet.ms(99)
	}
	if len(floor) > 0 {
		cells[6], cells[7] = floor.ms(50), here.ratio(floor)
	}
	for i, n := range written {
		if i == 0 || len(kubelet) > 0 {
			cells[8+i] = fmt.Sprintf("%.1f KiB", float64(n)/1024)
		}
	}
	t.row(cells...)
}
