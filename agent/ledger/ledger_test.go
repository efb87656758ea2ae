package ledger

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	whole  = "nvidia.com/gpu"
	shared = "nvidia.com/gpu.shared"
)

// holder returns a container that holds devices of a resource.
func holder(pod, resourceName string, ids ...string) podresources.Holder {
	return podresources.Holder{
		Namespace: "default", Pod: pod, Container: "main", Devices: ids,
		ByResource: map[string][]string{resourceName: ids},
	}
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

// newLedger returns a ledger that reads what answer returns.
func newLedger(answer func() ([]podresources.Holder, error)) *Ledger {
	return New(Options{
		List:    func(context.Context) ([]podresources.Holder, error) { return answer() },
		InUse:   func(context.Context, string) (bool, error) { return false, nil },
		Changed: wake.New(), Log: slog.New(slog.DiscardHandler),
	})
}

func TestReason(t *testing.T) {
	for name, c := range map[string]struct {
		holders []podresources.Holder
		offered resource.Resource
		want    map[string]string // what the reasons of unhealthy devices contain, by device ID
	}{
		"no container holds a device": {nil, offer(whole, "GPU-a"), nil},
		"a container holds the device under its name": {
			[]podresources.Holder{holder("x", whole, "GPU-a")}, offer(whole, "GPU-a", "GPU-b"), nil,
		},
		"another plugin's whole GPUs have the same names": {
			[]podresources.Holder{holder("x", whole, "GPU-a"), holder("y", "example.com/nic", "nic-0")},
			offer(whole, "GPU-a"), nil,
		},
		"a whole GPU that is held becomes replicas": {
			[]podresources.Holder{holder("x", whole, "GPU-a")},
			offer(shared, "GPU-a::0", "GPU-a::1", "GPU-b::0"),
			map[string]string{
				"GPU-a::0": "container main of pod default/x holds it as GPU-a of nvidia.com/gpu",
				"GPU-a::1": "pod default/x",
			},
		},
		"a replica that is held becomes a whole GPU again": {
			[]podresources.Holder{holder("x", shared, "GPU-a::1")},
			offer(whole, "GPU-a", "GPU-b"),
			map[string]string{"GPU-a": "holds it as GPU-a::1 of nvidia.com/gpu.shared"},
		},
		"another plugin's replicas are of the same resource": {
			[]podresources.Holder{holder("x", whole, "GPU-a::0"), holder("y", whole, "GPU-b::3")},
			offer(whole, "GPU-a", "GPU-b", "GPU-c"),
			map[string]string{"GPU-a": "pod default/x", "GPU-b": "pod default/y"},
		},
		"more replicas have the same names": {
			[]podresources.Holder{holder("x", shared, "GPU-a::1")}, offer(shared, "GPU-a::0", "GPU-a::1", "GPU-a::2"), nil,
		},
		"fewer replicas lack the name": {
			[]podresources.Holder{holder("x", shared, "GPU-a::1")},
			offer(shared, "GPU-a::0"),
			map[string]string{"GPU-a::0": "pod default/x"},
		},
		"a GPU that is held is divided into MIG devices": {
			[]podresources.Holder{holder("x", whole, "GPU-a")},
			offer("nvidia.com/mig-1g.10gb", "MIG-1@GPU-a", "MIG-2@GPU-b"),
			map[string]string{"MIG-1": "pod default/x"},
		},
		"a MIG device changes its resource": {
			[]podresources.Holder{holder("x", whole, "MIG-1")},
			offer("nvidia.com/mig-1g.10gb", "MIG-1@GPU-a", "MIG-2@GPU-a"),
			map[string]string{"MIG-1": "holds it as MIG-1 of nvidia.com/gpu"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLedger(func() ([]podresources.Holder, error) { return c.holders, nil })
			l.Offer([]resource.Resource{c.offered})
			for i := range c.offered.Devices {
				d := &c.offered.Devices[i]
				got, want := l.Reason(d), c.want[d.ID]
				if (got == "") != (want == "") || !strings.Contains(got, want) {
					t.Errorf("%s: the reason is %q, want %q", d.ID, got, want)
				}
				err := l.Take(t.Context(), c.offered.Name, []*resource.Device{d})
				if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), d.ID+": "+got) {
					t.Errorf("%s: Take returns %v, want %q", d.ID, err, want)
				}
			}
		})
	}
}

