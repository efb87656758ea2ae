package ledger

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The kubelet accounts for devices that are held under a name that is advertised.
func TestReason(t *testing.T) {
	for name, c := range map[string]struct {
		entries []kubelet.Entry
		offered resource.Resource
		want    map[string]string // what the reasons of unhealthy devices contain, by device ID
	}{
		"no container holds a device": {nil, offer(whole, "GPU-a"), nil},
		"a container holds the device under its name": {
			[]kubelet.Entry{recorded("x", whole, "GPU-a")}, offer(whole, "GPU-a", "GPU-b"), nil,
		},
		"another plugin's whole GPUs have the same names": {
			[]kubelet.Entry{recorded("x", whole, "GPU-a"), recorded("y", "example.com/nic", "nic-0")},
			offer(whole, "GPU-a"), nil,
		},
		"a whole GPU that is held becomes replicas": {
			[]kubelet.Entry{recorded("x", whole, "GPU-a")},
			offer(shared, "GPU-a::0", "GPU-a::1", "GPU-b::0"),
			map[string]string{
				"GPU-a::0": "container main of pod default/x-pod holds it as GPU-a of nvidia.com/gpu",
				"GPU-a::1": "pod default/x-pod",
			},
		},
		"a replica that is held becomes a whole GPU again": {
			[]kubelet.Entry{recorded("x", shared, "GPU-a::1")},
			offer(whole, "GPU-a", "GPU-b"),
			map[string]string{"GPU-a": "holds it as GPU-a::1 of nvidia.com/gpu.shared"},
		},
		"another plugin's replicas are of the same resource": {
			[]kubelet.Entry{recorded("x", whole, "GPU-a::0"), recorded("y", whole, "GPU-b::3")},
			offer(whole, "GPU-a", "GPU-b", "GPU-c"),
			map[string]string{"GPU-a": "pod default/x-pod", "GPU-b": "pod default/y-pod"},
		},
		"more replicas have the same names": {
			[]kubelet.Entry{recorded("x", shared, "GPU-a::1")}, offer(shared, "GPU-a::0", "GPU-a::1", "GPU-a::2"), nil,
		},
		"fewer replicas lack the name": {
			[]kubelet.Entry{recorded("x", shared, "GPU-a::1")},
			offer(shared, "GPU-a::0"),
			map[string]string{"GPU-a::0": "pod default/x-pod"},
		},
		"a GPU that is held is divided into MIG devices": {
			[]kubelet.Entry{recorded("x", whole, "GPU-a")},
			offer("nvidia.com/mig-1g.10gb", "MIG-1@GPU-a", "MIG-2@GPU-b"),
			map[string]string{"MIG-1": "pod default/x-pod"},
		},
		"a MIG device changes its resource": {
			[]kubelet.Entry{recorded("x", whole, "MIG-1")},
			offer("nvidia.com/mig-1g.10gb", "MIG-1@GPU-a", "MIG-2@GPU-a"),
			map[string]string{"MIG-1": "holds it as MIG-1 of nvidia.com/gpu"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet()
			k.entries = c.entries
			for i := range c.entries {
				e := &c.entries[i]
				k.holders = append(k.holders, listed(e.PodUID+"-pod", e.ResourceName, e.IDs()...))
			}
			l := k.refreshed(t)
			l.Offer(nil, []resource.Resource{c.offered})
			for i := range c.offered.Devices {
				d := &c.offered.Devices[i]
				expect(t, l, d, c.want[d.ID])
				got := reasonOf(l, d)
				err := l.Take(t.Context(), c.offered.Name, []*resource.Device{d})
				if (err == nil) != (c.want[d.ID] == "") || err != nil && !strings.Contains(err.Error(), d.ID+": "+got) {
					t.Errorf("%s: Take returns %v, want %q", d.ID, err, c.want[d.ID])
				}
			}
		})
	}
}

