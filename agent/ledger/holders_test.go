package ledger

import (
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/resource"
)

// prepared returns a claim of a pod, of the same name, in dra_manager_state.
func prepared(claim, pod string, devices ...string) kubelet.Claim {
	c := kubelet.Claim{UID: "uid-" + claim, Namespace: "team", Name: claim, Pods: []string{pod}}
	c.Devices = map[string][]kubelet.ClaimDevice{}
	for _, d := range devices {
		c.Devices[driver] = append(c.Devices[driver], kubelet.ClaimDevice{Pool: "node", Name: d})
	}
	return c
}

const (
	uuidA = "GPU-aaaaaaaa-0000-4000-8000-000000000000"
	uuidB = "GPU-bbbbbbbb-0000-4000-8000-000000000000"
	uuidC = "GPU-cccccccc-0000-4000-8000-000000000000"
	migA  = "MIG-aaaaaaaa-0000-4000-8000-000000000001"
)

// The books are refreshed twice before anything is expected.
func TestWhoHoldsWhat(t *testing.T) {
	for name, c := range map[string]struct {
		kubelet func(*fakeKubelet)
		earlier *resource.Resource // what was offered before
		offered resource.Resource
		// want has what the reasons contain of devices that no container gets, and claimed those of devices that a claim
		// has. No claim gets any of them.
		want, claimed map[string]string
	}{
		"nobody holds anything": {offered: offer(whole, uuidA, uuidB)},
		"an init container has more than the main container": {
			kubelet: func(k *fakeKubelet) {
				k.entries = []kubelet.Entry{recorded("p/init", whole, uuidA, uuidB), recorded("p/main", whole, uuidA)}
				k.holders = []podresources.Holder{listed("train", whole, uuidA)}
			},
			offered: offer(shared, uuidA+"::0", uuidB+"::0"),
			want: map[string]string{
				uuidA + "::0": "of pod default/train holds it as " + uuidA + " of " + whole,
				uuidB + "::0": "container init of pod default/train holds it as " + uuidB + " of " + whole,
			},
		},
		"a pod that the kubelet has not listed yet": {
			kubelet: func(k *fakeKubelet) { k.entries = []kubelet.Entry{recorded("uid-1", whole, uuidA)} },
			offered: offer(shared, uuidA+"::0", uuidB+"::0"),
			want:    map[string]string{uuidA + "::0": "container main of the pod with the UID uid-1 holds it"},
		},
		"a MIG device is gone, and the answer to Allocate names its GPU": {
			kubelet: func(k *fakeKubelet) {
				k.entries = []kubelet.Entry{recorded("p", "nvidia.com/mig-3g.40gb", migA+"@"+uuidA)}
			},
			offered: offer(whole, uuidA, uuidB),
			want:    map[string]string{uuidA: "holds it as " + migA + " of nvidia.com/mig-3g.40gb"},
		},
		"its GPU is divided anew": {
			kubelet: func(k *fakeKubelet) {
				k.entries = []kubelet.Entry{recorded("p", "nvidia.com/mig-3g.40gb", migA+"@"+uuidA)}
			},
			offered: offer("nvidia.com/mig-1g.10gb", "MIG-8@"+uuidA, "MIG-9@"+uuidB),
			want:    map[string]string{"MIG-8": "holds it as " + migA},
		},
		"a MIG device is gone that this program has offered": {
			kubelet: func(k *fakeKubelet) { k.entries = []kubelet.Entry{recorded("p", whole, migA)} },
			earlier: new(offer(whole, migA+"@"+uuidA, uuidB)),
			offered: offer(whole, uuidA, uuidB),
			want:    map[string]string{uuidA: "holds it as " + migA},
		},
		"a MIG device is gone, and nothing says of which GPU it was": {
			kubelet: func(k *fakeKubelet) { k.entries = []kubelet.Entry{recorded("p", "nvidia.com/mig-1g.10gb", migA)} },
			offered: offer(whole, uuidA, uuidB),
			want: map[string]string{
				uuidA: `holds "` + migA + `" of nvidia.com/mig-1g.10gb, and it is unknown on which GPU that is`, uuidB: migA,
			},
		},
		"a GPU that the node does not have": {
			kubelet: func(k *fakeKubelet) { k.entries = []kubelet.Entry{recorded("p", whole, "GPU-gone")} },
			offered: offer(whole, uuidA),
		},
		"another plugin's ID of our resource": {
			kubelet: func(k *fakeKubelet) { k.entries = []kubelet.Entry{recorded("p", whole, "nvidia0")} },
			offered: offer(whole, uuidA),
			want:    map[string]string{uuidA: `holds "nvidia0" of ` + whole},
		},
		"a device of another plugin": {
			kubelet: func(k *fakeKubelet) { k.entries = []kubelet.Entry{recorded("p", "example.com/nic", "eth0")} },
			offered: offer(whole, uuidA),
		},
		"a claim without a record": {
			kubelet: func(k *fakeKubelet) { k.claims = []kubelet.Claim{prepared("stay", "p", strings.ToLower(uuidA))} },
			offered: offer(whole, uuidA, uuidB),
			claimed: map[string]string{uuidA: "ResourceClaim team/stay holds it as " + uuidA},
		},
		"a claim without a record, of a MIG device that is gone": {
			kubelet: func(k *fakeKubelet) { k.claims = []kubelet.Claim{prepared("stay", "p", strings.ToLower(migA))} },
			earlier: new(offer(whole, migA+"@"+uuidA, uuidB)),
			offered: offer(whole, uuidA, uuidB),
			claimed: map[string]string{uuidA: "ResourceClaim team/stay holds it as " + migA},
		},
		"a claim that only PodResources has": {
			kubelet: func(k *fakeKubelet) {
				k.holders = []podresources.Holder{{Namespace: "team", Pod: "p", Container: "c", Claims: []podresources.Claim{
					{Name: "team/stay", Devices: map[string][]string{driver: {strings.ToLower(uuidA)}, "nic.com": {"gpu-0"}}},
				}}}
			},
			offered: offer(whole, uuidA, uuidB),
			claimed: map[string]string{uuidA: "ResourceClaim team/stay holds it as " + uuidA},
		},
		"a claim of another driver with our name": {
			kubelet: func(k *fakeKubelet) { k.claims = []kubelet.Claim{prepared("theirs", "pod-1", "gpu-0")} },
			offered: offer(whole, uuidA, uuidB),
			claimed: map[string]string{
				uuidA: `ResourceClaim team/theirs holds "gpu-0" for the pod with the UID pod-1, and it is unknown on which GPU`,
				uuidB: "ResourceClaim team/theirs",
			},
		},
		"a claim that is being prepared": {
			kubelet: func(k *fakeKubelet) { k.claims = []kubelet.Claim{prepared("new", "p")} },
			offered: offer(whole, uuidA),
		},
		"a claim of another driver": {
			kubelet: func(k *fakeKubelet) {
				one := prepared("nic", "p")
				one.Devices["nic.com"] = []kubelet.ClaimDevice{{Name: "gpu-0"}}
				k.claims = []kubelet.Claim{one}
			},
			offered: offer(whole, uuidA),
		},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKubelet()
			if c.kubelet != nil {
				c.kubelet(k)
			}
			l := k.ledger()
			if c.earlier != nil {
				l.Offer(nil, []resource.Resource{*c.earlier})
				refresh(t, l)
			}
			l.Offer(nil, []resource.Resource{c.offered})
			refresh(t, l)
			refresh(t, l)
			for i := range c.offered.Devices {
				d := &c.offered.Devices[i]
				expect(t, l, d, c.want[d.ID])
				if got, want := l.Claim(d), c.claimed[d.ID]; (got == "") != (want == "") || !strings.Contains(got, want) {
					t.Errorf("%s: the claim is %q, want %q", d.ID, got, want)
				}
				free := c.want[d.ID] == "" && c.claimed[d.ID] == ""
				if held, err := l.Held(); err != nil || held[d.UUID] == free {
					t.Errorf("%s is held: %t, want %t (error %v)", d.ID, held[d.UUID], !free, err)
				}
				err := l.TakeClaim(soon(t), Claim{UID: "1", Name: "x/y", Portions: []Portion{{Device: d}}})
				if (err == nil) != free {
					t.Errorf("a claim for %s: %v, want free: %t", d.ID, err, free)
				}
				l.DropClaim("1")
				if err := l.Take(t.Context(), c.offered.Name, []*resource.Device{d}); (err == nil) != free {
					t.Errorf("a container for %s: %v, want free: %t", d.ID, err, free)
				}
			}
		})
	}
}

