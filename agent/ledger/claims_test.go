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
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// devicesOf returns pointers to the devices of an offer.
func devicesOf(ids ...string) []*resource.Device {
	r := offer(whole, ids...)
	var list []*resource.Device
	for i := range r.Devices {
		list = append(list, &r.Devices[i])
	}
	return list
}

// portionsOf returns portions of devices with 100 bytes of memory. An ID can end with "=" and the bytes that the claim
// has of it.
func portionsOf(ids ...string) []Portion {
	var list []Portion
	for _, id := range ids {
		id, memory, _ := strings.Cut(id, "=")
		d := devicesOf(id)[0]
		d.MemoryBytes = 100
		bytes, _ := strconv.ParseUint(memory, 10, 64)
		list = append(list, Portion{d, bytes})
	}
	return list
}

func noHolders() ([]podresources.Holder, error) { return nil, nil }

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
			holders: []podresources.Holder{holder("x", whole, "GPU-a")}, takes: []string{"GPU-b", "GPU-a"},
			want: "GPU-a: container main of pod default/x holds it",
		},
		"a device of which a pod has a replica": {
			holders: []podresources.Holder{holder("x", shared, "GPU-a::1")}, takes: []string{"GPU-a"},
			want: "GPU-a: container main of pod default/x holds it",
		},
		"a part of a GPU that a pod has": {
			holders: []podresources.Holder{holder("x", whole, "GPU-a")}, takes: []string{"MIG-1@GPU-a"}, want: "MIG-1: ",
		},
		"a device that Allocate has just given": {
			given: []string{"GPU-a"}, takes: []string{"GPU-a"}, want: "a container that is starting holds it",
		},
		"a device of another claim": {
			claimed: []string{"GPU-a"}, takes: []string{"GPU-a"}, want: "GPU-a: ResourceClaim team/other holds it as GPU-a",
		},
		"a GPU of which another claim has a part": {
			claimed: []string{"MIG-1@GPU-a"}, takes: []string{"GPU-a"},
			want: "GPU-a: ResourceClaim team/other holds it as MIG-1",
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
			claimed: []string{"GPU-a=1"}, takes: []string{"GPU-a"}, want: "GPU-a: ResourceClaim team/other holds it as GPU-a",
		},
		"a part of a device that another claim has": {
			claimed: []string{"GPU-a"}, takes: []string{"GPU-a=1"}, want: "GPU-a: ResourceClaim team/other holds it as GPU-a",
		},
		"a part of a MIG device of a GPU of which another claim has a part": {
			claimed: []string{"GPU-a=1"}, takes: []string{"MIG-1@GPU-a=1"},
			want: "MIG-1: ResourceClaim team/other holds it as GPU-a",
		},
		"a part of a device of a pod": {
			holders: []podresources.Holder{holder("x", shared, "GPU-a::1")}, takes: []string{"GPU-a=1"},
			want: "GPU-a: container main of pod default/x holds it",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLedger(func() ([]podresources.Holder, error) { return c.holders, nil })
			testenv.Must(t, l.Take(t.Context(), whole, devicesOf(c.given...)))
			testenv.Must(t, l.TakeClaim(t.Context(), "2", "team/other", portionsOf(c.claimed...)))
			err := l.TakeClaim(t.Context(), "1", "team/claim", portionsOf(c.takes...))
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v, want an error with %q", err, c.want)
			}
			if err != nil { // it has recorded nothing
				testenv.Must(t, l.TakeClaim(t.Context(), "3", "team/third", portionsOf("GPU-b")))
				return
			}
			testenv.Must(t, l.TakeClaim(t.Context(), "1", "team/claim", portionsOf(c.takes...))) // again
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
	err := errors.New("connection refused")
	l := newLedger(func() ([]podresources.Holder, error) { return nil, err })
	const want = "it is unknown which containers hold the devices: connection refused"
	got := l.TakeClaim(t.Context(), "1", "team/claim", portionsOf("GPU-a"))
	if got == nil || !strings.Contains(got.Error(), want) {
		t.Errorf("it got the device: %v", got)
	}
	l.RestoreClaim("2", "team/old", time.Now(), portionsOf("GPU-b")) // it runs all the same
	err = nil
	testenv.Must(t, l.TakeClaim(t.Context(), "1", "team/claim", portionsOf("GPU-a")))
	if got := l.Take(t.Context(), whole, devicesOf("GPU-b")); got == nil {
		t.Error("a container gets the device of an old claim")
	}
}

