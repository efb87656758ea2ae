package health

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/testenv"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

const (
	gpuA, gpuB   = "GPU-a", "GPU-b"
	migA1, migA2 = "MIG-a1", "MIG-a2"

	noInstance, noRecovery = gpu.NoInstance, gpu.NoRecoveryAction
)

// node is a machine with a clock. GPU a has two MIG devices, and GPU b none.
type node struct {
	*Machine
	now time.Time
}

func newNode(t *testing.T, rules Rules) *node {
	t.Helper()
	n := &node{New(rules), start}
	n.setDevices()
	return n
}

func (n *node) setDevices() {
	n.SetDevices(n.now, []Device{
		{migA1, gpuA, 1, 0}, {migA2, gpuA, 2, 0}, {gpuB, gpuB, noInstance, noInstance},
	})
}

func (n *node) after(d time.Duration) *node {
	n.now = n.now.Add(d)
	return n
}

func (n *node) xid(uuid string, code uint64, recoveryAction int) *node {
	n.Event(n.now, event(uuid, noInstance, noInstance, code, recoveryAction))
	return n
}

func event(uuid string, gpuInstance, computeInstance int, code uint64, recoveryAction int) gpu.Event {
	return gpu.Event{
		GPU: uuid, GPUInstance: gpuInstance, ComputeInstance: computeInstance,
		Kind: gpu.EventXID, XID: code, RecoveryAction: recoveryAction,
	}
}

// clean probes a GPU with an NVLink, which is up.
func (n *node) clean(uuid string, recoveryAction int) *node {
	n.Probe(n.now, &gpu.Probe{UUID: uuid, RecoveryAction: recoveryAction, NVLinks: 1})
	return n
}

// noLinks probes a GPU without an NVLink that is up.
func (n *node) noLinks(uuid string) *node {
	n.Probe(n.now, &gpu.Probe{UUID: uuid})
	return n
}

// found probes a GPU with a fault, whose NVLink was up before.
func (n *node) found(uuid string, fault func(*gpu.Probe)) *node {
	if n.baselines[uuid] == nil {
		n.baselines[uuid] = &baseline{NVLinks: 1}
	}
	p := gpu.Probe{UUID: uuid, RecoveryAction: noRecovery, NVLinks: 1}
	fault(&p)
	n.Probe(n.now, &p)
	return n
}

func lost(p *gpu.Probe)           { p.Error, p.Lost = "GPU is lost", true }
func notAnswering(p *gpu.Probe)   { p.Error = "unknown error" }
func linkDown(p *gpu.Probe)       { p.NVLinks = 0 }
func remapPending(p *gpu.Probe)   { p.RemapPending = true }
func remapFailed(p *gpu.Probe)    { p.RemapFailed = true }
func fabricFailed(p *gpu.Probe)   { p.Fabric = gpu.FabricFailed }
func fabricStarting(p *gpu.Probe) { p.Fabric = gpu.FabricStarting }

// restart makes a new machine of the record.
func (n *node) restart(t *testing.T, from, to Identity) *node {
	t.Helper()
	data, err := n.Record(from)
	testenv.Must(t, err)
	next := &node{New(n.rules), n.now}
	testenv.Must(t, next.Restore(data, to))
	next.setDevices()
	return next
}

