package main

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/nvml"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
)

// Links are kept for GPUs, not for their indices: a GPU that comes or goes gives others to those behind it.
func TestLinksFollowTheirGPUs(t *testing.T) {
	snapshot := func(uuids ...string) *gpu.Snapshot {
		s := &gpu.Snapshot{}
		for i, uuid := range uuids {
			d := gpu.Device{Index: i, UUID: uuid}
			if uuid == "lost" {
				d = gpu.Device{Index: i, Error: "GPU is lost"}
			}
			s.Devices = append(s.Devices, d)
		}
		return s
	}
	read := snapshot("a", "b", "c")
	read.Links = []gpu.Link{{A: 0, B: 1, NVLinks: 1}, {A: 0, B: 2, NVLinks: 2}, {A: 1, B: 2, NVLinks: 3}}
	for name, c := range map[string]struct {
		linked, now *gpu.Snapshot
		want        []gpu.Link
	}{
		"nothing has changed":     {read, snapshot("a", "b", "c"), read.Links},
		"nothing was read yet":    {nil, snapshot("a", "b", "c"), nil},
		"one is gone":             {read, snapshot("b", "c"), []gpu.Link{{A: 0, B: 1, NVLinks: 3}}},
		"one is lost":             {read, snapshot("a", "lost", "c"), []gpu.Link{{A: 0, B: 2, NVLinks: 2}}},
		"one was lost":            {&gpu.Snapshot{Devices: snapshot("lost", "b", "c").Devices, Links: read.Links[2:]}, snapshot("a", "b", "c"), read.Links[2:]},
		"another is in its place": {read, snapshot("d", "b", "c"), read.Links[2:]},
		"they are in another order": {
			read, snapshot("c", "b", "a"), []gpu.Link{{A: 0, B: 1, NVLinks: 3}, {A: 0, B: 2, NVLinks: 2}, {A: 1, B: 2, NVLinks: 1}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			d := &nodeDriver{linked: c.linked}
			if diff := cmp.Diff(c.want, d.linksOf(c.now)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// Who cannot be asked for links is said by the GPU's name, whatever its index is at the next look.
func TestWhoseLinksAreUnread(t *testing.T) {
	devices := func(list ...gpu.Device) *gpu.Snapshot { return &gpu.Snapshot{Devices: list} }
	mute := gpu.Device{UUID: "a", Error: "no answer"}
	d := &nodeDriver{linked: devices(mute), looked: devices(gpu.Device{UUID: "a"})}
	if diff := cmp.Diff(map[string]string{"a": "no answer"}, d.unread()); diff != "" {
		t.Errorf("unread (-want +got):\n%s", diff)
	}
	d.looked = devices(gpu.Device{UUID: "b"}) // "a" is gone
	if diff := cmp.Diff(map[string]string{}, d.unread()); diff != "" {
		t.Errorf("unread when it is gone (-want +got):\n%s", diff)
	}
}

// Reading links takes as long as the driver lets it, here for ever. What happens to the GPUs meanwhile is seen at once.
func TestServeLooksWhileLinksHang(t *testing.T) {
	t.Parallel()
	s := newServed(t, "dgx-h100", "")
	mustDo(t, s.node.Hang("nvmlDeviceGetNvLinkState", sim.AnyGPU))
	s.start()
	s.listed(gpuResource, 8, 0)
	time.Sleep(5 * linksDelay) // when they are being read
	for range 3 {
		mustDo(t, s.node.Lose(2))
		s.signal(syscall.SIGHUP)
		begin := time.Now()
		e := s.listed(gpuResource, 7, 1)
		mustDo(t, s.node.ClearGPU(2))
		s.signal(syscall.SIGHUP)
		s.listed(gpuResource, 8, 0)
		if took := time.Since(begin); took > nvml.DefaultTimeout/3 {
			t.Errorf("two looks took %v", took)
		}
		s.allocate(e, s.node.Machine().GPUs[0].UUID)
	}
	waitFor(t, "a message", func() bool { return strings.Contains(s.log.String(), "a GPU whose links cannot be read") })
}

// A reading that hangs holds one call for each GPU and no more, however often it is tried, and ends when the driver is
// opened anew.
func TestLinksThatHangDoNotPileUp(t *testing.T) {
	node := simtest.Node(t, "dgx-h100")
	h, err := host.New(node.Root(), "", "")
	mustDo(t, err)
	d := newNodeDriver(h, "", func(string) error { return nil })
	defer func() { mustDo(t, d.Close()) }()
	_, err = d.Snapshot(t.Context())
	mustDo(t, err)
	closesAfterItsUsers(t, d)
	_, err = d.Snapshot(t.Context())
	mustDo(t, err)
	before := runtime.NumGoroutine()
	mustDo(t, node.Hang("nvmlDeviceGetNvLinkState", sim.AnyGPU))
	ended := make(chan error)
	go func() {
		_, err := d.readLinks(t.Context())
		ended <- err
	}()
	waitFor(t, "a reading", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return len(d.users) == 1 })
	d.mu.Lock()
	_ = d.close() // as a look does
	d.mu.Unlock()
	if err := <-ended; !errors.Is(err, errReopened) {
		t.Errorf("error %v", err)
	}
	for range 10 {
		_, err := d.readLinks(t.Context())
		mustDo(t, err)
		if why := d.unread()[node.Machine().GPUs[7].UUID]; !strings.Contains(why, "nvmlDeviceGetNvLinkState: no answer") {
			t.Errorf("GPU 7 has the error %q", why)
		}
		if s, err := d.Snapshot(t.Context()); err != nil || !s.Devices[7].Usable() {
			t.Errorf("the look after that: %v", err)
		}
	}
	waitFor(t, "no more than a goroutine for each GPU", func() bool { return runtime.NumGoroutine() <= before+8 })
	mustDo(t, node.Clear())
	waitFor(t, "the links", func() bool {
		changed, err := d.readLinks(t.Context())
		return changed && err == nil && len(d.linked.Links) == 28
	})
}

// The driver is not shut down before who asks it has heard that it will be.
func closesAfterItsUsers(t *testing.T, d *nodeDriver) {
	t.Helper()
	asking := make(chan struct{})
	var left atomic.Bool
	go func() {
		_ = d.use(t.Context(), func(ctx context.Context, _ *nvml.Library) error {
			close(asking)
			<-ctx.Done()
			time.Sleep(50 * time.Millisecond)
			left.Store(true)
			return nil
		})
	}()
	<-asking
	d.mu.Lock()
	defer d.mu.Unlock()
	mustDo(t, d.close())
	if !left.Load() {
		t.Error("the driver was closed while somebody asked it")
	}
}