// The kubelet records a container some time after Allocate has returned.
func TestAContainerThatIsStartingHoldsItsDevices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet()
		l := k.refreshed(t)
		before, after := offer(whole, "GPU-a"), offer(shared, "GPU-a::0")
		replica := &after.Devices[0]
		l.Offer(nil, []resource.Resource{before})
		testenv.Must(t, l.Take(t.Context(), whole, []*resource.Device{&before.Devices[0]}))
		l.Offer(nil, []resource.Resource{after})
		expect(t, l, replica, "a container that is starting holds it as GPU-a of nvidia.com/gpu")
		if err := l.Take(t.Context(), shared, []*resource.Device{replica}); err == nil {
			t.Error("another container gets the GPU")
		}
		refresh(t, l) // too soon to say anything
		refresh(t, l)
		expect(t, l, replica, "a container that is starting")
		k.set(func() { k.entries = []kubelet.Entry{recorded("x", whole, "GPU-a")} })
		read(t, l)
		expect(t, l, replica, "the UID x")
		k.set(func() { k.entries = nil })
		refresh(t, l)
		refresh(t, l)
		expect(t, l, replica, "")

		// A container that two refreshes do not show has not started.
		l.Offer(nil, []resource.Resource{before})
		testenv.Must(t, l.Take(t.Context(), whole, []*resource.Device{&before.Devices[0]}))
		l.Offer(nil, []resource.Resource{after})
		time.Sleep(settled)
		refresh(t, l)
		expect(t, l, replica, "a container that is starting")
		refresh(t, l)
		expect(t, l, replica, "")
	})
}

// What a pod has that is deleted by force is advertised as unhealthy until its processes have ended, and given all the
// same if the kubelet asks: it asks for it once only, and the start waits.
func TestAPodThatIsDeletedByForce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet()
		k.entries, k.pods = []kubelet.Entry{recorded("old", whole, "GPU-a")}, []string{"old"}
		l := k.refreshed(t)
		go func() { _ = l.Run(t.Context()) }()
		offered := offer(whole, "GPU-a", "GPU-b")
		l.Offer(nil, []resource.Resource{offered})
		device := []*resource.Device{&offered.Devices[0]}
		k.set(func() { k.entries = nil })
		read(t, l)
		expect(t, l, device[0], "") // a pod that the kubelet gives it has its start wait
		time.Sleep(endingSoon)
		read(t, l)
		if why, ending := l.Reason(device[0]); why == "" || !ending {
			t.Errorf("%q, ending: %t", why, ending)
		}
		testenv.Must(t, l.Take(t.Context(), whole, device))
		k.set(func() { k.entries = []kubelet.Entry{recorded("new", whole, "GPU-a")}; k.pods = []string{"old", "new"} })

		limited, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		err := l.AwaitFree(limited, whole, []string{"GPU-a"}, device)
		_, held := errors.AsType[*HeldError](err)
		if !held || !strings.Contains(err.Error(), "the UID old, which is ending") {
			t.Errorf("the container starts beside the old one: %v", err)
		}
		// The old pod itself is no other pod, should the kubelet start its container once more.
		testenv.Must(t, l.AwaitFree(soon(t), whole, []string{"GPU-b"}, []*resource.Device{&offered.Devices[1]}))
		time.AfterFunc(2*time.Second, func() { k.set(func() { k.pods = []string{"new"} }) })
		begun := time.Now()
		testenv.Must(t, l.AwaitFree(t.Context(), whole, []string{"GPU-a"}, device))
		if took := time.Since(begun); took < 2*time.Second || took > 3*time.Second {
			t.Errorf("the start waited %v", took)
		}
	})
}

// A claim may have been prepared by another instance since Allocate gave its device.
func TestAContainerDoesNotStartBesideAClaim(t *testing.T) {
	l := newKubelet().refreshed(t)
	offered := offer(whole, "GPU-a")
	l.Offer(nil, []resource.Resource{offered})
	device := []*resource.Device{&offered.Devices[0]}
	testenv.Must(t, l.Take(t.Context(), whole, device))
	l.RestoreClaim(claimOf("1", "team/x", Portion{Device: device[0], Admin: true}), time.Now())
	testenv.Must(t, l.AwaitFree(soon(t), whole, []string{"GPU-a"}, device)) // it only observes the device
	l.RestoreClaim(claimOf("1", "team/x", Portion{Device: device[0]}), time.Now())
	err := l.AwaitFree(soon(t), whole, []string{"GPU-a"}, device)
	if _, held := errors.AsType[*HeldError](err); !held || !strings.Contains(err.Error(), "ResourceClaim team/x") {
		t.Errorf("the container starts beside the claim: %v", err)
	}
}

