package node

import (
	"io"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/sim"
)

// The fixture polls once an hour, so only a uevent or an event of the driver can cause a reconciliation.
func TestGPUsThatComeAndGoAreNoticedWithinASecond(t *testing.T) {
	listening := make(chan struct{})
	var node *sim.Node
	b := newFixture(t, "mig-h100", watchHealth(""), func(o *Options) {
		o.Uevents = func() (io.ReadCloser, error) {
			defer close(listening)
			return node.Uevents()
		}
	})
	node = b.node
	b.start()
	b.run()
	<-listening
	good, _ := healthy(b.rec.State())
	snapshot := b.rec.State().Snapshot
	const mig, whole = 0, 2
	must(t, b.node.DisableMIG(whole))
	b.rec.Receive(gpu.Event{GPU: b.uuids()[whole], Kind: gpu.EventMIG})
	all := good - len(snapshot.Devices[whole].MIG) + 1
	b.wait("a GPU without MIG devices", offers(all))
	quickest := map[string]time.Duration{} // a busy machine delays some
	for round := 0; round == 0 || round < 5 && slices.Max(slices.Collect(maps.Values(quickest))) > time.Second; round++ {
		for _, step := range []struct {
			what   string
			change func(int) error
			gpu    int
			want   int
		}{
			{"the driver is unbound", b.node.Unbind, whole, all - 1},
			{"the driver is bound", b.node.Bind, whole, all},
			{"the GPU is unplugged", b.node.Unplug, whole, all - 1},
			{"the GPU is plugged in", b.node.Plug, whole, all},
			{"a GPU with MIG devices is unplugged", b.node.Unplug, mig, all - len(snapshot.Devices[mig].MIG)},
			{"it is plugged in", b.node.Plug, mig, all},
		} {
			began := time.Now()
			must(t, step.change(step.gpu))
			b.wait(step.what, offers(step.want))
			took := time.Since(began)
			if before, measured := quickest[step.what]; !measured || took < before {
				quickest[step.what] = took
			}
		}
	}
	for what, took := range quickest {
		if took > time.Second {
			t.Errorf("%s: noticed after %v", what, took)
		}
	}
}

func TestASourceOfUeventsThatFailsIsClosed(t *testing.T) {
	source := &failingSource{}
	r := &Reconciler{log: slog.New(slog.DiscardHandler)}
	r.opts.Uevents = func() (io.ReadCloser, error) { return source, nil }
	r.watchUevents(t.Context())
	if !source.closed {
		t.Error("the source is open")
	}
}

type failingSource struct{ closed bool }

func (s *failingSource) Read([]byte) (int, error) { return 0, io.EOF }

func (s *failingSource) Close() error {
	s.closed = true
	return nil
}

// offers returns whether a published state has so many healthy devices, and no others.
func offers(n int) func(State) bool {
	return func(s State) bool { good, bad := healthy(s); return good == n && bad == 0 }
}