func TestStateOfADevice(t *testing.T) {
	boot, rebooted := Identity{"1", "580"}, Identity{"2", "580"}
	for name, c := range map[string]struct {
		do     func(t *testing.T, n *node) *node
		rules  Rules
		state  State
		reason string // a part of it
		remedy Action
	}{
		"a new device is healthy": {
			do: func(_ *testing.T, n *node) *node { return n }, state: Healthy,
		},
		"an application's fault leaves the device healthy": {
			do:    func(_ *testing.T, n *node) *node { return n.xid(gpuB, 31, noRecovery).xid(gpuB, 13, noRecovery) },
			state: Healthy,
		},
		"a code that needs a reset makes it unhealthy": {
			do:    func(_ *testing.T, n *node) *node { return n.xid(gpuB, 95, noRecovery) },
			state: Unhealthy, reason: "XID 95 (uncontained ECC error)", remedy: Reset,
		},
		"clean probes alone do not undo a code that needs a reset": {
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 95, noRecovery).clean(gpuB, noRecovery).after(time.Hour).clean(gpuB, noRecovery)
			},
			state: Unhealthy, reason: "XID 95", remedy: Reset,
		},
		"after a reset probes must be clean for a time": {
			do: func(_ *testing.T, n *node) *node {
				n.xid(gpuB, 95, noRecovery).WasReset(n.now, gpuB)
				return n.clean(gpuB, noRecovery).after(4*time.Second).clean(gpuB, noRecovery)
			},
			state: Recovering, reason: "XID 95", remedy: Reset,
		},
		"after a reset and clean probes it is healthy": {
			do: func(_ *testing.T, n *node) *node {
				n.xid(gpuB, 95, noRecovery).WasReset(n.now, gpuB)
				return n.clean(gpuB, noRecovery).after(5*time.Second).clean(gpuB, noRecovery)
			},
			state: Healthy,
		},
		"a reset does not help a device that needs a reboot": {
			do: func(_ *testing.T, n *node) *node {
				n.xid(gpuB, 79, noRecovery).WasReset(n.now, gpuB)
				return n.clean(gpuB, noRecovery).after(time.Hour).clean(gpuB, noRecovery)
			},
			state: Unhealthy, reason: "fallen off the bus", remedy: Reboot,
		},
		"a lost GPU that answers again was initialised again": {
			do: func(_ *testing.T, n *node) *node {
				n.xid(gpuB, 79, noRecovery).found(gpuB, lost).after(time.Minute)
				return n.clean(gpuB, noRecovery).after(5*time.Second).clean(gpuB, noRecovery)
			},
			state: Healthy,
		},
		"a lost GPU that only gives another error does not answer again": {
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 95, noRecovery).found(gpuB, lost).found(gpuB, notAnswering)
			},
			state: Unhealthy, reason: "XID 95", remedy: Reset,
		},
		"a lost GPU that answers again may still need service": {
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 54, noRecovery).found(gpuB, lost).
					clean(gpuB, noRecovery).after(time.Hour).clean(gpuB, noRecovery)
			},
			state: Unhealthy, reason: "XID 54", remedy: Service,
		},
		"a lost GPU that answers again still needs what a rule says": {
			rules: Rules{XIDs: map[uint64]Rule{94: {Action: Service}}},
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 94, noRecovery).found(gpuB, lost).
					clean(gpuB, noRecovery).after(time.Hour).clean(gpuB, noRecovery)
			},
			state: Unhealthy, reason: "XID 94", remedy: Service,
		},
		"the driver's recovery action none overrules the catalogue": {
			do: func(_ *testing.T, n *node) *node { return n.xid(gpuB, 95, 0) }, state: Healthy,
		},
		"the driver's recovery action overrules a harmless code": {
			do:    func(_ *testing.T, n *node) *node { return n.xid(gpuB, 45, 2) },
			state: Unhealthy, reason: "XID 45 (an application's channel was cleaned up); the driver requires a reboot",
			remedy: Reboot,
		},
		"a recovery action that is not known is not healthy": {
			do:    func(_ *testing.T, n *node) *node { return n.clean(gpuB, 99) },
			state: Unhealthy, reason: "the unknown recovery action 99", remedy: Service,
		},
		"the recovery action none lifts what an event reported": {
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 95, 1).clean(gpuB, 0).after(5*time.Second).clean(gpuB, 0)
			},
			state: Healthy,
		},
		"an administrator's rule overrules the driver": {
			rules: Rules{XIDs: map[uint64]Rule{31: {Action: Service}}},
			do:    func(_ *testing.T, n *node) *node { return n.xid(gpuB, 31, 0) },
			state: Unhealthy, reason: "XID 31", remedy: Service,
		},
		"an administrator's rule can ignore a code": {
			rules: Rules{XIDs: map[uint64]Rule{95: {Action: None}}},
			do:    func(_ *testing.T, n *node) *node { return n.xid(gpuB, 95, 1) }, state: Healthy,
		},
		"fewer events than a rule counts do nothing": {
			rules: Rules{XIDs: map[uint64]Rule{74: {Reset, 3, 10 * time.Minute}}},
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 74, 0).after(6*time.Minute).xid(gpuB, 74, 0).after(6*time.Minute).xid(gpuB, 74, 0)
			},
			state: Healthy,
		},
		"as many events as a rule counts take effect": {
			rules: Rules{XIDs: map[uint64]Rule{74: {Reset, 3, 10 * time.Minute}}},
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 74, 0).after(4*time.Minute).xid(gpuB, 74, 0).after(4*time.Minute).xid(gpuB, 74, 0)
			},
			state: Unhealthy, reason: "NVLink error), 3 times within 10m0s", remedy: Reset,
		},
		"a code that says nothing by itself makes it suspect": {
			do:    func(_ *testing.T, n *node) *node { return n.xid(gpuB, 48, noRecovery) },
			state: Suspect, reason: "XID 48 (double bit ECC error)", remedy: Probe,
		},
		"a code that is not in the catalogue makes it suspect": {
			do:    func(_ *testing.T, n *node) *node { return n.xid(gpuB, 999, noRecovery) },
			state: Suspect, reason: "XID 999", remedy: Probe,
		},
		"a suspect becomes healthy by clean probes": {
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 48, noRecovery).clean(gpuB, noRecovery).after(5*time.Second).clean(gpuB, noRecovery)
			},
			state: Healthy,
		},
		"a suspect becomes unhealthy by a finding": {
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 48, noRecovery).found(gpuB, remapPending)
			},
			state: Unhealthy, reason: "a row of its memory is remapped", remedy: Reset,
		},
		"a finding that is gone ends by itself": {
			do: func(_ *testing.T, n *node) *node {
				return n.found(gpuB, linkDown).after(time.Second).clean(gpuB, 0).after(5*time.Second).clean(gpuB, 0)
			},
			state: Healthy,
		},
		"the latest finding is the reason": {
			do: func(_ *testing.T, n *node) *node {
				return n.found(gpuB, remapPending).found(gpuB, linkDown)
			},
			state: Unhealthy, reason: "1 of its 1 NVLinks are down", remedy: None,
		},
		"the more severe of an event and a finding is the reason": {
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 79, noRecovery).found(gpuB, linkDown)
			},
			state: Unhealthy, reason: "XID 79", remedy: Reboot,
		},
		"an event counts also if a finding that needs as much was there before": {
			do: func(_ *testing.T, n *node) *node {
				return n.found(gpuB, fabricFailed).xid(gpuB, 95, noRecovery).
					clean(gpuB, noRecovery).after(time.Hour).clean(gpuB, noRecovery)
			},
			state: Unhealthy, reason: "XID 95", remedy: Reset,
		},
		"a rule counts also if the driver has asked for as much before": {
			rules: Rules{XIDs: map[uint64]Rule{94: {Action: Reset}}},
			do: func(_ *testing.T, n *node) *node {
				return n.clean(gpuB, 1).xid(gpuB, 94, 1).clean(gpuB, 0).after(time.Hour).clean(gpuB, 0)
			},
			state: Unhealthy, reason: "XID 94", remedy: Reset,
		},
		"a rule still counts when a worse finding has passed": {
			rules: Rules{XIDs: map[uint64]Rule{94: {Action: Reset}}},
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 94, 0).clean(gpuB, 2).clean(gpuB, 0).after(time.Hour).clean(gpuB, 0)
			},
			state: Unhealthy, reason: "XID 94", remedy: Reset,
		},
		"a rule still counts when a worse event has come": {
			rules: Rules{XIDs: map[uint64]Rule{94: {Action: Reset}}},
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 94, 0).xid(gpuB, 79, 2).clean(gpuB, 0).after(time.Hour).clean(gpuB, 0)
			},
			state: Unhealthy, reason: "XID 94", remedy: Reset,
		},
		"a worse finding is the reason until it has passed": {
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 95, noRecovery).found(gpuB, remapFailed)
			},
			state: Unhealthy, reason: "could not be remapped", remedy: Service,
		},
		"an event after a reset needs another one": {
			do: func(_ *testing.T, n *node) *node {
				n.xid(gpuB, 95, noRecovery).WasReset(n.now, gpuB)
				return n.xid(gpuB, 95, noRecovery).clean(gpuB, noRecovery).after(time.Hour).clean(gpuB, noRecovery)
			},
			state: Unhealthy, reason: "XID 95", remedy: Reset,
		},
		"a flapping link must be up for longer each time": {
			do: func(_ *testing.T, n *node) *node {
				for range 4 {
					n.found(gpuB, linkDown).after(time.Second).clean(gpuB, 0).after(time.Minute).clean(gpuB, 0)
				}
				return n.found(gpuB, linkDown).clean(gpuB, 0).after(79*time.Second).clean(gpuB, 0)
			},
			state: Recovering, reason: "1 of its 1 NVLinks are down",
		},
		"after an hour a relapse is the first one": {
			do: func(_ *testing.T, n *node) *node {
				for range 4 {
					n.found(gpuB, linkDown).after(time.Second).clean(gpuB, 0).after(time.Minute).clean(gpuB, 0)
				}
				n.after(2*time.Hour).found(gpuB, linkDown)
				return n.clean(gpuB, 0).after(5*time.Second).clean(gpuB, 0)
			},
			state: Healthy,
		},
		"a cordon hides the state": {
			do: func(_ *testing.T, n *node) *node {
				_, _ = n.Cordon(n.now, gpuB, "a fan is loud")
				return n.xid(gpuB, 95, noRecovery)
			},
			state: Cordoned, reason: "cordoned: a fan is loud", remedy: Reset,
		},
		"uncordon shows the state again": {
			do: func(_ *testing.T, n *node) *node {
				_, _ = n.Cordon(n.now, gpuB, "")
				_, _ = n.xid(gpuB, 95, noRecovery).Uncordon(n.now, gpuB)
				return n
			},
			state: Unhealthy, reason: "XID 95", remedy: Reset,
		},
		"a restart of the program changes nothing": {
			do: func(t *testing.T, n *node) *node {
				return n.xid(gpuB, 79, noRecovery).restart(t, boot, boot).clean(gpuB, noRecovery)
			},
			state: Unhealthy, reason: "XID 79", remedy: Reboot,
		},
		"a restart is no reset": {
			do: func(t *testing.T, n *node) *node {
				return n.xid(gpuB, 95, noRecovery).restart(t, boot, boot).
					clean(gpuB, noRecovery).after(time.Hour).clean(gpuB, noRecovery)
			},
			state: Unhealthy, reason: "XID 95", remedy: Reset,
		},
		"a restart does not lift a rule": {
			rules: Rules{XIDs: map[uint64]Rule{94: {Action: Reset}}},
			do: func(t *testing.T, n *node) *node {
				return n.xid(gpuB, 94, 0).restart(t, boot, boot).clean(gpuB, 0).after(time.Hour).clean(gpuB, 0)
			},
			state: Unhealthy, reason: "XID 94", remedy: Reset,
		},
		"a GPU that did not answer for a time was not reset by that": {
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 95, noRecovery).found(gpuB, notAnswering).after(time.Minute).
					clean(gpuB, noRecovery).after(time.Hour).clean(gpuB, noRecovery)
			},
			state: Unhealthy, reason: "XID 95", remedy: Reset,
		},
		"clean probes do not undo an administrator's rule": {
			rules: Rules{XIDs: map[uint64]Rule{31: {Action: Reset}}},
			do: func(_ *testing.T, n *node) *node {
				return n.xid(gpuB, 31, 0).clean(gpuB, 0).after(time.Hour).clean(gpuB, 0)
			},
			state: Unhealthy, reason: "XID 31", remedy: Reset,
		},
		"what comes up again after a reset is no relapse": {
			do: func(_ *testing.T, n *node) *node {
				n.WasReset(n.now, gpuB)
				for range 5 {
					n.found(gpuB, fabricStarting).after(3 * time.Second)
					n.clean(gpuB, 0).after(5*time.Second).clean(gpuB, 0)
				}
				return n
			},
			state: Healthy,
		},
		"a code beyond those that are counted takes effect": {
			do: func(_ *testing.T, n *node) *node {
				for code := range uint64(maxCodes) {
					n.xid(gpuB, 1000+code, 0)
				}
				return n.xid(gpuB, 79, noRecovery)
			},
			state: Unhealthy, reason: "XID 79", remedy: Reboot,
		},
		"after a reboot an unhealthy device is probed first": {
			do: func(t *testing.T, n *node) *node {
				return n.xid(gpuB, 79, noRecovery).restart(t, boot, rebooted)
			},
			state: Suspect, reason: "XID 79", remedy: Probe,
		},
		"after a reboot clean probes make it healthy": {
			do: func(t *testing.T, n *node) *node {
				return n.xid(gpuB, 79, noRecovery).restart(t, boot, rebooted).
					clean(gpuB, noRecovery).after(5*time.Second).clean(gpuB, noRecovery)
			},
			state: Healthy,
		},
		"a link that is still down after a reboot is a fault": {
			do: func(t *testing.T, n *node) *node {
				return n.clean(gpuB, 0).restart(t, boot, rebooted).noLinks(gpuB)
			},
			state: Unhealthy, reason: "1 of its 1 NVLinks are down",
		},
		"the count of uncorrected errors begins at 0 after a reboot": {
			do: func(t *testing.T, n *node) *node {
				n = n.clean(gpuB, 0).restart(t, boot, rebooted)
				n.Probe(n.now, &gpu.Probe{UUID: gpuB, NVLinks: 1, UncorrectedECC: 5})
				return n
			},
			state: Healthy,
		},
		"a link that is down when the GPU is uncordoned is no fault": {
			do: func(_ *testing.T, n *node) *node {
				_, _ = n.clean(gpuB, 0).noLinks(gpuB).Cordon(n.now, gpuB, "its peer was removed")
				_, _ = n.noLinks(gpuB).Uncordon(n.now, gpuB)
				return n.noLinks(gpuB).after(5 * time.Second).noLinks(gpuB)
			},
			state: Healthy,
		},
		"uncordon of a GPU that is not cordoned does not excuse its links": {
			do: func(_ *testing.T, n *node) *node {
				_, _ = n.clean(gpuB, 0).noLinks(gpuB).Uncordon(n.now, gpuB)
				return n.noLinks(gpuB).after(5 * time.Second).noLinks(gpuB)
			},
			state: Unhealthy, reason: "1 of its 1 NVLinks are down",
		},
		"a cordon holds after a reboot": {
			do: func(t *testing.T, n *node) *node {
				_, _ = n.Cordon(n.now, gpuB, "a fan is loud")
				return n.restart(t, boot, rebooted)
			},
			state: Cordoned, reason: "a fan is loud",
		},
		"a device that comes back is as it was": {
			do: func(_ *testing.T, n *node) *node {
				n.xid(gpuB, 95, noRecovery).SetDevices(n.now, nil)
				n.setDevices()
				return n
			},
			state: Unhealthy, reason: "XID 95", remedy: Reset,
		},
		"what was found on a device makes it suspect, whatever the probes say": {
			do: func(_ *testing.T, n *node) *node {
				n.SetInUse(n.now, gpuB, "process 4711 uses it")
				return n.clean(gpuB, noRecovery).after(time.Hour).clean(gpuB, noRecovery)
			},
			state: Suspect, reason: "process 4711 uses it",
		},
		"it is healthy as soon as nothing is found": {
			do: func(_ *testing.T, n *node) *node {
				n.SetInUse(n.now, gpuB, "process 4711 uses it")
				n.SetInUse(n.now, gpuB, "")
				return n
			},
			state: Healthy,
		},
		"what was found last is the reason": {
			do: func(_ *testing.T, n *node) *node {
				n.SetInUse(n.now, gpuB, "process 4711 uses it")
				n.SetInUse(n.now, gpuB, "2048 MiB are in use")
				return n
			},
			state: Suspect, reason: "2048 MiB",
		},
		"a fault is worse than what was found": {
			do: func(_ *testing.T, n *node) *node {
				n.SetInUse(n.now, gpuB, "process 4711 uses it")
				return n.xid(gpuB, 95, noRecovery)
			},
			state: Unhealthy, reason: "XID 95", remedy: Reset,
		},
		"a device in use stays suspect after a restart and a reboot": {
			do: func(t *testing.T, n *node) *node {
				n.SetInUse(n.now, gpuB, "process 4711 uses it")
				return n.restart(t, boot, rebooted)
			},
			state: Suspect, reason: "process 4711 uses it",
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := c.do(t, newNode(t, c.rules))
			got := n.Statuses()[gpuB]
			if got.State != c.state || !strings.Contains(got.Reason, c.reason) || (got.Reason == "") != (c.reason == "") {
				t.Errorf("the device is %s (%s), want %s (%s)", got.State, got.Reason, c.state, c.reason)
			}
			if c.remedy != "" && got.Remedy != c.remedy {
				t.Errorf("its remedy is %q, want %q", got.Remedy, c.remedy)
			}
			for _, other := range []string{migA1, migA2} {
				if s := n.Statuses()[other]; s.State != Healthy {
					t.Errorf("another GPU's device %s is %s", other, s.State)
				}
			}
		})
	}
}

