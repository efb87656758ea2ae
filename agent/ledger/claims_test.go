package ledger

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// portionsOf returns portions of devices with 100 bytes of memory. An ID can end with "=" and the bytes that the claim
// has of it.
func portionsOf(ids ...string) []Portion {
	var list []Portion
	for _, id := range ids {
		id, memory, _ := strings.Cut(id, "=")
		d := devicesOf(id)[0]
		d.MemoryBytes = 100
		bytes, _ := strconv.ParseUint(memory, 10, 64)
		list = append(list, Portion{Device: d, Memory: bytes})
	}
	return list
}

// claimOf returns a claim with portions.
func claimOf(uid, name string, portions ...Portion) Claim {
	return Claim{UID: uid, Name: name, Portions: portions}
}

func TestAClaimGetsOnlyWhatNobodyHas(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		holders []podresources.Holder
		given   []string // by Allocate, and not listed by the kubelet yet
		claimed []string // by another claim
		want    string   // of the error
		takes   []string
	}{
		"a free device": {takes: []string{"GPU-a"}},
		"a device of a pod": {
			holders: []podresources.Holder{listed("x", whole, "GPU-a")}, takes: []string{"GPU-b", "GPU-a"},
			want: "GPU-a: container main of pod default/x holds it",
		},
		"a device of which a pod has a replica": {
			holders: []podresources.Holder{listed("x", shared, "GPU-a::1")}, takes: []string{"GPU-a"},
			want: "GPU-a: container main of pod default/x holds it",
		},
		"a part of a GPU that a pod has": {
			holders: []podresources.Holder{listed("x", whole, "GPU-a")}, takes: []string{"MIG-1@GPU-a"}, want: "MIG-1: ",
		},
		"a device that Allocate has just given": {
			given: []string{"GPU-a"}, takes: []string{"GPU-a"}, want: "a container that is starting holds it",
		},
		"a device of another claim": {
			claimed: []string{"GPU-a"}, takes: []string{"GPU-a"},
			want: "GPU-a: ResourceClaim team/other, which is ending, holds it as GPU-a",
		},
		"a GPU of which another claim has a part": {
			claimed: []string{"MIG-1@GPU-a"}, takes: []string{"GPU-a"},
			want: "GPU-a: ResourceClaim team/other, which is ending, holds it as MIG-1",
		},
		"a part of the GPU that the node does not have any more": {
			claimed: []string{"MIG-1@GPU-a"}, takes: []string{"MIG-0@GPU-a"}, want: "the node has no device MIG-0 any more",
		},
		"another part of the GPU": {claimed: []string{"MIG-1@GPU-a"}, takes: []string{"MIG-2@GPU-a"}},
		"the rest of a device's memory": {
			claimed: []string{"GPU-a=70", "GPU-b=100"}, takes: []string{"GPU-a=30"},
		},
		"more than the rest of a device's memory": {
			claimed: []string{"GPU-a=70"}, takes: []string{"GPU-b=1", "GPU-a=31"},
			want: "GPU-a: the claim needs 0.0 MiB of its memory, and 0.0 MiB are left",
		},
		"more than a device's memory in two parts": {
			takes: []string{"GPU-a=60", "GPU-a=41"}, want: "GPU-a: the claim needs ",
		},
		"a device's memory in two parts": {takes: []string{"GPU-a=60", "GPU-a=40"}},
		"a device of which another claim has a part": {
			claimed: []string{"GPU-a=1"}, takes: []string{"GPU-a"},
			want: "GPU-a: ResourceClaim team/other, which is ending, holds it as GPU-a",
		},
		"a part of a device that another claim has": {
			claimed: []string{"GPU-a"}, takes: []string{"GPU-a=1"},
			want: "GPU-a: ResourceClaim team/other, which is ending, holds it as GPU-a",
		},
		"a part of a MIG device of a GPU of which another claim has a part": {
			claimed: []string{"GPU-a=1"}, takes: []string{"MIG-1@GPU-a=1"},
			want: "MIG-1: ResourceClaim team/other, which is ending, holds it as GPU-a",
		},
		"a part of a device of a pod": {
			holders: []podresources.Holder{listed("x", shared, "GPU-a::1")}, takes: []string{"GPU-a=1"},
			want: "GPU-a: container main of pod default/x holds it",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newKubelet(c.holders...).refreshed(t)
			l.Offer(nil, nil, offer(whole, "GPU-a", "GPU-b", "MIG-1@GPU-a", "MIG-2@GPU-a"))
			testenv.Must(t, l.Take(t.Context(), whole, devicesOf(c.given...)))
			testenv.Must(t, l.TakeClaim(soon(t), claimOf("2", "team/other", portionsOf(c.claimed...)...)))
			err := l.TakeClaim(soon(t), claimOf("1", "team/claim", portionsOf(c.takes...)...))
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v, want an error with %q", err, c.want)
			}
			if err != nil { // it has recorded nothing
				testenv.Must(t, l.TakeClaim(soon(t), claimOf("3", "team/third", portionsOf("GPU-b")...)))
				return
			}
			testenv.Must(t, l.TakeClaim(soon(t), claimOf("1", "team/claim", portionsOf(c.takes...)...))) // again
			held, err := l.Held()
			testenv.Must(t, err)
			var devices []*resource.Device
			for _, p := range portionsOf(c.takes...) {
				devices = append(devices, p.Device)
				why := l.Claim(p.Device)
				if !held[p.Device.UUID] || !strings.Contains(why, "ResourceClaim team/") {
					t.Errorf("%s is not held: %v, %q", p.Device.UUID, held, why)
				}
			}
			err = l.Take(t.Context(), whole, devices)
			if err == nil || !strings.Contains(err.Error(), "ResourceClaim team/") {
				t.Errorf("a container gets it too: %v", err)
			}
			l.DropClaim("1")
			l.DropClaim("2")
			testenv.Must(t, l.Take(t.Context(), whole, devices))
		})
	}
}

