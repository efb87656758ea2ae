package endpoint_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/manager/dialect"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/test/lib/plugintest"
)

func TestDialectB1TheEndOfAnOldInstanceDisconnectsTheNewOne(t *testing.T) {
	b := start(t, endpoint.Options{Dialect: dialect.Dialect{OldInstanceDisconnectsNew: true}})
	p1 := b.connect("a.sock", 4)
	p2 := b.serve("b.sock", plugintest.New(gpu, plugintest.Devices(5)...))
	b.register(p2)
	b.waitFor(gpu, "5/5")
	p1.Stop()
	b.waitFor(gpu, "0/5")
	b.waitCalls(p2, func(c plugintest.Calls) bool { return c.Ended == 1 })
	if _, err := b.endpoint(gpu).Allocate(t.Context(), []string{"gpu-0000"}); !errors.Is(err, endpoint.ErrStopped) {
		t.Errorf("Allocate: %v", err)
	}
	b.register(p2) // as somebody must
	b.waitFor(gpu, "5/5")
}

func TestDialectB1bTheEndOfAPluginAfterAFailedRegistrationIsNotNoticed(t *testing.T) {
	t.Parallel()
	b := start(t, endpoint.Options{
		Dialect:   dialect.Dialect{FailedRegistrationOrphans: true},
		Deadlines: endpoint.Deadlines{Dial: 2 * time.Second},
	})
	p := b.connect("a.sock", 2)
	b.failRegistration()
	p.Stop()
	b.waitLog(gone, 1)
	if d := cmp.Diff([]string{"2/2"}, counts(b.reports(gpu))); d != "" {
		t.Error(d)
	}
	_, err := b.endpoint(gpu).Allocate(t.Context(), []string{"gpu-0000"})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("Allocate: %v", err)
	}
	b.serve("a.sock", p)
	b.register(p)
	p.SetDevices(plugintest.Devices(3)...)
	b.waitFor(gpu, "3/3")
	p.Stop()
	b.waitFor(gpu, "0/3")
}

func TestDialectB9CallsHaveNoDeadlines(t *testing.T) {
	limit := time.Millisecond
	b := start(t, endpoint.Options{
		Dialect:   dialect.Dialect{NoTimeouts: true},
		Deadlines: endpoint.Deadlines{Options: limit, Allocate: limit, Preferred: limit, PreStart: limit},
	})
	p := b.connect("a.sock", 1)
	slow := func(context.Context) error { // much slower than the deadlines
		time.Sleep(50 * limit)
		return nil
	}
	p.Behave(answer(slow))
	b.register(p)
	for name, call := range calls {
		want := codes.OK
		if name == "PreStart" { // the one call for which the kubelet has a deadline
			want = codes.DeadlineExceeded
		}
		if err := call(t.Context(), b.endpoint(gpu)); status.Code(err) != want {
			t.Errorf("%s: %v", name, err)
		}
	}
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

// B13.
func TestListsOfManyMegabytes(t *testing.T) {
	b := start(t, endpoint.Options{})
	p := b.serve("a.sock", plugintest.New(gpu, largeList(60)...))
	b.register(p)
	b.wait(gpu, "large", func(r report) bool { return len(r.Devices) == 60*perMiB })
	p.SetDevices(plugintest.Devices(2)...)
	b.waitFor(gpu, "2/2")
}

func TestALargerListEndsTheStream(t *testing.T) {
	b := start(t, endpoint.Options{})
	b.register(b.serve("a.sock", plugintest.New(gpu, largeList(65)...)))
	b.waitFor(gpu, "0/0")
	b.waitLog("received message larger than max", 1)
}

func TestDialectB13SmallLists(t *testing.T) {
	b := start(t, endpoint.Options{Dialect: dialect.Dialect{SmallLists: true}})
	p := b.serve("a.sock", plugintest.New(gpu, largeList(3)...))
	b.register(p)
	b.wait(gpu, "there", func(r report) bool { return len(r.Devices) == 3*perMiB })
	p.SetDevices(largeList(5)...)
	b.wait(gpu, "disconnected", func(r report) bool { return !r.Connected })
}

func TestDialectRefusesConnectedSocket(t *testing.T) {
	b := start(t, endpoint.Options{Dialect: dialect.Dialect{RefusesConnectedSocket: true}})
	p := b.connect("a.sock", 2)
	want := "device plugin already connected: " + b.dir + "/a.sock"
	if got := b.refused(request(gpu, "a.sock")); got != want {
		t.Errorf("a second registration: %s", got)
	}
	p.SetDevices(plugintest.Devices(3)...) // the first one is not touched
	b.waitFor(gpu, "3/3")
	b.register(b.serve("b.sock", plugintest.New(gpu, plugintest.Devices(4)...)))
	b.waitFor(gpu, "4/4")
	p.Stop()
	b.waitLog(gone, 1)
	b.serve("a.sock", p)
	b.register(p) // as it is not connected any more
	b.waitFor(gpu, "3/3")
}

func TestDialectsOfReleases(t *testing.T) {
	for _, name := range dialect.Names() {
		d, err := dialect.New(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) {
			b := start(t, endpoint.Options{Dialect: d})
			p1 := b.connect("a.sock", 4)
			b.register(b.serve("b.sock", plugintest.New(gpu, plugintest.Devices(5)...)))
			b.waitFor(gpu, "5/5")
			p1.Stop()
			b.waitLog(gone, 1)
			shown := b.resources()[0]
			want := name != "kubelet-1.36"
			if shown.Connected != want || shown.Devices[0].Healthy != want {
				t.Errorf("after the end of the old instance: connected %t", shown.Connected)
			}
		})
	}
}