// A reset takes a GPU with its MIG devices out of service, and leaves their cordons alone. A reset can remove MIG
// devices, which come back later.
func TestHoldForReset(t *testing.T) {
	gpu, mig := Device{gpuA, gpuA, noInstance, noInstance}, Device{migA1, gpuA, 1, 0}
	m := New(Rules{})
	m.SetDevices(start, []Device{gpu, mig})
	m.SetDevices(start, []Device{gpu})
	want := func(when, gpuReason, migReason string) {
		t.Helper()
		m.SetDevices(start, []Device{gpu, mig})
		all := m.Statuses()
		if all[gpuA].Reason != gpuReason || all[migA1].Reason != migReason {
			t.Errorf("%s: %q and %q, want %q and %q", when, all[gpuA].Reason, all[migA1].Reason, gpuReason, migReason)
		}
		m.SetDevices(start, []Device{gpu})
	}
	const held = "held for a reset by an administrator"
	if list, err := m.HoldForReset(start.Add(time.Hour), gpuA, held); len(list) != 1 || err != nil {
		t.Errorf("transitions %v, error %v", list, err)
	}
	want("held", held, held)
	if s := m.Statuses()[gpuA]; s.State != Cordoned || s.Since != start.Add(time.Hour) {
		t.Errorf("the GPU is %+v", s)
	}
	_, _ = m.Cordon(start, gpuA, "x")
	want("held and cordoned", "cordoned: x", "cordoned: x")
	_, _ = m.Uncordon(start, gpuA)
	want("uncordoned", held, held)
	_, _ = m.Cordon(start, migA1, "y")

	data, err := m.Record(Identity{})
	testenv.Must(t, err)
	m = New(Rules{})
	testenv.Must(t, m.Restore(data, Identity{}))
	if diff := cmp.Diff([]string{gpuA}, m.Held()); diff != "" {
		t.Errorf("held after a restart: %s", diff)
	}
	m.EndHold(gpuA)
	want("ended", "", "cordoned: y")
	if held := m.Held(); len(held) > 0 {
		t.Errorf("after the end %v are held", held)
	}
}