// A pod holds its devices while the kubelet has it as active, and while it has processes.
func TestUntilWhenAPodHoldsItsDevice(t *testing.T) {
	const ending = "(ending)"
	drop := func(k *fakeKubelet) { k.entries = nil }
	for name, c := range map[string]struct {
		then func(*testing.T, *fakeKubelet, *Ledger)
		want string // what the reason contains, or "" if the device is free
	}{
		"an active pod without a process": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods = nil
			refresh(t, l)
			refresh(t, l)
			time.Sleep(time.Hour)
			read(t, l)
		}, "holds it as " + uuidA},
		"the kubelet has dropped it once, and it has no process": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods = nil
			k.set(func() { drop(k) })
			refresh(t, l)
			read(t, l)
		}, ending},
		"the kubelet has dropped it in a file that was not refreshed": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods = nil
			k.set(func() { drop(k) })
			read(t, l)
			k.set(func() {})
			read(t, l)
			k.set(func() {})
			read(t, l)
		}, ending},
		"the kubelet has dropped it twice, and it has no process": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods = nil
			k.set(func() { drop(k) })
			refresh(t, l)
			refresh(t, l)
		}, ""},
		"the kubelet has dropped it, and it still has processes": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.set(func() { drop(k) })
			refresh(t, l)
			refresh(t, l)
			time.Sleep(time.Hour)
			read(t, l)
		}, ending},
		"its processes end later": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.set(func() { drop(k) })
			refresh(t, l)
			refresh(t, l)
			k.pods = nil
			read(t, l)
		}, ""},
		"an older file came between": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods = nil
			before := k.entries
			k.set(func() { drop(k) })
			refresh(t, l)
			k.set(func() { k.entries = before })
			read(t, l)
			k.set(func() { drop(k) })
			refresh(t, l)
		}, ending},
		"the kubelet has lost its file": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.set(func() { drop(k) })
			refresh(t, l)
			refresh(t, l)
			refresh(t, l)
		}, "the UID p, which is ending, holds it"},
		"the file is gone, and no kubelet has written another one": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods, k.version, k.writes = nil, 0, false
			read(t, l)
		}, "holds it as " + uuidA},
		"a process cannot be read": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods, k.partial = nil, true
			k.set(func() { drop(k) })
			refresh(t, l)
			refresh(t, l)
			time.Sleep(unreadable - 10*time.Second)
			read(t, l)
		}, ending},
		"a process cannot be read for long": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods, k.partial = nil, true
			k.set(func() { drop(k) })
			refresh(t, l)
			refresh(t, l)
			time.Sleep(unreadable)
			read(t, l)
		}, ""},
		"no process can be seen": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods, k.blind = nil, true
			k.set(func() { drop(k) })
			refresh(t, l)
			refresh(t, l)
			time.Sleep(gracePeriod - 10*time.Second)
			read(t, l)
		}, ending},
		"no process can be seen, after the grace period": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods, k.blind = nil, true
			k.set(func() { drop(k) })
			refresh(t, l)
			refresh(t, l)
			time.Sleep(gracePeriod + time.Second)
			read(t, l)
		}, ""},
		"processes could not be seen once, long after": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.set(func() { drop(k) })
			refresh(t, l)
			refresh(t, l)
			time.Sleep(time.Hour)
			k.blind = true
			read(t, l)
			k.blind = false
			read(t, l)
		}, ending},
		"the kubelet does not answer": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods, k.err = nil, errors.New("no answer")
			time.Sleep(time.Hour)
			_, _ = l.Read(t.Context())
		}, "holds it as " + uuidA},
		"the file is damaged": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods = nil
			k.set(func() { k.damaged = errors.New("no JSON") })
			_ = l.refresh(t.Context())
			_ = l.refresh(t.Context())
		}, "holds it as " + uuidA},
		"the kubelet is away for a moment": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.stopped, k.pods = true, nil
			read(t, l)
			time.Sleep(restart - time.Second)
			read(t, l)
		}, "holds it as " + uuidA},
		"no kubelet runs any more": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.stopped, k.pods = true, nil
			read(t, l)
			time.Sleep(restart)
			read(t, l)
		}, ""},
		"no kubelet runs any more, but a process of the pod": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.stopped = true
			read(t, l)
			time.Sleep(restart)
			read(t, l)
		}, "holds it as " + uuidA},
		"a kubelet runs again": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.stopped, k.pods = true, nil
			read(t, l)
			time.Sleep(restart)
			read(t, l)
			k.stopped = false
			read(t, l)
		}, "holds it as " + uuidA},
		"another program serves as a kubelet, and an old file is there": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.writes, k.pods = false, nil
			for range 12 {
				refresh(t, l)
			}
			read(t, l)
		}, ""},
		"a kubelet with a slow disk": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.writes, k.pods = false, nil
			for range 11 {
				refresh(t, l)
			}
			read(t, l)
		}, "holds it as " + uuidA},
		"an administrator has had it forgotten": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			err := l.Forget(t.Context(), "p/main/"+uuidA, false)
			if err == nil || !strings.Contains(err.Error(), "has processes") {
				t.Errorf("forgotten under its processes: %v", err)
			}
			if err := l.Forget(t.Context(), "p/main/GPU-x", false); !errors.Is(err, ErrNoHolder) {
				t.Errorf("what nobody holds: %v", err)
			}
			k.pods = nil
			if err := l.Forget(t.Context(), "p/main/"+uuidA, false); err != nil {
				t.Error(err)
			}
			read(t, l)
		}, ""},
		"an administrator has had it forgotten by force": {func(t *testing.T, _ *fakeKubelet, l *Ledger) {
			if err := l.Forget(t.Context(), "p/main/"+uuidA, true); err != nil {
				t.Error(err)
			}
			read(t, l)
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newKubelet()
				k.entries, k.pods = []kubelet.Entry{recorded("p", whole, uuidA)}, []string{"p"}
				l := k.ledger()
				offered := offer(shared, uuidA+"::0", uuidB+"::0")
				l.Offer(nil, []resource.Resource{offered})
				refresh(t, l)
				refresh(t, l)
				c.then(t, k, l)
				expect(t, l, &offered.Devices[0], c.want)
				expect(t, l, &offered.Devices[1], "")
			})
		})
	}
}