// A container of a pod may have what another container of the pod has had.
func TestThePodThatStartsIsNoOtherPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet()
		k.entries = []kubelet.Entry{
			recorded("p/init", whole, "GPU-a", "GPU-b"), recorded("p/main", whole, "GPU-a"),
			recorded("q/main", shared, "GPU-c::0"),
		}
		l := k.refreshed(t)
		offered := offer(shared, "GPU-a::0", "GPU-b::0", "GPU-c::0", "GPU-c::1")
		l.Offer(nil, []resource.Resource{offered})
		both := devicesOf("GPU-a", "GPU-b")
		testenv.Must(t,
			l.AwaitFree(soon(t), whole, []string{"GPU-a", "GPU-b"}, both), // under names that are not advertised any more
			l.AwaitFree(soon(t), whole, []string{"GPU-a"}, both[:1]),
			l.AwaitFree(soon(t), shared, []string{"GPU-c::1"}, []*resource.Device{&offered.Devices[3]})) // beside a replica
		if err := l.AwaitFree(soon(t), shared, []string{"GPU-a::0"}, []*resource.Device{&offered.Devices[0]}); err == nil {
			t.Error("another pod starts with a replica of a GPU that is held whole")
		}
	})
}

// The kubelet gives a name again whose pod is not active any more by its own account; the new pod waits for its end.
func TestANameThatTheKubeletGivesAgain(t *testing.T) {
	for name, c := range map[string]struct {
		then func(*fakeKubelet)
		held bool
	}{
		"the kubelet does not answer": {func(k *fakeKubelet) { k.err = errors.New("rejected by rate limit") }, true},
		"an older checkpoint has overwritten that with the new pod": {
			func(k *fakeKubelet) { k.holders = []podresources.Holder{listed("new", whole, "GPU-a")} }, true,
		},
		"the old pod runs": {func(k *fakeKubelet) { k.entries = []kubelet.Entry{recorded("new", whole, "GPU-a")} }, true},
		"the old pod has ended": {func(k *fakeKubelet) {
			k.entries, k.pods = []kubelet.Entry{recorded("new", whole, "GPU-a")}, nil
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet()
			k.entries, k.pods = []kubelet.Entry{recorded("old", whole, "GPU-a")}, []string{"old"}
			l := k.refreshed(t)
			l.Offer(nil, []resource.Resource{offer(whole, "GPU-a")})
			refresh(t, l)
			testenv.Must(t, l.Take(t.Context(), whole, devicesOf("GPU-a")))
			k.set(func() { c.then(k) })
			_, _ = l.Read(t.Context())
			if err := l.AwaitFree(soon(t), whole, []string{"GPU-a"}, devicesOf("GPU-a")); (err != nil) != c.held {
				t.Errorf("the new pod waits for %v, want a wait: %t", err, c.held)
			}
		})
	}
}

// A kubelet that does not answer is no kubelet without containers.
func TestAKubeletThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet()
		k.entries, k.err = []kubelet.Entry{recorded("x", whole, "GPU-a")}, errors.New("no answer")
		k.names[shared] = []string{"GPU-a::0", "GPU-b::0"} // a predecessor has advertised them
		l := k.ledger()
		offered := offer(shared, "GPU-a::0", "GPU-b::0")
		replica := &offered.Devices[0]
		l.Offer(nil, []resource.Resource{offered})
		go func() { _ = l.Run(t.Context()) }()
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if _, err := l.Held(); err == nil || !strings.Contains(l.Unknown(), "no answer") {
			t.Errorf("the containers are known: %q, error %v", l.Unknown(), err)
		}
		// A program that is no kubelet may never answer, so Allocate gives devices meanwhile.
		testenv.Must(t, l.Take(t.Context(), shared, []*resource.Device{&offered.Devices[1]}))
		k.set(func() { k.err = nil })
		read(t, l)
		if err := l.Take(t.Context(), shared, []*resource.Device{replica}); err == nil ||
			!strings.Contains(err.Error(), "the UID x holds it") {
			t.Errorf("another container gets the GPU: %v", err)
		}
		if l.Unknown() != "" {
			t.Errorf("still unknown: %q", l.Unknown())
		}
		if held, err := l.Held(); err != nil || !held["GPU-a"] || !held["GPU-b"] { // which Allocate gave
			t.Errorf("held are %v, error %v", held, err)
		}
	})
}

// A file that cannot be read says nothing: it is no empty file.
func TestAFileThatCannotBeRead(t *testing.T) {
	k := newKubelet()
	k.damaged = errors.New("kubelet_internal_checkpoint: no JSON")
	l := k.ledger()
	l.Offer(nil, []resource.Resource{offer(whole, "GPU-a")})
	if _, err := l.Held(); err == nil || !strings.Contains(l.Unknown(), "no JSON") {
		t.Errorf("the containers are known: %q", l.Unknown())
	}
	if err := l.TakeClaim(soon(t), Claim{UID: "1", Name: "a/b", Portions: portionsOf("GPU-a")}); err == nil {
		t.Error("a claim gets a device")
	}
	k.set(func() { k.damaged = nil })
	refresh(t, l)
	testenv.Must(t, l.TakeClaim(soon(t), Claim{UID: "1", Name: "a/b", Portions: portionsOf("GPU-a")}))
}