// That a GPU cannot be reset is recorded, and forgotten when it is reset, with another driver and after a reboot.
func TestCannotReset(t *testing.T) {
	id, why := Identity{"1", "580"}, "Not Supported"
	n := newNode(t, Rules{})
	n.SetCannotReset(gpuB, why)
	if got, other := n.CannotReset(gpuB), n.CannotReset(gpuA); got != why || other != "" {
		t.Errorf("%q and %q, want %q and nothing", got, other, why)
	}
	data, err := n.Record(id)
	testenv.Must(t, err)
	for now, want := range map[Identity]string{id: why, {"1", "590"}: "", {"2", "580"}: ""} {
		m := New(Rules{})
		if err := m.Restore(data, now); err != nil || m.CannotReset(gpuB) != want {
			t.Errorf("%+v: %q, error %v, want %q", now, m.CannotReset(gpuB), err, want)
		}
	}
	n.WasReset(n.now, gpuB)
	if got := n.CannotReset(gpuB); got != "" {
		t.Errorf("after a reset: %q", got)
	}
}

func TestTheRecordDoesNotChangeWithTheTime(t *testing.T) {
	n := newNode(t, Rules{}).clean(gpuB, 0)
	before, err := n.Record(Identity{})
	n.after(time.Hour).setDevices()
	after, errAfter := n.clean(gpuB, 0).Record(Identity{})
	if diff := cmp.Diff(string(before), string(after)); diff != "" || err != nil || errAfter != nil {
		t.Errorf("errors %v, %v, (-before +after):\n%s", err, errAfter, diff)
	}
}