// claimer returns a container that has devices by a claim.
func claimer(claim string, uuids ...string) podresources.Holder {
	k := podresources.Claim{Name: claim}
	for _, uuid := range uuids {
		k.Devices = append(k.Devices, podresources.DeviceName(uuid))
	}
	return podresources.Holder{Namespace: "default", Pod: "p", Container: "main", Claims: []podresources.Claim{k}}
}

// What claims have whose records cannot be read is what the kubelet lists for claims that are not known.
func TestClaimsOfWhichItIsUnknownWhatTheyHave(t *testing.T) {
	t.Parallel()
	l := newLedger(func() ([]podresources.Holder, error) {
		return []podresources.Holder{
			claimer("team/known", "GPU-b"), claimer("team/lost", "GPU-a"), claimer("team/lost", "GPU-c", "MIG-1"),
		}, nil
	})
	l.Offer([]resource.Resource{offer(whole, "GPU-a", "GPU-b", "GPU-c", "GPU-d", "MIG-1@GPU-e")})
	l.RestoreClaim("1", "team/known", time.Now(), portionsOf("GPU-d")) // a record is more than what the kubelet lists
	free := func(want ...string) {
		t.Helper()
		held, err := l.Held()
		testenv.Must(t, err)
		var got []string
		for _, d := range devicesOf("GPU-a", "GPU-b", "GPU-c", "GPU-d", "MIG-1@GPU-e") {
			err := l.TakeClaim(t.Context(), "2", "team/other", []Portion{{Device: d}})
			if err == nil {
				got = append(got, d.UUID)
				l.DropClaim("2")
			}
			if (err == nil) == held[d.UUID] || (err == nil) != (l.Claim(d) == "") {
				t.Errorf("%s: held: %t, by %q, and a claim that wants it gets %v", d.UUID, held[d.UUID], l.Claim(d), err)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("free devices (-want +got)\n%s", diff)
		}
	}
	free("GPU-a", "GPU-b", "GPU-c", "MIG-1")
	l.LoseClaim("3")
	free("GPU-b")
	const want = "container main of pod default/p holds it by ResourceClaim team/lost, whose record cannot be read"
	if got := l.Claim(devicesOf("GPU-a")[0]); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	testenv.Must(t, l.TakeClaim(t.Context(), "3", "team/lost", portionsOf("GPU-a", "GPU-c"))) // it is prepared again
	free("GPU-b", "MIG-1")
	l.LoseClaim("3")
	l.RestoreClaim("3", "team/lost", time.Now(), portionsOf("GPU-a"))
	free("GPU-b", "GPU-c", "MIG-1")
	l.LoseClaim("3")
	l.DropClaim("3")
	free("GPU-a", "GPU-b", "GPU-c", "MIG-1")
}

// A GPU may have less memory than before, such as with ECC.
func TestClaimsThatHaveMoreThanTheMemory(t *testing.T) {
	t.Parallel()
	l := newLedger(noHolders)
	l.RestoreClaim("1", "team/old", time.Now(), portionsOf("GPU-a=90"))
	l.RestoreClaim("2", "team/older", time.Now(), portionsOf("GPU-a=90"))
	if err := l.TakeClaim(t.Context(), "3", "team/claim", portionsOf("GPU-a=1")); err == nil {
		t.Error("a claim gets memory that is not there")
	}
	l.DropClaim("1")
	testenv.Must(t, l.TakeClaim(t.Context(), "3", "team/claim", portionsOf("GPU-a=10")))
}

// Pods and claims that want one device at the same time: one of them gets it.
func TestBothDoorsAtOnce(t *testing.T) {
	t.Parallel()
	for range 50 {
		l := newLedger(noHolders)
		l.Offer([]resource.Resource{offer(whole, "GPU-a")})
		var pods, claims atomic.Int32
		var running sync.WaitGroup
		for i := range 4 {
			running.Go(func() {
				if l.TakeClaim(context.Background(), fmt.Sprint(i), "team/claim", portionsOf("GPU-a")) == nil {
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