// The kubelet lists a container some time after Allocate has returned.
func TestAContainerThatIsStartingHoldsItsDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var holders []podresources.Holder
		l := newLedger(func() ([]podresources.Holder, error) { return holders, nil })
		before, after := offer(whole, "GPU-a"), offer(shared, "GPU-a::0")
		replica := &after.Devices[0]
		l.Offer([]resource.Resource{before})
		if err := l.Take(t.Context(), whole, []*resource.Device{&before.Devices[0]}); err != nil {
			t.Fatal(err)
		}
		l.Offer([]resource.Resource{after})
		expect(t, l, replica, "a container that is starting holds it as GPU-a of nvidia.com/gpu")
		if err := l.Take(t.Context(), shared, []*resource.Device{replica}); err == nil {
			t.Error("another container gets the GPU")
		}
		holders = []podresources.Holder{holder("x", whole, "GPU-a")}
		read(t, l)
		expect(t, l, replica, "pod default/x")
		holders = nil
		read(t, l)
		expect(t, l, replica, "")

		// A container that the kubelet never lists has not started.
		l.Offer([]resource.Resource{before})
		if err := l.Take(t.Context(), whole, []*resource.Device{&before.Devices[0]}); err != nil {
			t.Fatal(err)
		}
		l.Offer([]resource.Resource{after})
		time.Sleep(settled)
		read(t, l)
		expect(t, l, replica, "a container that is starting")
		time.Sleep(time.Second)
		read(t, l)
		expect(t, l, replica, "")
	})
}

func expect(t *testing.T, l *Ledger, d *resource.Device, want string) {
	t.Helper()
	if got := l.Reason(d); (got == "") != (want == "") || !strings.Contains(got, want) {
		t.Errorf("%s: the reason is %q, want %q", d.ID, got, want)
	}
}

func read(t *testing.T, l *Ledger) {
	t.Helper()
	if _, err := l.Read(t.Context()); err != nil {
		t.Fatal(err)
	}
	l.checkEnding(t.Context())
}

// A kubelet that does not answer is no kubelet without containers.
func TestAKubeletThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex // of what follows
		holders, err := []podresources.Holder{holder("x", whole, "GPU-a")}, errors.New("no answer")
		answer := func(list []podresources.Holder, e error) {
			mu.Lock()
			defer mu.Unlock()
			holders, err = list, e
		}
		l := newLedger(func() ([]podresources.Holder, error) {
			mu.Lock()
			defer mu.Unlock()
			return holders, err
		})
		ctx, end := context.WithCancel(t.Context())
		defer end()
		offered := offer(shared, "GPU-a::0", "GPU-b::0")
		replica := &offered.Devices[0]
		l.Offer([]resource.Resource{offered})
		go func() { _ = l.Run(ctx) }()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if _, err := l.Held(); err == nil || !strings.Contains(l.Unknown(), "no answer") {
			t.Errorf("the containers are known: %q, error %v", l.Unknown(), err)
		}

		// A program that is no kubelet may never answer, so Allocate gives devices meanwhile.
		if err := l.Take(ctx, shared, []*resource.Device{&offered.Devices[1]}); err != nil {
			t.Errorf("while the containers are unknown, Take returns %v", err)
		}
		answer([]podresources.Holder{holder("x", whole, "GPU-a")}, nil)
		if err := l.Take(ctx, shared, []*resource.Device{replica}); err == nil ||
			!strings.Contains(err.Error(), "pod default/x") {
			t.Errorf("another container gets the GPU: %v", err)
		}
		if l.Unknown() != "" {
			t.Errorf("still unknown: %q", l.Unknown())
		}
		if held, err := l.Held(); err != nil || !held["GPU-a"] || !held["GPU-b"] { // which Allocate gave
			t.Errorf("held are %v, error %v", held, err)
		}

		// What was known stays known.
		answer(nil, errors.New("no answer"))
		time.Sleep(2 * interval)
		synctest.Wait()
		expect(t, l, replica, "pod default/x")
		again := offer(whole, "GPU-a")
		l.Offer([]resource.Resource{again})
		expect(t, l, &again.Devices[0], "")

		// A call of Allocate can be for a name that is not advertised any more.
		if err := l.Take(ctx, shared, []*resource.Device{replica}); err != nil {
			t.Error(err)
		}
		expect(t, l, &again.Devices[0], "a container that is starting holds it as GPU-a::0 of nvidia.com/gpu.shared")
		l.Offer([]resource.Resource{offered})
		expect(t, l, replica, "pod default/x")
		answer(nil, nil)
		time.Sleep(retryInterval)
		synctest.Wait()
		expect(t, l, replica, "")
	})
}