// The names in the record stay: the next version reads it.
func TestTheRecordKeepsItsFormat(t *testing.T) {
	const data = `{
  "version": 1,
  "boot": "1",
  "driver": "580",
  "devices": [
    {
      "uuid": "MIG-a1",
      "gpu": "GPU-a",
      "gpuInstance": 1,
      "computeInstance": 2,
      "seen": "2026-01-02T03:04:05Z",
      "state": "unhealthy",
      "reason": "a fault",
      "remedy": "reboot",
      "since": "2026-01-02T03:04:05Z",
      "event": {
        "text": "XID 79",
        "action": "reboot"
      },
      "rule": {
        "text": "XID 94",
        "action": "reset"
      },
      "lost": true,
      "cordon": "a fan is loud",
      "cordonSince": "2026-01-02T03:04:05Z",
      "hold": "held for a reset",
      "heldSince": "2026-01-02T03:04:05Z",
      "cannotReset": "Not Supported",
      "dirty": "process 4711 uses it",
      "dirtySince": "2026-01-02T03:04:05Z",
      "relapses": 7,
      "recovered": "2026-01-02T03:04:05Z",
      "xids": {
        "79": 3
      }
    }
  ],
  "baselines": {
    "GPU-a": {
      "nvLinks": 3,
      "uncorrectedECC": 4
    }
  }
}
`
	m := New(Rules{})
	testenv.Must(t, m.Restore([]byte(data), Identity{"1", "580"}))
	got, err := m.Record(Identity{"1", "580"})
	if diff := cmp.Diff(data, string(got)); diff != "" || err != nil {
		t.Errorf("error %v, (-want +got):\n%s", err, diff)
	}
}

func TestUncordonOfAMIGDevice(t *testing.T) {
	gpu, mig := Device{gpuA, gpuA, noInstance, noInstance}, Device{migA1, gpuA, 1, 0}
	m := New(Rules{})
	m.SetDevices(start, []Device{gpu, mig})
	_, _ = m.Cordon(start, gpuA, "a fan is loud")
	const want = "MIG-a1 is a part of GPU GPU-a, which is cordoned: uncordon the GPU"
	if list, err := m.Uncordon(start, migA1); err == nil || err.Error() != want || list != nil {
		t.Errorf("transitions %v, error %v, want %s", list, err, want)
	}
	if s := m.Statuses()[migA1]; s.State != Cordoned {
		t.Errorf("with its GPU cordoned: %+v", s)
	}
	_, _ = m.Uncordon(start, gpuA)
	_, _ = m.Cordon(start, migA1, "y")
	if _, err := m.Uncordon(start, migA1); err != nil || m.Statuses()[migA1].State != Healthy {
		t.Errorf("error %v, %+v", err, m.Statuses()[migA1])
	}
}

