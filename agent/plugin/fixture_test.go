package plugin

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

const gpus = "nvidia.com/gpu"

// uuid returns the UUID of GPU n.
func uuid(n int) string { return fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", n) }

// gpuAt returns GPU n of a node with four GPUs on each NUMA node.
func gpuAt(n int) resource.Device {
	return resource.Device{
		ID: uuid(n), UUID: uuid(n), Parent: uuid(n), Index: n, MIGIndex: resource.NoMIG, Replica: resource.NoReplica,
		NUMANode: n / 4, Healthy: true, Model: "NVIDIA H100 80GB HBM3", PCIBusID: fmt.Sprintf("0000:%02x:00.0", n+1),
		MemoryBytes: 80 << 30, IndexName: strconv.Itoa(n),
		Grant: grantOf(uuid(n)),
	}
}

// grantOf is a grant of CDI devices of the kind of the GPUs.
func grantOf(names ...string) *resource.Grant {
	g := &resource.Grant{}
	for _, n := range names {
		g.CDIDevices = append(g.CDIDevices, gpus+"="+n)
	}
	return g
}

func gpusOf(n int) resource.Resource {
	r := resource.Resource{Name: gpus}
	for i := range n {
		r.Devices = append(r.Devices, gpuAt(i))
	}
	return r
}

// replicasOf returns m replicas of each of n GPUs.
func replicasOf(n, m int) resource.Resource {
	r := resource.Resource{Name: gpus + ".shared"}
	for i := range n {
		for j := range m {
			d := gpuAt(i)
			d.ID, d.Replica = fmt.Sprintf("%s::%d", d.UUID, j), j
			r.Devices = append(r.Devices, d)
		}
	}
	return r
}

// migOf returns two MIG devices on each of n GPUs.
func migOf(n int) resource.Resource {
	r := resource.Resource{Name: "nvidia.com/mig-1g.10gb"}
	for i := range n {
		for j := range 2 {
			d := gpuAt(i)
			d.UUID = fmt.Sprintf("MIG-00000000-0000-0000-%04d-%012d", i, j)
			d.ID, d.MIGIndex, d.Profile, d.Grant = d.UUID, j, "1g.10gb", grantOf(d.UUID)
			d.IndexName = fmt.Sprintf("%d:%d", i, j)
			r.Devices = append(r.Devices, d)
		}
	}
	return r
}

var quiet = slog.New(slog.DiscardHandler)

func by(s ...resource.Strategy) AllocateOptions { return AllocateOptions{Strategies: s} }

func noSlices(string) map[string]int { return nil }

func serverOf(t testing.TB, r resource.Resource, o AllocateOptions) *server {
	t.Helper()
	s, err := newServer(r, nil, o, noSlices, quiet, noObserver{})
	testenv.Must(t, err)
	return s
}

// optionsFor returns the options of a plugin for the kubelet.
func optionsFor(k *kubelettest.Kubelet) Options {
	return Options{
		Dir: k.Dir, Allocate: by(resource.CDICRI), Log: quiet,
		registerTimeout: time.Minute, streamGrace: time.Minute, drainTimeout: time.Minute,
	}
}

// running is a plugin that runs.
type running struct {
	*Plugin
	t      testing.TB
	cancel context.CancelFunc
	ended  chan error
}

// start runs a plugin with the resources until the test ends.
func start(t testing.TB, o Options, resources ...resource.Resource) *running {
	t.Helper()
	p, err := New(o)
	testenv.Must(t, err)
	testenv.Must(t, p.Update(resources, nil))
	ctx, cancel := context.WithCancel(t.Context())
	r := &running{Plugin: p, t: t, cancel: cancel, ended: make(chan error, 1)}
	go func() { r.ended <- p.Run(ctx) }()
	t.Cleanup(func() { _ = r.stop() })
	return r
}

// stop stops the plugin and returns the error of Run.
func (r *running) stop() error {
	r.cancel()
	return r.wait()
}

func (r *running) wait() error {
	r.t.Helper()
	select {
	case err := <-r.ended:
		r.ended <- err
		return err
	case <-time.After(time.Minute):
		r.t.Fatalf("the plugin does not stop:\n%s", stacks())
		return nil
	}
}

var eventually = testenv.Eventually

// leaves fails the test if at its end goroutines of the plugin, of gRPC or of fsnotify are left. Call it first.
func leaves(t *testing.T) {
	t.Cleanup(func() {
		left := ""
		defer func() {
			if left != "" {
				t.Logf("goroutines are left:\n%s", left)
			}
		}()
		eventually(t, "no goroutine is left", func() bool {
			left = ourGoroutines()
			return left == ""
		})
	})
}

func ourGoroutines() string {
	var left []string
	for g := range strings.SplitSeq(stacks(), "\n\n") {
		ours := strings.Contains(g, "gpu-cdi-plugin/agent/plugin") || strings.Contains(g, "google.golang.org/grpc") ||
			strings.Contains(g, "fsnotify")
		if ours && !strings.Contains(g, "testing.tRunner") && !strings.Contains(g, "ourGoroutines") {
			left = append(left, g)
		}
	}
	return strings.Join(left, "\n\n")
}

func stacks() string {
	buf := make([]byte, 1<<20)
	return string(buf[:runtime.Stack(buf, true)])
}

// inDir returns the names in a directory.
func inDir(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	testenv.Must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func ownSocket(k *kubelettest.Kubelet) string {
	return filepath.Join(k.Dir, "gpu-cdi-nvidia-com-gpu.sock")
}

// socketAt returns the ID of the socket at a path, or the zero value.
func socketAt(path string) unixsocket.ID {
	id, _ := unixsocket.Identify(path)
	return id
}

// allocated is what the kubelet gets as the answer to a call.
func allocated(s *server, r *v1beta1.AllocateRequest) (*v1beta1.AllocateResponse, error) {
	resp, err := s.Allocate(context.Background(), r)
	if err != nil {
		return nil, err
	}
	wire, err := proto.Marshal(resp)
	if err != nil {
		return nil, err
	}
	read := &v1beta1.AllocateResponse{}
	return read, proto.Unmarshal(wire, read)
}