// Each change wakes the publisher once, which advertises the devices anew. The ledger logs who holds a device, and that
// the containers are unknown is a remark.
func TestChangesAreLoggedAndWakeThePublisher(t *testing.T) {
	var holders []podresources.Holder
	var failure error
	l := newLedger(func() ([]podresources.Holder, error) { return holders, failure })
	var log bytes.Buffer
	l.opts.Log = slog.New(slog.NewTextHandler(&log, nil))
	replicas := offer(shared, "GPU-a::0", "GPU-b::0")
	l.Offer([]resource.Resource{replicas})
	for _, step := range []struct {
		name    string
		holders []podresources.Holder
		err     error
		want    string // in the log; empty if nothing changes
	}{
		{"nothing is held", nil, nil, ""},
		{"a GPU is held", []podresources.Holder{holder("x", whole, "GPU-a")}, nil, "GPU-a is given to no other container"},
		{"it is still held", []podresources.Holder{holder("x", whole, "GPU-a")}, nil, ""},
		{"by another pod", []podresources.Holder{holder("y", whole, "GPU-a")}, nil, "pod default/y holds it as GPU-a"},
		{"of two pods the first counts", []podresources.Holder{
			holder("y", whole, "GPU-a"), holder("z", whole, "GPU-a"),
		}, nil, ""},
		{"and another GPU", []podresources.Holder{
			holder("y", whole, "GPU-a"), holder("z", whole, "GPU-b"),
		}, nil, "GPU-b is given to no other container"},
		{"no answer", nil, errors.New("no answer"), "it is unknown which containers hold devices"},
		{"still none", nil, errors.New("no answer"), ""},
		{
			"an answer, and a GPU is free",
			[]podresources.Holder{holder("y", whole, "GPU-a")},
			nil,
			"GPU-b is not held under an older name any more",
		},
		{"both are free", nil, nil, "GPU-a is not held under an older name any more"},
		{"a device of another plugin", []podresources.Holder{holder("x", "example.com/nic", "nic-0")}, nil, ""},
	} {
		t.Run(step.name, func(t *testing.T) {
			holders, failure = step.holders, step.err
			log.Reset()
			_, _ = l.Read(t.Context())
			l.checkEnding(t.Context())
			woken := len(l.opts.Changed) > 0
			if woken {
				<-l.opts.Changed
			}
			if l.Unknown() != "" && woken {
				log.WriteString(l.Unknown())
			}
			if woken != (step.want != "") || !strings.Contains(log.String(), step.want) || step.want == "" && log.Len() > 0 {
				t.Errorf("woken: %t, want %t; the log is %q, want %q", woken, step.want != "", &log, step.want)
			}
		})
	}

	// A GPU that is no longer offered is not reported when its holder ends.
	holders = []podresources.Holder{holder("x", whole, "GPU-a")}
	read(t, l)
	log.Reset()
	l.Offer(nil)
	if log.Len() > 0 {
		t.Errorf("a GPU that is gone is logged: %q", &log)
	}
}

func TestTheIDsThatAreHeld(t *testing.T) {
	l := newLedger(func() ([]podresources.Holder, error) {
		return []podresources.Holder{holder("x", whole, "GPU-a"), holder("y", "example.com/nic", "nic-0")}, nil
	})
	offered := offer(whole, "GPU-a", "GPU-b", "GPU-c")
	l.Offer([]resource.Resource{offered})
	testenv.Must(t, l.Take(t.Context(), whole, []*resource.Device{&offered.Devices[2]}))
	if diff := cmp.Diff(map[string]bool{"GPU-a": true, "nic-0": true, "GPU-c": true}, l.IDs()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}
