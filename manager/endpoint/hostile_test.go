package endpoint_test

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// flooder is a plugin that sends many lists as fast as it can.
type flooder struct {
	*plugintest.Plugin
	sent atomic.Int64
}

func (f *flooder) ListAndWatch(
	_ *v1beta1.Empty, stream grpc.ServerStreamingServer[v1beta1.ListAndWatchResponse],
) error {
	list := &v1beta1.ListAndWatchResponse{Devices: plugintest.Devices(500)}
	for range 20_000 {
		list.Devices[0].ID = fmt.Sprint(f.sent.Add(1))
		if err := stream.Send(list); err != nil {
			return err
		}
	}
	return nil
}

func TestEndlessListsWaitWithThePlugin(t *testing.T) {
	b := start(t, endpoint.Options{})
	blocked := make(chan struct{})
	release := sync.OnceFunc(func() { close(blocked) })
	t.Cleanup(release)
	b.onChange = func() { <-blocked }
	f := &flooder{Plugin: plugintest.New(gpu)}
	l, err := net.Listen("unix", filepath.Join(b.dir, "a.sock"))
	testenv.Must(t, err)
	server := grpc.NewServer()
	v1beta1.RegisterDevicePluginServer(server, f)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(l) })
	defer serving.Wait()
	defer server.Stop()
	testenv.Must(t, plugintest.Register(t.Context(), b.socket(), request(gpu, "a.sock")))
	// Calls on the same connection take long enough for the plugin to send more, if it could.
	for limit := time.Now().Add(patience); ; {
		before := f.sent.Load()
		for range 50 {
			b.allocate("1")
		}
		if before > 0 && f.sent.Load() == before {
			break
		}
		if time.Now().After(limit) {
			t.Fatalf("the plugin could send %d lists that were not read", f.sent.Load())
		}
	}
	stalled := f.sent.Load()
	release()
	b.await("more lists", func() bool { return f.sent.Load() > stalled })
}

func TestAListOfTooManyDevicesEndsTheStream(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 2)
	p.SetDevices(make([]*v1beta1.Device, 600_000)...) // 1.2 MB
	b.waitFor(gpu, "0 of 2 healthy")
	b.waitLog("the list has more than 500000 devices, topologies and NUMA nodes", 1)
}

func TestAnIDOfMoreThanAKiBEndsTheStream(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 2)
	id := strings.Repeat("x", 1024)
	p.SetDevices(plugintest.Device(id, true))
	b.waitFor(gpu, "1 of 1 healthy")
	p.SetDevices(plugintest.Device("a", true), plugintest.Device(id+"x", true))
	b.waitFor(gpu, "0 of 1 healthy")
	b.waitLog("a device ID has 1025 bytes, more than the maximum of 1024", 1)
}

func TestTheLogHasOneLineForEachEvent(t *testing.T) {
	t.Parallel()
	b := start(t, endpoint.Options{Deadlines: endpoint.Deadlines{Dial: 2 * time.Second}})
	evil := "x\nlevel=ERROR msg=\x1b[31mburning"
	b.refused(request(evil, "a.sock"))
	b.refused(request(gpu, evil))
	p := b.connect("a.sock", 1)
	p.SetDevices(plugintest.Device(evil, true), plugintest.Device(evil, true))
	b.waitLog("breaks the rules of the API", 1)
	p.EndStreams(errors.New(evil))
	b.waitLog(gone, 1)
	b.mu.Lock()
	defer b.mu.Unlock()
	for line := range strings.Lines(b.log.String()) {
		if !strings.HasPrefix(line, "time=") || strings.Contains(line, "\x1b") {
			t.Errorf("the log has %q", line)
		}
	}
}

func TestWhatIsWrongWithListsIsLoggedOnce(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 1)
	for n := range 10 {
		p.SetDevices(plugintest.Device("a", true), plugintest.Device("a", false), plugintest.Device(fmt.Sprint(n), true))
		b.waitFor(gpu, "1 of 2 healthy")
	}
	p.SetDevices(plugintest.Devices(3)...)
	b.waitFor(gpu, "3 of 3 healthy")
	if n := b.logged("breaks the rules of the API"); n != 1 {
		t.Errorf("logged %d times", n)
	}
}

func TestAResourceHasAtMost16Instances(t *testing.T) {
	b := start(t, endpoint.Options{})
	for i := range 16 {
		b.connect(fmt.Sprintf("%d.sock", i), i+1)
	}
	b.serve("more.sock", plugintest.New(gpu))
	if got := b.refused(request(gpu, "more.sock")); !strings.Contains(got, "no more are accepted") {
		t.Errorf("one more: %s", got)
	}
}

func TestThereAreAtMost256Resources(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.serve("a.sock", plugintest.New(gpu, plugintest.Devices(1)...))
	name := func(i int) string { return fmt.Sprintf("example.com/r%d", i) }
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for n := i; n < 256; n += 16 {
				if err := plugintest.Register(t.Context(), b.socket(), request(name(n), "a.sock")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := b.refused(request(name(256), "a.sock")); !strings.Contains(got, "no more are accepted") {
		t.Errorf("one more: %s", got)
	}
	b.waitFor(name(255), "1 of 1 healthy")
	p.Stop()
	b.waitFor(name(7), "0 of 1 healthy")
}

func TestConnectionsWithoutRequestsAreClosed(t *testing.T) {
	b := start(t, endpoint.Options{})
	for range 300 {
		conn, err := net.Dial("unix", b.socket())
		testenv.Must(t, err)
		t.Cleanup(func() { _ = conn.Close() })
	}
	b.connect("a.sock", 1)
}

func TestManySocketsForTheWatcher(t *testing.T) {
	b := start(t, endpoint.Options{RegistryDir: "watch"})
	b.discover("0.sock", gpu, plugintest.Behaviour{})
	for i := range 400 {
		listen(t, filepath.Join(b.registry, fmt.Sprintf("%03d.sock", i+1)), true)
	}
	b.waitLog("there are more than 256 sockets", 1)
	b.waitFor(gpu, "2 of 2 healthy")
	b.connect("a.sock", 3) // the other way to register
}