// A name that the kubelet did not have before this process began is not given before the kubelet has recorded what it
// gave under older names.
func TestNamesThatAreNewToTheKubelet(t *testing.T) {
	for name, c := range map[string]struct {
		kubelet func(*fakeKubelet)
		id      string
		unread  bool
	}{
		"a name that the predecessor had": {func(*fakeKubelet) {}, "GPU-a", false},
		"a new name":                      {func(*fakeKubelet) {}, "GPU-b", true},
		"a new name, and no GPU had one": {func(k *fakeKubelet) {
			k.names = map[string][]string{"example.com/nic": {"eth0"}}
		}, "GPU-b", false},
		"a new name, and no file":    {func(k *fakeKubelet) { k.version = 0 }, "GPU-b", false},
		"a new name, and no kubelet": {func(k *fakeKubelet) { k.stopped = true }, "GPU-b", false},
		"a new name, and a kubelet that does not answer": {
			func(k *fakeKubelet) { k.err = errors.New("rejected by rate limit") }, "GPU-b", true,
		},
		"an old name, and a kubelet that does not answer": {
			func(k *fakeKubelet) { k.err = errors.New("rejected by rate limit") }, "GPU-a", false,
		},
		"a file that cannot be read": {func(k *fakeKubelet) { k.damaged = errors.New("no JSON") }, "GPU-a", true},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet()
			k.names[whole] = []string{"GPU-a"}
			c.kubelet(k)
			l := k.ledger()
			offered := offer(whole, c.id)
			d := &offered.Devices[0]
			l.Offer(nil, []resource.Resource{offered})
			if why := l.Unread(whole, d); (why != "") != c.unread {
				t.Errorf("%q, want withheld: %t", why, c.unread)
			}
			if err := l.Ready(); (err != nil) != c.unread {
				t.Errorf("the readiness is %v, want withheld: %t", err, c.unread)
			}
			if err := l.Take(t.Context(), whole, []*resource.Device{d}); (err != nil) != c.unread {
				t.Errorf("Take returns %v, want withheld: %t", err, c.unread)
			}
			if !c.unread {
				return
			}
			k.set(func() { k.err, k.damaged = nil, nil })
			refresh(t, l)
			if why := l.Unread(whole, d); why != "" {
				t.Errorf("after a refresh: %q", why)
			}
		})
	}
}

// While another instance still gives devices, what the kubelet writes need not have all of them.
func TestNamesThatAreNewBesideAnotherInstance(t *testing.T) {
	k := newKubelet()
	k.names[whole] = []string{"GPU-a"}
	l := New(Options{
		Beside: true, Kubelet: k, Driver: driver, Resend: k.resend, Pods: k.running, Changed: wake.New(),
		Log: slog.New(slog.DiscardHandler),
	})
	offered := offer(whole, "GPU-a", "GPU-b")
	l.Offer(nil, []resource.Resource{offered})
	refresh(t, l)
	refresh(t, l)
	expect := func(withheld bool) {
		t.Helper()
		if why := l.Unread(whole, &offered.Devices[1]); (why != "") != withheld {
			t.Errorf("%q, want withheld: %t", why, withheld)
		}
		err := l.TakeClaim(soon(t), claimOf("1", "team/x", portionsOf("GPU-a")...))
		if (err != nil) != withheld {
			t.Errorf("a claim: %v, want withheld: %t", err, withheld)
		}
	}
	expect(true)
	l.Alone()
	expect(true)
	refresh(t, l)
	expect(false)
}

// An older version of the checkpoint may overwrite a newer one. The kubelet itself gives no device twice because of
// that, and no claim gets one.
func TestAnOlderVersionOfTheCheckpoint(t *testing.T) {
	k := newKubelet()
	l := k.ledger()
	offered := offer(whole, "GPU-a")
	l.Offer(nil, []resource.Resource{offered})
	pod := []kubelet.Entry{recorded("pulls-its-image", whole, "GPU-a")}
	k.set(func() { k.entries = pod })
	refresh(t, l)
	expectClaim := func(want string) {
		t.Helper()
		err := l.TakeClaim(soon(t), claimOf("1", "team/x", portionsOf("GPU-a")...))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("a claim: %v, want %q", err, want)
		}
	}
	k.set(func() { k.entries = nil })
	refresh(t, l)
	expectClaim("pulls-its-image")
	expect(t, l, &offered.Devices[0], "") // the kubelet accounts for it
	k.set(func() { k.entries = pod })
	refresh(t, l)
	expectClaim("pulls-its-image")
	k.set(func() { k.entries = nil })
	refresh(t, l)
	refresh(t, l)
	expectClaim("")
}

