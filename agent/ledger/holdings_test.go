package ledger

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestHoldings(t *testing.T) {
	t.Parallel()
	since := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	withClaims := func(pod string, claims ...string) podresources.Holder {
		h := podresources.Holder{Namespace: "team", Pod: pod, Container: "main"}
		for _, c := range claims {
			h.Claims = append(h.Claims, podresources.Claim{Name: c})
		}
		return h
	}
	of := func(uuid, resource string, replicas int, pod string, state State) Holding {
		return Holding{
			UUID: uuid, Resource: resource, Replicas: replicas, Namespace: "default", State: state,
			Containers: []Container{{pod, "main"}},
		}
	}
	for name, c := range map[string]struct {
		before, now []podresources.Holder
		given       []string            // by Allocate, and not listed by the kubelet yet
		claims      map[string][]string // the devices of claims by name, with the UID 1
		want        []Holding
	}{
		"nobody": {},
		"containers, under any name; a device on two NUMA nodes counts once": {
			now: []podresources.Holder{
				holder("y", shared, "GPU-a::1"), holder("x", whole, "GPU-b", "GPU-a", "GPU-a"),
				holder("z", "example.com/nic", "eth0"),
			},
			want: []Holding{
				of("GPU-a", whole, 1, "x", ""), of("GPU-a", shared, 1, "y", ""), of("GPU-b", whole, 1, "x", ""),
			},
		},
		"replicas": {
			now: []podresources.Holder{
				holder("x", shared, "GPU-a::0", "GPU-a::2", "GPU-b::0"), holder("y", shared, "GPU-a::1"),
			},
			want: []Holding{
				of("GPU-a", shared, 2, "x", ""), of("GPU-a", shared, 1, "y", ""), of("GPU-b", shared, 1, "x", ""),
			},
		},
		"a container that is starting, and one that is ending": {
			before: []podresources.Holder{holder("x", whole, "GPU-a")}, given: []string{"GPU-b"},
			want: []Holding{
				of("GPU-a", whole, 1, "x", Ending),
				{UUID: "GPU-b", Resource: whole, Replicas: 1, Containers: []Container{}, State: Starting},
			},
		},
		"claims, of which one has containers": {
			now:    []podresources.Holder{withClaims("p", "team/one", "team/nic"), withClaims("q", "team/one")},
			claims: map[string][]string{"team/one": {"GPU-b", "GPU-a"}, "team/two": {"MIG-1@GPU-c"}},
			want: []Holding{
				{
					UUID: "GPU-a", Namespace: "team", Claim: "one", ClaimUID: "of team/one", Since: since,
					Containers: []Container{{"p", "main"}, {"q", "main"}},
				},
				{
					UUID: "GPU-b", Namespace: "team", Claim: "one", ClaimUID: "of team/one", Since: since,
					Containers: []Container{{"p", "main"}, {"q", "main"}},
				},
				{
					UUID: "MIG-1", Namespace: "team", Claim: "two", ClaimUID: "of team/two", Since: since,
					Containers: []Container{},
				},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			holders := c.before
			l := newLedger(func() ([]podresources.Holder, error) { return holders, nil })
			l.Offer([]resource.Resource{offer(whole, "GPU-a", "GPU-b")}, offer(whole, "MIG-1@GPU-c"))
			holders = c.now
			_, err := l.Read(t.Context())
			testenv.Must(t, err)
			testenv.Must(t, l.Take(t.Context(), whole, devicesOf(c.given...)))
			for claim, ids := range c.claims {
				l.RestoreClaim("of "+claim, claim, since, portionsOf(ids...))
			}
			if diff := cmp.Diff(c.want, l.Holdings()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

// A claim that takes its devices again has them since the first time.
func TestSinceWhenAClaimHasADevice(t *testing.T) {
	t.Parallel()
	l := newLedger(noHolders)
	since := func() time.Time {
		testenv.Must(t, l.TakeClaim(t.Context(), "1", "team/one", portionsOf("GPU-a")))
		return l.Holdings()[0].Since
	}
	before := time.Now().Truncate(time.Second)
	first := since()
	if first.Before(before) || !since().Equal(first) {
		t.Errorf("since %v, and then since %v, want a time after %v", first, since(), before)
	}
}

func TestHoldersHaveNames(t *testing.T) {
	for want, h := range map[string]Holding{
		"container main of pod team/train": {Namespace: "team", Containers: []Container{{"train", "main"}}},
		"ResourceClaim team/one":           {Namespace: "team", Claim: "one", Containers: []Container{{"train", "main"}}},
		"a container that is starting":     {State: Starting},
	} {
		if got := h.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