// A claim without a record that the kubelet has dropped ends with its pods.
func TestUntilWhenAClaimWithoutARecordHoldsItsDevice(t *testing.T) {
	for name, c := range map[string]struct {
		then func(*testing.T, *fakeKubelet, *Ledger)
		held bool
	}{
		"its pod has processes":           {func(*testing.T, *fakeKubelet, *Ledger) {}, true},
		"its pod has no process any more": {func(_ *testing.T, k *fakeKubelet, _ *Ledger) { k.pods = nil }, false},
		"no process can be seen": {func(_ *testing.T, k *fakeKubelet, _ *Ledger) {
			k.pods, k.blind = nil, true
		}, true},
		"no process can be seen, after the grace period": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods, k.blind = nil, true
			_, _ = l.Read(t.Context())
			time.Sleep(gracePeriod + time.Second)
		}, false},
		"the kubelet has it again": {func(_ *testing.T, k *fakeKubelet, _ *Ledger) {
			k.pods, k.claims = nil, []kubelet.Claim{prepared("stay", "p", strings.ToLower(uuidA))}
		}, true},
		"an administrator has had it forgotten": {func(t *testing.T, k *fakeKubelet, l *Ledger) {
			k.pods = nil
			if err := l.Forget(t.Context(), "uid-stay/"+strings.ToLower(uuidA), false); err == nil {
				t.Error("the pod has ended, so there is nothing to forget")
			}
			k.pods = []string{"p"}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := newKubelet()
				k.claims, k.pods = []kubelet.Claim{prepared("stay", "p", strings.ToLower(uuidA))}, []string{"p"}
				l := k.refreshed(t)
				offered := offer(whole, uuidA)
				l.Offer(nil, []resource.Resource{offered})
				k.claims = nil
				read(t, l)
				c.then(t, k, l)
				read(t, l)
				if why := l.Claim(&offered.Devices[0]); (why != "") != c.held {
					t.Errorf("the claim is %q, want held: %t", why, c.held)
				}
			})
		})
	}
}