// An entry that is in the file again is not that of the pod that has just been given its device.
func TestAnOlderVersionOfTheCheckpointAfterAllocate(t *testing.T) {
	k := newKubelet()
	old := []kubelet.Entry{recorded("deleted-by-force", whole, "GPU-a")}
	k.entries, k.pods = old, []string{"deleted-by-force"}
	l := k.refreshed(t)
	l.Offer(nil, []resource.Resource{offer(whole, "GPU-a")})
	k.set(func() { k.entries = nil })
	refresh(t, l)
	testenv.Must(t, l.Take(t.Context(), whole, devicesOf("GPU-a")))
	k.set(func() { k.entries = old })
	read(t, l)
	if err := l.AwaitFree(soon(t), whole, []string{"GPU-a"}, devicesOf("GPU-a")); err == nil {
		t.Error("the container starts beside the pod that was deleted")
	}
}

// The kubelet gives a device again as soon as its pod has ended, and writes its checkpoint later. Such a device must
// not be unhealthy when the checkpoint is read.
func TestADeviceOfAPodThatHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, blind := range []bool{false, true} {
			k := newKubelet(listed("x-pod", whole, "GPU-a"))
			k.entries, k.pods, k.blind = []kubelet.Entry{recorded("x", whole, "GPU-a")}, []string{"x"}, blind
			l := k.refreshed(t)
			offered := offer(whole, "GPU-a")
			l.Offer(nil, []resource.Resource{offered})
			ctx, end := context.WithCancel(t.Context())
			run := make(chan error)
			go func() { run <- l.Run(ctx) }()
			k.mu.Lock()
			k.holders, k.pods = nil, nil // the file still has the pod
			before := k.messages
			k.mu.Unlock()
			time.Sleep(interval + time.Second)
			synctest.Wait()
			k.mu.Lock()
			if k.messages == before {
				t.Error("the kubelet is not asked to write its checkpoint")
			}
			k.mu.Unlock()
			k.set(func() { k.entries = nil })
			read(t, l)
			expect(t, l, &offered.Devices[0], "")
			time.Sleep(2 * interval)
			synctest.Wait()
			if held, err := l.Held(); err != nil || held["GPU-a"] {
				t.Errorf("still held: %v, error %v", held, err)
			}
			end()
			testenv.Must(t, <-run)
		}
	})
}

// Nothing is asked of the kubelet at rest but what it lists.
func TestWhenTheBooksAreRefreshed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet()
		k.entries, k.pods = []kubelet.Entry{recorded("x", whole, "GPU-a")}, []string{"x"}
		k.unwatched = true
		l := k.ledger()
		l.Offer(nil, []resource.Resource{offer(whole, "GPU-a"), offer(shared)})
		go func() { _ = l.Run(t.Context()) }()
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := l.begun.Load(); n > 15 {
			t.Errorf("%d reads in a minute without a kubelet that watches", n)
		}
		k.mu.Lock()
		k.unwatched, k.messages = false, 0
		k.mu.Unlock()
		l.Wake()
		messages := func(within time.Duration) int {
			k.mu.Lock()
			before := k.messages
			k.mu.Unlock()
			time.Sleep(within)
			synctest.Wait()
			k.mu.Lock()
			defer k.mu.Unlock()
			return k.messages - before
		}
		if n := messages(time.Minute); n != agreeing {
			t.Errorf("%d refreshes in the first minute, want %d", n, agreeing)
		}
		if n := messages(time.Hour); n != 0 {
			t.Errorf("%d refreshes at rest", n)
		}
		// A pod that holds what the kubelet does not account for, with processes, and then without.
		l.Offer(nil, []resource.Resource{offer(whole), offer(shared, "GPU-a::0")})
		if n := messages(time.Minute); n != 0 {
			t.Errorf("%d refreshes for a pod that runs", n)
		}
		k.set(func() { k.holders = []podresources.Holder{listed("x-pod", whole, "GPU-a")} })
		if messages(interval + time.Second); l.books.needsProcesses() {
			t.Error("the processes of a pod are looked for that PodResources lists")
		}
		k.set(func() { k.holders = nil })
		k.set(func() { k.pods = nil })
		if n := messages(time.Minute); n < 11 || n > 13 {
			t.Errorf("%d refreshes in a minute for a pod without processes, want one each 5 s", n)
		}
		k.set(func() { k.entries = nil })
		if n := messages(time.Minute); n > 3 {
			t.Errorf("%d refreshes after its end", n)
		}
		k.set(func() { k.damaged = errors.New("no JSON") })
		if n := messages(time.Minute); n < 11 || n > 13 {
			t.Errorf("%d refreshes in a minute for a file that cannot be read, want one each 5 s", n)
		}
		k.set(func() { k.damaged = nil })
		if n := messages(time.Minute); n > 1 {
			t.Errorf("%d refreshes after that", n)
		}
		// A program that writes no file is no kubelet.
		k.mu.Lock()
		k.writes = false
		k.mu.Unlock()
		testenv.Must(t, l.Take(t.Context(), shared, devicesOf("GPU-a::0")))
		if n := messages(time.Hour); n != 12 {
			t.Errorf("%d refreshes where no file is written, want 12", n)
		}
	})
}