func TestAClaimGetsNothingWhileTheHoldersAreUnknown(t *testing.T) {
	t.Parallel()
	k := newKubelet()
	k.err = errors.New("connection refused")
	l := k.ledger()
	take := func(want string) {
		t.Helper()
		got := l.TakeClaim(soon(t), claimOf("1", "team/claim", portionsOf("GPU-a")...))
		if (got == nil) != (want == "") || got != nil && !strings.Contains(got.Error(), want) {
			t.Errorf("%v, want %q", got, want)
		}
	}
	_, _ = l.Read(t.Context())
	take("it is unknown which containers hold the devices: connection refused")
	l.RestoreClaim(claimOf("2", "team/old", portionsOf("GPU-b")...), time.Now()) // it runs all the same
	k.set(func() { k.err = nil })
	read(t, l)
	take("the kubelet has not recorded them since this program began")
	refresh(t, l)
	take("")
	if got := l.Take(t.Context(), whole, devicesOf("GPU-b")); got == nil {
		t.Error("a container gets the device of an old claim")
	}
}

// A claim whose pod is not active any more is about to be unprepared; one that runs is not.
func TestAClaimWaitsForWhatEnds(t *testing.T) {
	t.Parallel()
	claimer := podresources.Holder{Namespace: "team", Pod: "p", Container: "main", Claims: []podresources.Claim{
		{Name: "team/old", Devices: map[string][]string{driver: {"gpu-a"}}},
	}}
	wanted := claimOf("2", "team/new", portionsOf("GPU-a")...)
	for name, c := range map[string]struct {
		kubelet func(*fakeKubelet)
		ends    func(*fakeKubelet, *Ledger) // after 3 s
		refused bool                        // at once
	}{
		"a claim of an active pod": {
			kubelet: func(k *fakeKubelet) { k.holders = []podresources.Holder{claimer} }, refused: true,
		},
		"a claim of a pod that is not active": {
			ends: func(_ *fakeKubelet, l *Ledger) { l.DropClaim("1") },
		},
		"a container of an active pod": {
			kubelet: func(k *fakeKubelet) { k.entries = []kubelet.Entry{recorded("p", whole, "GPU-a")} }, refused: true,
		},
		"a kubelet that does not answer": {
			kubelet: func(k *fakeKubelet) { k.err = errors.New("rejected by rate limit") },
			ends:    func(k *fakeKubelet, l *Ledger) { k.set(func() { k.err = nil }); l.DropClaim("1") },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				k := newKubelet()
				l := k.refreshed(t)
				go func() { _ = l.Run(t.Context()) }()
				l.Offer(nil, nil, offer(whole, "GPU-a"))
				l.RestoreClaim(claimOf("1", "team/old", portionsOf("GPU-a")...), time.Now())
				if c.kubelet != nil {
					k.set(func() { c.kubelet(k) })
				}
				begun := time.Now()
				if c.refused {
					err := l.TakeClaim(t.Context(), wanted)
					if _, held := errors.AsType[*HeldError](err); !held || time.Since(begun) > 0 {
						t.Errorf("after %v: %v", time.Since(begun), err)
					}
					return
				}
				time.AfterFunc(3*time.Second, func() { c.ends(k, l) })
				if err := l.TakeClaim(t.Context(), wanted); err != nil {
					t.Error(err)
				}
				if took := time.Since(begun); took < 3*time.Second || took > 5*time.Second {
					t.Errorf("it took %v", took)
				}
			})
		})
	}
}