func TestCordonOfADeviceThatIsNotThere(t *testing.T) {
	n := newNode(t, Rules{})
	n.SetDevices(n.now, nil)
	if list, err := n.Cordon(n.now, gpuB, "x"); err != nil || list != nil || !n.Knows(gpuB) {
		t.Errorf("transitions %v, error %v, known %t", list, err, n.Knows(gpuB))
	}
	n.setDevices()
	if s := n.Statuses()[gpuB]; s.State != Cordoned {
		t.Errorf("when it is back: %+v", s)
	}
	if _, err := n.Cordon(n.now, "GPU-z", "x"); err == nil || n.Knows("GPU-z") {
		t.Errorf("a device of which nothing is known: error %v, known %t", err, n.Knows("GPU-z"))
	}
}

// It is on record for people. The next process finds out for itself.
func TestEventsMissedAreRecordedAndNotRestored(t *testing.T) {
	id := Identity{"1", "580"}
	n := newNode(t, Rules{})
	for _, why := range []string{"nvmlEventSetCreate: Unknown Error", "GPU is lost"} {
		if changed := n.SetEventsMissed(gpuB, why); changed != (why != "GPU is lost") {
			t.Errorf("%s: changed is %t", why, changed)
		}
	}
	data, err := n.Record(id)
	testenv.Must(t, err)
	all, err := Recorded(data, id)
	if err != nil || all[gpuB].EventsMissed != "nvmlEventSetCreate: Unknown Error" || all[gpuA].EventsMissed != "" {
		t.Errorf("recorded: %v, error %v", all, err)
	}
	if next := n.restart(t, id, id); next.Statuses()[gpuB].EventsMissed != "" {
		t.Error("the next process believes that events are missed")
	}
	if !n.SetEventsMissed(gpuB, "") || n.SetEventsMissed(gpuB, "") || n.Statuses()[gpuB].EventsMissed != "" {
		t.Error("the events are still missed")
	}
}

// A cordon can be set and lifted in a record, which keeps all else.
func TestEditCordon(t *testing.T) {
	id := Identity{"1", "580"}
	n := newNode(t, Rules{}).xid(gpuB, 95, noRecovery)
	data, err := n.Record(id)
	testenv.Must(t, err)
	edit := func(d Device, reason string) map[string]Status {
		t.Helper()
		if data, err = EditCordon(data, Identity{}, start, d, reason); err != nil {
			t.Fatal(err)
		}
		all, err := Recorded(data, id)
		testenv.Must(t, err)
		return all
	}
	other := Device{"GPU-c", "GPU-c", noInstance, noInstance}
	all := edit(other, "it is new")
	if all["GPU-c"].Reason != "cordoned: it is new" || all[gpuB].State != Unhealthy {
		t.Errorf("after the cordon of a new device: %v", all)
	}
	all = edit(Device{UUID: gpuA}, "a fan is loud") // with its MIG devices
	if all[migA1].State != Cordoned || all[migA2].State != Cordoned || all[gpuB].State != Unhealthy {
		t.Errorf("after the cordon of a GPU: %v", all)
	}
	if _, err := EditCordon(data, id, start, Device{UUID: migA1}, ""); err == nil {
		t.Error("a MIG device of a cordoned GPU is uncordoned")
	}
	all = edit(Device{UUID: gpuB}, "a fan is loud")
	if all[gpuB].State != Cordoned {
		t.Errorf("after a cordon: %v", all[gpuB])
	}
	all = edit(Device{UUID: gpuB}, "")
	if all[gpuB].State != Unhealthy || all[gpuB].Remedy != Reset {
		t.Errorf("after the cordon was lifted: %v", all[gpuB])
	}
	data = nil
	if all = edit(other, "the first"); len(all) != 1 || all["GPU-c"].State != Cordoned {
		t.Errorf("a new record: %v", all)
	}
	for _, damaged := range []string{"{", `{"version": 2}`} {
		if data, err := EditCordon([]byte(damaged), id, start, other, "x"); err == nil || data != nil {
			t.Errorf("%s: %s, %v", damaged, data, err)
		}
	}
}

func TestWhatAnEventConcerns(t *testing.T) {
	for name, c := range map[string]struct {
		event gpu.Event
		want  []string
	}{
		"an event of a GPU concerns all its MIG devices": {
			event(gpuA, noInstance, noInstance, 95, noRecovery), []string{migA1, migA2},
		},
		"an event of a GPU instance concerns its devices":  {event(gpuA, 2, noInstance, 95, noRecovery), []string{migA2}},
		"an event of a compute instance concerns it":       {event(gpuA, 1, 0, 95, noRecovery), []string{migA1}},
		"an event of an unknown instance concerns the GPU": {event(gpuA, 1, 3, 95, noRecovery), []string{migA1, migA2}},
		"an event of an unknown GPU concerns none":         {event("GPU-z", noInstance, noInstance, 95, noRecovery), nil},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, Rules{})
			transitions, first := n.Event(n.now, c.event)
			var got []string
			for _, tr := range transitions {
				got = append(got, tr.To.UUID)
			}
			if diff := cmp.Diff(c.want, got); diff != "" || first != (c.want != nil) {
				t.Errorf("transitions (-want +got), first %t:\n%s", first, diff)
			}
		})
	}
}