// Each change wakes the publisher once, which advertises the devices anew. The ledger logs who holds a device, and that
// the containers are unknown is a remark.
func TestChangesAreLoggedAndWakeThePublisher(t *testing.T) {
	k := newKubelet()
	l := k.refreshed(t)
	var log bytes.Buffer
	l.opts.Log = slog.New(slog.NewTextHandler(&log, nil))
	replicas := offer(shared, "GPU-a::0", "GPU-b::0")
	l.Offer(nil, []resource.Resource{replicas})
	x, y, z := recorded("x", whole, "GPU-a"), recorded("y", whole, "GPU-a"), recorded("z", whole, "GPU-b")
	for _, step := range []struct {
		name    string
		entries []kubelet.Entry
		err     error
		want    string // in the log; empty if nothing changes
	}{
		{"nothing is held", nil, nil, ""},
		{"a GPU is held", []kubelet.Entry{x}, nil, "GPU-a is given to no other container"},
		{"it is still held", []kubelet.Entry{x}, nil, ""},
		{"by another pod", []kubelet.Entry{y}, nil, "the UID y holds it as GPU-a"},
		{"and another GPU", []kubelet.Entry{y, z}, nil, "GPU-b is given to no other container"},
		{"no answer", nil, errors.New("no answer"), "it is unknown which containers hold devices"},
		{"still none", nil, errors.New("no answer"), ""},
		{"an answer, and a GPU is free", []kubelet.Entry{y}, nil, "GPU-b is not held under an older name any more"},
		{"both are free", nil, nil, "GPU-a is not held under an older name any more"},
		{"a device of another plugin", []kubelet.Entry{recorded("x", "example.com/nic", "nic-0")}, nil, ""},
	} {
		t.Run(step.name, func(t *testing.T) {
			k.set(func() { k.entries, k.err = step.entries, step.err })
			log.Reset()
			_ = l.refresh(t.Context())
			_ = l.refresh(t.Context())
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
}

// The publisher asks more than for the holders of other names, and nothing else wakes it.
func TestEachChangeOfAnAnswerWakesThePublisher(t *testing.T) {
	replicas := offer(shared, "GPU-a::0", "GPU-a::1")
	pod := recorded("x", shared, "GPU-a::0")
	for name, c := range map[string]struct{ before, after func(k *fakeKubelet) }{
		"the kubelet drops a claim without a record": {
			func(k *fakeKubelet) { k.claims, k.pods = []kubelet.Claim{prepared("c", "x", "gpu-a")}, nil },
			func(k *fakeKubelet) { k.claims = nil },
		},
		"a pod that was deleted by force holds the device of the same name": {
			func(k *fakeKubelet) { k.entries, k.pods = []kubelet.Entry{pod}, []string{"x"} },
			func(k *fakeKubelet) { k.entries = nil },
		},
		"such a pod has ended": {
			func(k *fakeKubelet) { k.pods = []string{"x"} }, func(k *fakeKubelet) { k.pods = nil },
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newKubelet()
				k.entries = []kubelet.Entry{pod}
				l := k.refreshed(t)
				l.Offer(nil, []resource.Resource{replicas})
				k.set(func() { k.entries = nil; c.before(k) })
				refresh(t, l)
				time.Sleep(endingSoon)
				refresh(t, l)
				for len(l.opts.Changed) > 0 {
					<-l.opts.Changed
				}
				k.set(func() { c.after(k) })
				refresh(t, l)
				time.Sleep(endingSoon)
				refresh(t, l)
				if len(l.opts.Changed) == 0 {
					t.Error("the publisher is not woken")
				}
			})
		})
	}
	t.Run("the kubelet has written its checkpoint", func(t *testing.T) {
		k := newKubelet()
		k.names[whole] = []string{"GPU-a"}
		l := k.ledger()
		l.Offer(nil, []resource.Resource{replicas})
		for len(l.opts.Changed) > 0 {
			<-l.opts.Changed
		}
		if l.Unread(shared, &replicas.Devices[0]) == "" {
			t.Fatal("a name that is new to the kubelet can be given at once")
		}
		refresh(t, l)
		if l.Unread(shared, &replicas.Devices[0]) != "" || len(l.opts.Changed) == 0 {
			t.Error("the publisher is not woken")
		}
	})
}

