package ledger

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

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
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLedger(func() ([]podresources.Holder, error) { return c.holders, nil })
			testenv.Must(t, l.Take(t.Context(), whole, devicesOf(c.given...)))
			testenv.Must(t, l.TakeClaim(t.Context(), "2", "team/other", devicesOf(c.claimed...)))
			err := l.TakeClaim(t.Context(), "1", "team/claim", devicesOf(c.takes...))
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v, want an error with %q", err, c.want)
			}
			if err != nil { // it has recorded nothing
				testenv.Must(t, l.TakeClaim(t.Context(), "3", "team/third", devicesOf("GPU-b")))
				return
			}
			testenv.Must(t, l.TakeClaim(t.Context(), "1", "team/claim", devicesOf(c.takes...))) // again
			held, err := l.Held()
			testenv.Must(t, err)
			for _, d := range devicesOf(c.takes...) {
				if !held[d.UUID] || !strings.Contains(l.Claim(d), "ResourceClaim team/claim holds it") {
					t.Errorf("%s is not held: %v, %q", d.UUID, held, l.Claim(d))
				}
			}
			err = l.Take(t.Context(), whole, devicesOf(c.takes...))
			if err == nil || !strings.Contains(err.Error(), "ResourceClaim team/claim holds it") {
				t.Errorf("a container gets it too: %v", err)
			}
			l.DropClaim("1")
			testenv.Must(t, l.Take(t.Context(), whole, devicesOf(c.takes...)))
		})
	}
}

func TestAClaimGetsNothingWhileTheHoldersAreUnknown(t *testing.T) {
	t.Parallel()
	err := errors.New("connection refused")
	l := newLedger(func() ([]podresources.Holder, error) { return nil, err })
	const want = "it is unknown which containers hold the devices: connection refused"
	got := l.TakeClaim(t.Context(), "1", "team/claim", devicesOf("GPU-a"))
	if got == nil || !strings.Contains(got.Error(), want) {
		t.Errorf("it got the device: %v", got)
	}
	l.RestoreClaim("2", "team/old", time.Now(), devicesOf("GPU-b")) // it runs all the same
	err = nil
	testenv.Must(t, l.TakeClaim(t.Context(), "1", "team/claim", devicesOf("GPU-a")))
	if got := l.Take(t.Context(), whole, devicesOf("GPU-b")); got == nil {
		t.Error("a container gets the device of an old claim")
	}
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
				if l.TakeClaim(context.Background(), fmt.Sprint(i), "team/claim", devicesOf("GPU-a")) == nil {
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