// It does not matter whether there was a MIG device with the same UUID before.
func TestANewMIGDeviceIsAsItsGPU(t *testing.T) {
	gpu, mig := Device{gpuA, gpuA, noInstance, noInstance}, Device{migA1, gpuA, 1, 0}
	for name, c := range map[string]struct {
		do   func(m *Machine)
		want State
	}{
		"healthy":   {func(*Machine) {}, Healthy},
		"unhealthy": {func(m *Machine) { m.Event(start, event(gpuA, noInstance, noInstance, 79, noRecovery)) }, Unhealthy},
		"cordoned":  {func(m *Machine) { _, _ = m.Cordon(start, gpuA, "x") }, Cordoned},
		"no longer cordoned": {func(m *Machine) {
			_, _ = m.Cordon(start, gpuA, "x")
			_, _ = m.Uncordon(start, gpuA)
		}, Healthy},
	} {
		for _, before := range [][]Device{{gpu}, {gpu, mig}} {
			m := New(Rules{})
			m.SetDevices(start, before)
			m.SetDevices(start, []Device{gpu})
			c.do(m)
			m.SetDevices(start, []Device{gpu, mig})
			if s := m.Statuses()[migA1]; s.State != c.want || s.UUID != migA1 {
				t.Errorf("on a GPU that is %s, after %v: %+v", name, before, s)
			}
			if s := m.Statuses()[gpuA]; s.UUID != gpuA {
				t.Errorf("the GPU is %+v", s)
			}
		}
	}
}

func TestAMIGDeviceThatReturns(t *testing.T) {
	gpu, mig := Device{gpuA, gpuA, noInstance, noInstance}, Device{migA1, gpuA, 1, 0}
	for name, c := range map[string]struct {
		do      func(m *Machine)
		without []Device // while it is gone
		// unreadable are the GPUs that cannot be read meanwhile.
		unreadable []string
		want       State
	}{
		"a fault stays if the GPU was gone too": {
			func(m *Machine) { m.Event(start, event(gpuA, 1, 0, 95, noRecovery)) }, nil, nil, Unhealthy,
		},
		"a fault stays if the GPU could not be read": {
			func(m *Machine) { m.Event(start, event(gpuA, 1, 0, 95, noRecovery)) }, []Device{gpu}, []string{gpuA}, Unhealthy,
		},
		"a fault goes if it was created again": {
			func(m *Machine) { m.Event(start, event(gpuA, 1, 0, 95, noRecovery)) }, []Device{gpu}, nil, Healthy,
		},
		"a cordon stays": {
			func(m *Machine) { _, _ = m.Cordon(start, migA1, "x") }, []Device{gpu}, nil, Cordoned,
		},
		"a cordon that ended with the GPU's while it was gone": {
			func(m *Machine) {
				_, _ = m.Cordon(start, gpuA, "x")
				m.SetDevices(start, []Device{gpu})
				_, _ = m.Uncordon(start, gpuA)
			}, []Device{gpu}, nil, Healthy,
		},
	} {
		m := New(Rules{})
		m.SetDevices(start, []Device{gpu, mig})
		c.do(m)
		m.SetDevices(start, c.without, c.unreadable...)
		m.SetDevices(start, []Device{gpu, mig})
		if s := m.Statuses()[migA1]; s.State != c.want {
			t.Errorf("%s: %+v", name, s)
		}
	}
}

// Frequent probes are for what they can change.
func TestNeedsFrequentProbes(t *testing.T) {
	n := newNode(t, Rules{})
	for _, c := range []struct {
		what string
		do   func()
		want bool
	}{
		{"all are healthy", func() {}, false},
		{"one is suspect", func() { n.xid(gpuB, 48, noRecovery) }, true},
		{"it waits for a reboot", func() { n.xid(gpuB, 79, noRecovery) }, false},
		{"another needs a reset", func() { n.xid(gpuA, 95, noRecovery) }, true},
		{"that one is cordoned", func() { _, _ = n.Cordon(n.now, gpuA, "") }, false},
		{"it is uncordoned", func() { _, _ = n.Uncordon(n.now, gpuA) }, true},
		{"it waits for its reset", func() { _, _ = n.HoldForReset(n.now, gpuA, "x") }, false},
	} {
		c.do()
		if got := n.NeedsFrequentProbes(); got != c.want {
			t.Errorf("%s: %t, want %t", c.what, got, c.want)
		}
	}
}

func TestSetInUse(t *testing.T) {
	n := newNode(t, Rules{})
	found := func(reason string) []Transition { return n.after(time.Minute).SetInUse(n.now, gpuB, reason) }
	first := found("a")
	if len(first) != 1 || first[0].From != Healthy || first[0].To.State != Suspect || !first[0].To.Since.Equal(n.now) {
		t.Errorf("at the first time: %+v", first)
	}
	if !n.InUse(gpuB) || n.InUse(migA1) || n.InUse("GPU-c") {
		t.Error("another device is marked, or this one is not")
	}
	if n.NeedsFrequentProbes() {
		t.Error("frequent probes are asked for, which change nothing")
	}
	since := n.now
	if again := found("a"); again != nil {
		t.Errorf("again: %+v", again)
	}
	if other := found("b"); len(other) != 1 || !other[0].To.Since.Equal(since) {
		t.Errorf("another reason: %+v, want since %s", other, since)
	}
	if end := found(""); len(end) != 1 || end[0].To.State != Healthy || !end[0].To.Since.Equal(n.now) {
		t.Errorf("at the end: %+v", end)
	}
	end := n.now
	if again, s := found(""), n.Statuses()[gpuB]; again != nil || !s.Since.Equal(end) {
		t.Errorf("without a reason: %+v, healthy since %s, want %s", again, s.Since, end)
	}
	n.xid(gpuB, 48, noRecovery) // suspect by an event
	if n.InUse(gpuB) {
		t.Error("after the end and an event the device is marked")
	}
	if found("a"); !n.InUse(gpuB) {
		t.Error("a device that is suspect by an event is not marked")
	}
	if absent := n.SetInUse(n.now, "GPU-c", "a"); absent != nil {
		t.Errorf("a device that is not there: %+v", absent)
	}
}