func TestTheIDsThatAreHeld(t *testing.T) {
	k := newKubelet(listed("x", whole, "GPU-b"))
	k.entries = []kubelet.Entry{recorded("x/init", whole, "GPU-a"), recorded("y", "example.com/nic", "nic-0")}
	l := k.refreshed(t)
	offered := offer(whole, "GPU-a", "GPU-b", "GPU-c")
	l.Offer(nil, []resource.Resource{offered})
	testenv.Must(t, l.Take(t.Context(), whole, []*resource.Device{&offered.Devices[2]}))
	if diff := cmp.Diff(map[string]bool{"GPU-a": true, "GPU-b": true, "GPU-c": true}, l.IDs()); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// What a later process knows of MIG devices that are gone, and of what an administrator has had forgotten.
func TestARestart(t *testing.T) {
	dir := t.TempDir()
	k := newKubelet()
	k.entries = []kubelet.Entry{recorded("p", "nvidia.com/mig-1g.10gb", migA)}
	start := func(ids ...string) (*Ledger, *resource.Resource) {
		l := New(Options{
			Kubelet: k, Driver: driver, Resend: k.resend, Pods: k.running, Changed: wake.New(),
			Log:   slog.New(slog.DiscardHandler),
			Files: Files{Parents: filepath.Join(dir, "parents.json"), Forgotten: filepath.Join(dir, "forgotten.json")},
		})
		r := offer(whole, ids...)
		l.Offer(nil, []resource.Resource{r})
		refresh(t, l)
		refresh(t, l)
		return l, &r
	}
	start(migA + "@" + uuidA)
	l, r := start(uuidA, uuidB)
	expect(t, l, &r.Devices[0], "holds it as "+migA)
	expect(t, l, &r.Devices[1], "")
	l, r = start(uuidA, uuidB)
	expect(t, l, &r.Devices[0], "holds it as "+migA)
	testenv.Must(t, l.Forget(t.Context(), "p/main/"+migA, false))
	l, r = start(uuidA, uuidB)
	expect(t, l, &r.Devices[0], "")
	if got := l.Holdings(); len(got) != 1 || got[0].State != Forgotten {
		t.Errorf("the holdings are %v", got)
	}
	k.set(func() { k.entries = nil })
	start(uuidA, uuidB)
	k.set(func() { k.entries = []kubelet.Entry{recorded("p", "nvidia.com/mig-1g.10gb", migA+"@"+uuidA)} })
	l, r = start(uuidA, uuidB)
	expect(t, l, &r.Devices[0], "holds it as "+migA) // what is forgotten is so until the kubelet drops it
}

// The kubelet can lose its files while pods run, also before another process serves.
func TestAKubeletThatLosesItsFiles(t *testing.T) {
	synctest.Test(t, testAKubeletThatLosesItsFiles)
}

func testAKubeletThatLosesItsFiles(t *testing.T) {
	dir := t.TempDir()
	k := newKubelet()
	r := offer(whole, uuidA, uuidB, uuidC)
	start := func() *Ledger {
		l := New(Options{
			Kubelet: k, Driver: driver, Resend: k.resend, Pods: k.running, Changed: wake.New(),
			Log: slog.New(slog.DiscardHandler), Files: Files{Known: filepath.Join(dir, "holders.json")},
		})
		l.Offer(nil, []resource.Resource{r})
		refresh(t, l)
		refresh(t, l)
		return l
	}
	expectAll := func(l *Ledger, ofA, ofB, ofC string) {
		t.Helper()
		for i, want := range []string{ofA, ofB, ofC} {
			d := &r.Devices[i]
			why := reasonOf(l, d) + l.Claim(d)
			if (why == "") != (want == "") || !strings.Contains(why, want) {
				t.Errorf("of %s: %q, want %q", d.ID, why, want)
			}
		}
	}
	k.entries, k.pods = []kubelet.Entry{recorded("p", whole, uuidA)}, []string{"p", "q"}
	k.claims = []kubelet.Claim{prepared("c", "q", strings.ToLower(uuidB))}
	l := start()
	l.RestoreClaim(Claim{UID: "r", Name: "team/r", Pods: []string{"q"}, Portions: portionsOf(uuidC)}, time.Now())
	refresh(t, l) // the record is lost too, before the kubelet has written its file
	k.set(func() { k.entries, k.claims = nil, nil })
	const container = "container main of the pod with the UID p"
	const claim, other = "ResourceClaim team/c", "ResourceClaim team/r"
	l = start()
	time.Sleep(endingSoon) // the pod could be one that was deleted by force
	refresh(t, l)
	expectAll(l, container, claim, other)
	expectAll(start(), container, claim, other) // that is over
	k.set(func() { k.pods = []string{"q"} })
	expectAll(start(), "", claim, other)
	k.set(func() { k.pods = nil })
	expectAll(start(), "", "", "")
	k.set(func() { k.pods = []string{"p", "q"} }) // not the same pods
	expectAll(start(), "", "", "")
}

// Many callers that wait have one read together.
func TestReadsAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet()
		k.entries, k.pods = []kubelet.Entry{recorded("old", whole, "GPU-a")}, []string{"old"}
		l := k.refreshed(t)
		go func() { _ = l.Run(t.Context()) }()
		offered := offer(whole, "GPU-a")
		l.Offer(nil, []resource.Resource{offered})
		k.set(func() { k.entries = nil })
		before := l.begun.Load()
		limited, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		ended := make(chan error)
		for range 100 {
			go func() {
				ended <- l.AwaitFree(limited, whole, []string{"GPU-a"}, []*resource.Device{&offered.Devices[0]})
			}()
		}
		for range 100 {
			if err := <-ended; err == nil {
				t.Error("a container starts beside the old one")
			}
		}
		if n := l.begun.Load() - before; n > 160 { // one for each that begins at most, and five each second
			t.Errorf("%d reads for 100 callers in 10 s", n)
		}
	})
}

