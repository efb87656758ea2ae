package endpoint_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
)

func TestAnEqualListIsNotReported(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 2)
	for range 100 {
		p.SetDevices(plugintest.Devices(2)...)
		b.allocate("gpu-0000") // takes long enough for the list to arrive
	}
	p.SetDevices(plugintest.Devices(3)...)
	b.waitFor(gpu, "3 of 3 healthy")
	if d := cmp.Diff([]string{"2 of 2 healthy", "3 of 3 healthy"}, counts(b.reports(gpu))); d != "" {
		t.Error(d)
	}
}

func TestAfterTheGracePeriodAResourceIsUnknown(t *testing.T) {
	b := start(t, endpoint.Options{Deadlines: endpoint.Deadlines{Grace: 20 * time.Millisecond}})
	b.connect("a.sock", 2).Stop()
	b.waitFor(gpu, "gone")
	b.connect("b.sock", 1).Stop() // its registration waits until the resource is removed
	b.await("gone twice", func() bool {
		return slices.Equal(counts(b.reports(gpu)), []string{
			"2 of 2 healthy", "0 of 2 healthy", "gone", "1 of 1 healthy", "0 of 1 healthy", "gone",
		})
	})
	_, err := b.Endpoint("example.com/other")
	if !errors.Is(err, endpoint.ErrUnknownResource) {
		t.Errorf("an unknown resource: %v", err)
	}
}

func TestAPluginThatIsBackInTimeKeepsItsResource(t *testing.T) {
	t.Parallel()
	b := start(t, endpoint.Options{Deadlines: endpoint.Deadlines{Grace: 3 * time.Second}})
	p := b.connect("a.sock", 2)
	p.Stop()
	b.waitFor(gpu, "0 of 2 healthy")
	b.serve("a.sock", p)
	b.register(p)
	b.waitFor(gpu, "2 of 2 healthy")
	other := b.serve("b.sock", plugintest.New("example.com/other"))
	b.register(other)
	b.waitFor("example.com/other", "0 of 0 healthy")
	other.Stop()
	b.waitFor("example.com/other", "gone") // later than the first resource would be
	if got := counts(b.reports(gpu)); got[len(got)-1] != "2 of 2 healthy" {
		t.Errorf("the resource was %s", got)
	}
}

func TestTheDevicesOfAStoppedPluginStayKnown(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 2)
	p.EndStreams(errors.New("broken"))
	b.waitFor(gpu, "0 of 2 healthy")
	b.waitLog(gone, 1)
	if calls := p.Calls(); calls.Watch != 1 {
		t.Errorf("ListAndWatch was called %d times: it is never retried", calls.Watch)
	}
	_, err := b.endpoint(gpu).Allocate(t.Context(), []string{"gpu-0000"})
	if !errors.Is(err, endpoint.ErrStopped) || err.Error() != "endpoint example.com/gpu has been stopped" {
		t.Errorf("Allocate of a stopped plugin: %v", err)
	}
	if p.Calls().Allocate != 0 {
		t.Error("a stopped plugin was called")
	}
}

func TestAStreamThatFailsBeforeItsFirstListLeavesNoDevices(t *testing.T) {
	b := start(t, endpoint.Options{Deadlines: endpoint.Deadlines{Grace: 20 * time.Millisecond}})
	p := b.serve("a.sock", plugintest.New(gpu, plugintest.Devices(2)...))
	p.EndStreams(errors.New("broken"))
	b.register(p)
	b.waitFor(gpu, "gone")
	if d := cmp.Diff([]string{"0 of 0 healthy", "gone"}, counts(b.reports(gpu))); d != "" {
		t.Error(d)
	}
	if c := p.Calls(); c.Options != 1 || c.Watch != 1 {
		t.Errorf("calls: %+v", c)
	}
}

func TestAResourceAppearsWithItsFirstList(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.serve("a.sock", plugintest.New(gpu, plugintest.Devices(2)...))
	list := make(chan struct{})
	p.Behave(plugintest.Behaviour{Watch: func(context.Context) error { <-list; return nil }})
	b.register(p)
	if r := b.resources(); r != nil {
		t.Errorf("before the first list: %v", r)
	}
	close(list)
	b.waitFor(gpu, "2 of 2 healthy")
}

func TestARegistrationTwiceReplacesItsStream(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 2)
	b.register(p)
	b.waitCalls(p, func(c plugintest.Calls) bool { return c.Watch == 2 && c.Ended == 1 })
	p.SetDevices(plugintest.Devices(3)...)
	b.waitFor(gpu, "3 of 3 healthy")
	b.allocate("gpu-0000")
	if d := cmp.Diff([]string{"2 of 2 healthy", "3 of 3 healthy"}, counts(b.reports(gpu))); d != "" {
		t.Error(d)
	}
}