// 672 events in 3 hours made 288 healthy nodes look broken in the field.
func TestXID45DoesNotMakeAnyDeviceUnhealthy(t *testing.T) {
	n := newNode(t, Rules{})
	for range 672 {
		n.after(3*time.Hour/672).xid(gpuA, 45, noRecovery).xid(gpuB, 45, noRecovery)
	}
	for uuid, s := range n.Statuses() {
		if s.State != Healthy || s.XIDs[45] != 672 {
			t.Errorf("%s is %s after %d events", uuid, s.State, s.XIDs[45])
		}
	}
}

func TestManyEventsAreCountedAndReportedOnce(t *testing.T) {
	n := newNode(t, Rules{XIDs: map[uint64]Rule{31: {Reset, 1000, time.Nanosecond}}})
	reported := 0
	for i := range 800_000 {
		if _, first := n.Event(n.now, event(gpuB, noInstance, noInstance, uint64(i%29), noRecovery)); first {
			reported++
		}
	}
	if reported != 29 {
		t.Errorf("%d events were new, want 29", reported)
	}
	for i := range uint64(100_000) {
		n.Event(n.now, event(gpuB, noInstance, noInstance, i, noRecovery))
	}
	if got := len(n.entries[gpuB].codes); got != maxCodes {
		t.Errorf("%d codes are remembered, want %d", got, maxCodes)
	}
}

func TestDevicesThatAreAbsentAreForgottenAtLast(t *testing.T) {
	m := New(Rules{})
	for i := range 1000 {
		uuid := fmt.Sprint("GPU-", (i+500)%1000)
		m.SetDevices(start.AddDate(0, 0, i), []Device{{uuid, uuid, -1, -1}})
	}
	if len(m.entries) != maxAbsent+1 || m.entries["GPU-499"] == nil || m.entries["GPU-498"] == nil {
		t.Errorf("%d devices are remembered, want %d", len(m.entries), maxAbsent+1)
	}
}

// MIG devices of the many layouts of a day must not push out what is known about GPUs, nor cordons.
func TestGPUsAndCordonsAreForgottenLast(t *testing.T) {
	layout := func(day int) []Device {
		devices := []Device{{gpuA, gpuA, noInstance, noInstance}, {gpuB, gpuB, noInstance, noInstance}}
		for i := range 7 {
			devices = append(devices, Device{fmt.Sprintf("MIG-%d-%d", day, i), gpuA, i, 0})
		}
		return devices
	}
	m := New(Rules{})
	m.SetDevices(start, layout(0))
	if _, err := m.Cordon(start, "MIG-0-1", "loud"); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Cordon(start, gpuB, "loud"); err != nil {
		t.Fatal(err)
	}
	for day := range 50 {
		m.SetDevices(start, layout(day))
	}
	m.Event(start, event(gpuA, noInstance, noInstance, 95, noRecovery))
	data, err := m.Record(Identity{})
	testenv.Must(t, err)
	n := New(Rules{})
	testenv.Must(t, n.Restore(data, Identity{}))
	n.SetDevices(start, nil)       // the driver has none of them
	n.SetDevices(start, layout(0)) // MIG-0-1 is created again
	for uuid, want := range map[string]State{gpuA: Unhealthy, gpuB: Cordoned, "MIG-0-1": Cordoned} {
		if got := n.Statuses()[uuid].State; got != want {
			t.Errorf("%s is %s, want %s", uuid, got, want)
		}
	}
}

func TestEveryActionOfTheCatalogueIsKnown(t *testing.T) {
	if len(catalogue) < 90 {
		t.Fatalf("the catalogue has %d codes", len(catalogue))
	}
	for code, c := range catalogue {
		if c.action == "" {
			t.Errorf("XID %d has no action", code)
		}
	}
	for code, want := range map[uint64]Action{
		13: Application, 43: None, 79: Reboot, 95: Reset, 48: Probe, 54: Service, 150: Reset,
	} {
		if got := actionOf(code); got != want {
			t.Errorf("XID %d means %s, want %s", code, got, want)
		}
	}
}

func FuzzRestore(f *testing.F) {
	n := &node{New(Rules{}), start}
	n.setDevices()
	_, _ = n.xid(gpuA, 95, noRecovery).Cordon(start, gpuB, "x")
	data, err := n.Record(Identity{"1", "580"})
	testenv.Must(f, err)
	f.Add(data)
	f.Add([]byte(`{"version":1,"devices":[{"uuid":"GPU-b","state":"cordoned"}]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m := New(Rules{})
		if err := m.Restore(data, Identity{"2", "580"}); err != nil && len(m.entries) > 0 {
			t.Error("a record that was refused has left devices")
		}
		m.SetDevices(start, []Device{{gpuB, gpuB, noInstance, noInstance}})
		m.Probe(start, &gpu.Probe{UUID: gpuB})
		if _, err := m.Record(Identity{"2", "580"}); err != nil {
			t.Error(err)
		}
	})
}