// Before another process answers for this one, what waits ends.
func TestWaitsEndWhenAnotherProcessTakesOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet()
		k.entries, k.pods = []kubelet.Entry{recorded("old", whole, "GPU-a")}, []string{"old"}
		l := k.refreshed(t)
		offered := offer(whole, "GPU-a")
		l.Offer(nil, []resource.Resource{offered})
		k.set(func() { k.entries = nil })
		read(t, l)
		ended := make(chan error)
		wait := func() {
			ended <- l.AwaitFree(t.Context(), whole, []string{"GPU-a"}, []*resource.Device{&offered.Devices[0]})
		}
		cause := errors.New("another instance takes over")
		ctx, end := context.WithCancelCause(t.Context())
		run := make(chan error)
		go func() { run <- l.Run(ctx) }()
		go wait()
		time.Sleep(time.Minute)
		end(cause)
		testenv.Must(t, <-run)
		if err := <-ended; !errors.Is(err, cause) {
			t.Errorf("the call ends with %v", err)
		}
		go wait()
		if err := <-ended; !errors.Is(err, cause) {
			t.Errorf("a later call ends with %v", err)
		}
	})
}

// The kubelet's files may have any text as a name.
func TestForgettingANameThatIsPrintedInAnotherWay(t *testing.T) {
	k := newKubelet()
	k.entries = []kubelet.Entry{recorded("\x1b[31mp", whole, "no GPU\n")}
	l := k.ledger()
	offered := offer(whole, uuidA)
	l.Offer(nil, []resource.Resource{offered})
	refresh(t, l)
	refresh(t, l)
	expect(t, l, &offered.Devices[0], "it is unknown on which GPU that is")
	const printed = `\x1b[31mp/main/no GPU\n`
	if got := l.Holdings(); len(got) != 1 || got[0].Forget != printed {
		t.Errorf("the holdings are %+v", got)
	}
	testenv.Must(t, l.Forget(t.Context(), printed, false))
	expect(t, l, &offered.Devices[0], "")
}
