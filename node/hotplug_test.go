package node

import (
	"io"
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
	b.within(time.Second, "a GPU without MIG devices", all)
	for _, step := range []struct {
		what   string
		change func(int) error
		want   int
	}{
		{"the driver is unbound", b.node.Unbind, all - 1},
		{"the driver is bound", b.node.Bind, all},
		{"the GPU is unplugged", b.node.Unplug, all - 1},
		{"the GPU is plugged in", b.node.Plug, all},
	} {
		must(t, step.change(whole))
		b.within(time.Second, step.what, step.want)
	}
	must(t, b.node.Unplug(mig))
	b.within(time.Second, "a GPU with MIG devices is unplugged", all-len(snapshot.Devices[mig].MIG))
}

// within expects the published state to have so many healthy devices, and no others, soon.
func (b *fixture) within(limit time.Duration, what string, want int) {
	b.t.Helper()
	began := time.Now()
	b.wait(what, func(s State) bool { good, bad := healthy(s); return good == want && bad == 0 })
	if took := time.Since(began); took > limit {
		b.t.Errorf("%s: noticed after %v", what, took)
	} else {
		b.t.Logf("%s: noticed after %v", what, took)
	}
}
