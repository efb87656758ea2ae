package ledger

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestHoldings(t *testing.T) {
	t.Parallel()
	since := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	claimer := func(pod, device string, claims ...string) podresources.Holder {
		h := podresources.Holder{Namespace: "team", Pod: pod, Container: "main"}
		for _, c := range claims {
			h.Claims = append(h.Claims, podresources.Claim{Name: c, Devices: map[string][]string{driver: {device}}})
		}
		return h
	}
	of := func(uuid, resource string, replicas int, pod string) Holding {
		return Holding{
			UUID: uuid, GPU: uuid, Resource: resource, Replicas: replicas, Namespace: "default", Book: PodResources,
			Containers: []Container{{pod, "main"}},
		}
	}
	claimed := func(uuid, name string, state State, containers ...Container) Holding {
		return Holding{
			UUID: uuid, GPU: strings.Replace(uuid, "MIG-1", "GPU-c", 1), Namespace: "team", Claim: name,
			ClaimUID: "of team/" + name, Since: since, State: state, Book: Record,
			Containers: append([]Container{}, containers...), Forget: "of team/" + name + "/" + podresources.DeviceName(uuid),
		}
	}
	for name, c := range map[string]struct {
		entries, dropped []kubelet.Entry // of the checkpoint, and those that were in it before
		listed           []podresources.Holder
		given            []string            // by Allocate, and in no book yet
		claims           map[string][]string // the devices of claims by name, with the UID 1
		want             []Holding
	}{
		"nobody": {want: []Holding{}},
		"containers, under any name; a device on two NUMA nodes counts once": {
			listed: []podresources.Holder{
				listed("y", shared, "GPU-a::1"), listed("x", whole, "GPU-b", "GPU-a", "GPU-a"),
				listed("z", "example.com/nic", "eth0"),
			},
			want: []Holding{of("GPU-a", whole, 1, "x"), of("GPU-a", shared, 1, "y"), of("GPU-b", whole, 1, "x")},
		},
		"replicas": {
			listed: []podresources.Holder{
				listed("x", shared, "GPU-a::0", "GPU-a::2", "GPU-b::0"), listed("y", shared, "GPU-a::1"),
			},
			want: []Holding{of("GPU-a", shared, 2, "x"), of("GPU-a", shared, 1, "y"), of("GPU-b", shared, 1, "x")},
		},
		"an init container, one that is starting, and one that is ending": {
			entries: []kubelet.Entry{recorded("p/init", whole, "GPU-a"), recorded("p/main", whole, "GPU-b")},
			dropped: []kubelet.Entry{recorded("q/main", whole, "MIG-1@GPU-c")},
			listed:  []podresources.Holder{listed("train", whole, "GPU-b")}, given: []string{"GPU-b"},
			want: []Holding{
				{
					UUID: "GPU-a", GPU: "GPU-a", Resource: whole, Replicas: 1, Namespace: "default", PodUID: "p", Book: Checkpoint,
					Containers: []Container{{"train", "init"}}, Forget: "p/init/GPU-a",
				},
				{
					UUID: "GPU-b", GPU: "GPU-b", Resource: whole, Replicas: 1, Containers: []Container{}, State: Starting,
					Book: Allocated,
				},
				{
					UUID: "GPU-b", GPU: "GPU-b", Resource: whole, Replicas: 1, Namespace: "default", PodUID: "p", Book: Checkpoint,
					Containers: []Container{{"train", "main"}}, Forget: "p/main/GPU-b",
				},
				{
					UUID: "MIG-1", GPU: "GPU-c", Resource: whole, Replicas: 1, PodUID: "q", Book: Checkpoint, State: Ending,
					Containers: []Container{{"", "main"}}, Forget: "q/main/MIG-1",
				},
			},
		},
		"claims, of which one has containers": {
			listed: []podresources.Holder{claimer("p", "gpu-a", "team/one", "team/nic"), claimer("q", "gpu-b", "team/one")},
			claims: map[string][]string{
				"team/one": {"GPU-b", "GPU-a"}, "team/two": {"MIG-1@GPU-c"}, "team/nic": {},
			},
			want: []Holding{
				claimed("GPU-a", "one", "", Container{"p", "main"}), claimed("GPU-b", "one", "", Container{"q", "main"}),
				claimed("MIG-1", "two", Ending),
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKubelet()
			k.entries = append(c.entries, c.dropped...)
			l := k.refreshed(t)
			l.Offer(nil, []resource.Resource{offer(whole, "GPU-a", "GPU-b")}, offer(whole, "MIG-1@GPU-c"))
			k.set(func() { k.entries, k.holders = c.entries, c.listed })
			read(t, l)
			testenv.Must(t, l.Take(t.Context(), whole, devicesOf(c.given...)))
			for claim, ids := range c.claims {
				l.RestoreClaim(claimOf("of "+claim, claim, portionsOf(ids...)...), since)
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
	l := newKubelet().refreshed(t)
	since := func() time.Time {
		testenv.Must(t, l.TakeClaim(soon(t), claimOf("1", "team/one", portionsOf("GPU-a")...)))
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
		"ResourceClaim team/one": {
			Namespace: "team", Claim: "one", Containers: []Container{{"train", "main"}},
		},
		"a container that is starting":             {State: Starting},
		"container main of the pod with the UID u": {PodUID: "u", Containers: []Container{{"", "main"}}},
	} {
		if got := h.String(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