// A scheduler does not know of a claim that is gone at the API server, or that has another device of the GPU.
func TestClaimsThatTheSchedulerDoesNotKnow(t *testing.T) {
	t.Parallel()
	l := newKubelet().refreshed(t)
	l.Offer(nil, nil, offer(whole, "GPU-a", "GPU-b"))
	a, b := devicesOf("GPU-a")[0], devicesOf("GPU-b")[0]
	l.RestoreClaim(claimOf("1", "team/gone", portionsOf("GPU-a")...), time.Now())
	l.RestoreClaim(claimOf("2", "team/part", Portion{Device: &resource.Device{UUID: migA, Parent: "GPU-b"}}), time.Now())
	if why := l.Unscheduled(a); why != "" {
		t.Errorf("a device of a claim: %q", why)
	}
	if why := l.Unscheduled(b); !strings.Contains(why, "ResourceClaim team/part") {
		t.Errorf("a GPU of which a claim has a part: %q", why)
	}
	if l.TakeClaim(soon(t), claimOf("3", "team/new", portionsOf("GPU-a")...)) == nil {
		t.Fatal("a claim gets a device of another one")
	}
	if why := l.Unscheduled(a); why != "ResourceClaim team/gone holds it" {
		t.Errorf("a device that was refused: %q", why)
	}
	l.DropClaim("1")
	l.DropClaim("2")
	if why := l.Unscheduled(a) + l.Unscheduled(b); why != "" {
		t.Errorf("afterwards: %q", why)
	}
}

// The kubelet has a claim in its file for some moments after it was unprepared.
func TestAClaimWaitsForOneThatIsUnprepared(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		k := newKubelet()
		k.claims = []kubelet.Claim{prepared("old", "p", strings.ToLower(uuidA))}
		l := k.refreshed(t)
		go func() { _ = l.Run(t.Context()) }()
		l.Offer(nil, nil, offer(whole, uuidA))
		old := claimOf("uid-old", "team/old", portionsOf(uuidA)...)
		l.RestoreClaim(old, time.Now())
		time.AfterFunc(3*time.Second, func() { l.DropClaim("uid-old") })
		begun := time.Now()
		testenv.Must(t, l.TakeClaim(t.Context(), claimOf("2", "team/new", portionsOf(uuidA)...)))
		if took := time.Since(begun); took < 3*time.Second || took > 5*time.Second {
			t.Errorf("it took %v", took)
		}
		if d := devicesOf(uuidA)[0]; l.Unscheduled(d) != "" || len(l.Holdings()) != 1 {
			t.Errorf("afterwards %q, and %v", l.Unscheduled(d), l.Holdings())
		}

		// Without its record, the kubelet's file counts.
		l.LoseRecord("2")
		l.RestoreClaim(old, time.Now())
		l.LoseRecord("uid-old")
		if l.TakeClaim(t.Context(), claimOf("3", "team/third", portionsOf(uuidA)...)) == nil {
			t.Error("a claim gets the device of one whose record is lost")
		}
	})
}