func TestAFastRestartAtTheSameSocketNeverLosesTheNewInstance(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 2)
	for round := range 100 {
		p.Stop()
		p = b.serve("a.sock", plugintest.New(gpu, plugintest.Devices(3+round)...))
		b.register(p)
		b.waitFor(gpu, (&report{Resource: model.Resource{Devices: healthyDevices(3 + round)}}).count())
		b.allocate("gpu-0000")
	}
	b.waitLog(gone, 100)
	b.allocate("gpu-0000")
	if r := b.resources()[0]; !r.Connected || !r.Devices[0].Healthy {
		t.Error("the last instance was lost")
	}
}

func healthyDevices(n int) []model.Device {
	devices := make([]model.Device, n)
	for i := range devices {
		devices[i].Healthy = true
	}
	return devices
}

func TestAnInstanceWithoutListIsNotInEffectBeforeTheOldOneEnds(t *testing.T) {
	b := start(t, endpoint.Options{})
	p1 := b.connect("a.sock", 2)
	p2 := b.serve("b.sock", plugintest.New(gpu, plugintest.Devices(3)...))
	list := make(chan struct{})
	p2.Behave(plugintest.Behaviour{Watch: func(context.Context) error { <-list; return nil }})
	b.register(p2)
	b.allocate("gpu-0000")
	if p1.Calls().Allocate != 1 {
		t.Error("the instance without a list was called")
	}
	p1.Stop()
	b.waitLog(gone, 1)
	b.allocate("gpu-0000")
	if p2.Calls().Allocate != 1 {
		t.Error("the only instance was not called")
	}
	close(list)
	b.waitFor(gpu, "3 of 3 healthy")
	if d := cmp.Diff([]string{"2 of 2 healthy", "3 of 3 healthy"}, counts(b.reports(gpu))); d != "" {
		t.Error(d)
	}
}

func TestKnownResourcesWaitForTheirPlugins(t *testing.T) {
	t.Parallel()
	b := start(t, endpoint.Options{Known: []string{gpu, "example.com/never"}, Deadlines: endpoint.Deadlines{
		Grace: 3 * time.Second,
	}})
	if err := b.endpoint(gpu).PreStart(t.Context(), nil); !errors.Is(err, endpoint.ErrStopped) {
		t.Errorf("PreStart before the plugin is back: %v", err)
	}
	if o := b.endpoint(gpu).Options(); o.GetPreStartRequired() || o.GetGetPreferredAllocationAvailable() {
		t.Errorf("options before the plugin is back: %v", o)
	}
	b.connect("a.sock", 2)
	b.waitFor("example.com/never", "gone")
	if d := cmp.Diff([]string{"0 of 0 healthy", "2 of 2 healthy"}, counts(b.reports(gpu))); d != "" {
		t.Error(d)
	}
}

func TestReportsOfAResourceAreInOrder(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.connect("a.sock", 1)
	for n := 2; n < 300; n++ {
		p.SetDevices(plugintest.Devices(n)...)
	}
	b.waitFor(gpu, "299 of 299 healthy")
	p.Stop()
	b.waitFor(gpu, "0 of 299 healthy")
	reports := b.reports(gpu)
	if !slices.IsSortedFunc(reports, func(a, b report) int { return len(a.Devices) - len(b.Devices) }) {
		t.Errorf("out of order: %s", counts(reports))
	}
}

func TestACallbackMayAskTheRegistry(t *testing.T) {
	b := start(t, endpoint.Options{})
	b.onChange = func() { b.endpoint(gpu) }
	b.connect("a.sock", 2).Stop()
	b.waitFor(gpu, "0 of 2 healthy")
}

// perMiB is how many devices with IDs of the greatest length are a MiB.
const perMiB = 1024

// largeList returns devices whose message has a bit more than some MiB.
func largeList(mib int) []*v1beta1.Device {
	devices := plugintest.Devices(perMiB * mib)
	for i, d := range devices {
		d.ID = fmt.Sprintf("%0*d", 1<<20/perMiB, i)
	}
	return devices
}

func TestListsOfManyMegabytes(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.serve("a.sock", plugintest.New(gpu, largeList(60)...))
	b.register(p)
	b.wait(gpu, "large", func(r report) bool { return len(r.Devices) == 60*perMiB })
	p.SetDevices(plugintest.Devices(2)...)
	b.waitFor(gpu, "2 of 2 healthy")
}

func TestALargerListEndsTheStream(t *testing.T) {
	b := start(t, endpoint.Options{})
	b.register(b.serve("a.sock", plugintest.New(gpu, largeList(65)...)))
	b.waitFor(gpu, "0 of 0 healthy")
	b.waitLog("received message larger than max", 1)
}