// A record that nothing needs any more.
func TestAbandonedClaims(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kubelet func(*fakeKubelet)
		want    bool
		err     string
	}{
		"neither the kubelet nor a process has it": {func(*fakeKubelet) {}, true, ""},
		"the kubelet has it": {
			func(k *fakeKubelet) { k.claims = []kubelet.Claim{prepared("x", "p", "gpu-a")} }, false, "",
		},
		"a process has it":            {func(k *fakeKubelet) { k.pods = []string{"p"} }, false, ""},
		"one process is unknown":      {func(k *fakeKubelet) { k.partial = true }, false, ""},
		"no process can be seen":      {func(k *fakeKubelet) { k.blind = true }, false, "cannot be seen"},
		"the kubelet does not answer": {func(k *fakeKubelet) { k.err = errors.New("no answer") }, false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKubelet()
			l := k.refreshed(t)
			k.set(func() { c.kubelet(k) })
			_, _ = l.Read(t.Context())
			one := claimOf("uid-x", "team/x", portionsOf("GPU-a")...)
			one.Pods = []string{"p"}
			l.RestoreClaim(one, time.Now())
			got, err := l.IsAbandoned("uid-x")
			if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("%t and %v, want %t and %q", got, err, c.want, c.err)
			}
		})
	}
}

// A GPU may have less memory than before, such as with ECC.
func TestClaimsThatHaveMoreThanTheMemory(t *testing.T) {
	t.Parallel()
	l := newKubelet().refreshed(t)
	l.RestoreClaim(claimOf("1", "team/old", portionsOf("GPU-a=90")...), time.Now())
	l.RestoreClaim(claimOf("2", "team/older", portionsOf("GPU-a=90")...), time.Now())
	if err := l.TakeClaim(soon(t), claimOf("3", "team/claim", portionsOf("GPU-a=1")...)); err == nil {
		t.Error("a claim gets memory that is not there")
	}
	l.DropClaim("1")
	testenv.Must(t, l.TakeClaim(soon(t), claimOf("3", "team/claim", portionsOf("GPU-a=10")...)))
}

// Pods and claims that want one device at the same time: one of them gets it.
func TestBothDoorsAtOnce(t *testing.T) {
	t.Parallel()
	for range 50 {
		l := newKubelet().refreshed(t)
		l.Offer(nil, []resource.Resource{offer(whole, "GPU-a")})
		var pods, claims atomic.Int32
		var running sync.WaitGroup
		for i := range 4 {
			running.Go(func() {
				if l.TakeClaim(soon(t), claimOf(fmt.Sprint(i), fmt.Sprint("team/", i), portionsOf("GPU-a")...)) == nil {
					claims.Add(1)
				}
			})
		}
		running.Go(func() {
			if l.Take(context.Background(), whole, devicesOf("GPU-a")) == nil {
				pods.Add(1)
			}
		})
		running.Wait()
		if n := pods.Load() + claims.Load(); n != 1 {
			t.Fatalf("%d pods and %d claims have the device", pods.Load(), claims.Load())
		}
	}
}

// A kubelet that has lost dra_manager_state has a claim unprepared although a pod still runs that it does not know to
// have the claim.
func TestAnUnpreparedClaimOfAPodThatRuns(t *testing.T) {
	for name, c := range map[string]struct {
		then func(*fakeKubelet)
		held bool
	}{
		"the pod has processes":           {func(*fakeKubelet) {}, true},
		"the pod has no process any more": {func(k *fakeKubelet) { k.pods = nil }, false},
		"no process can be seen":          {func(k *fakeKubelet) { k.pods, k.blind = nil, true }, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newKubelet()
				k.pods = []string{"p"}
				l := k.refreshed(t)
				offered := offer(whole, "GPU-a")
				l.Offer(nil, nil, offered)
				old := claimOf("1", "team/old", portionsOf("GPU-a")...)
				old.Pods = []string{"p"}
				testenv.Must(t, l.TakeClaim(soon(t), old))
				l.DropClaim("1")
				c.then(k)
				read(t, l)
				err := l.TakeClaim(soon(t), claimOf("2", "team/new", portionsOf("GPU-a")...))
				if _, held := errors.AsType[*HeldError](err); held != c.held || err != nil && !held {
					t.Errorf("another claim gets %v, want held: %t", err, c.held)
				}
			})
		})
	}
}
