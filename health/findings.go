package health

import (
	"fmt"
	"math/bits"
	"time"

	"gpu-cdi-plugin/gpu"
)

// baseline is the state with which later probes of a GPU are compared.
type baseline struct {
	// NVLinks are the links that were up at some time. Other links may not be connected.
	NVLinks uint64 `json:"nvLinks"`
	// UncorrectedECC is the error count at the last probe.
	UncorrectedECC uint64 `json:"uncorrectedECC"`
}

// NotAnswering is the reason of a device whose GPU does not answer, if the cause is unknown.
const NotAnswering = "it does not answer"

// shutdownMargin is how many degrees below its shutdown temperature a GPU counts as too hot.
const shutdownMargin = 2

// findings returns the faults that a probe shows, compared with the baseline, and updates the baseline.
func (b *baseline) findings(p *gpu.Probe) []Finding {
	switch {
	case p.NeedsReset:
		return []Finding{{Text: "the driver cannot use the GPU before a reset", Action: Reset}}
	case p.Lost: // Machine.Probe clears Lost when the GPU answers again
		return []Finding{{Text: "the driver has lost the GPU, for example because it fell off the bus", Action: Reboot}}
	case p.Error != "":
		return []Finding{{Text: NotAnswering, Action: None}}
	}
	if p.MIGEnabled {
		b.NVLinks = 0 // on some GPUs links go down when MIG is enabled, and MIG devices have none
	}
	var list []Finding
	add := func(wrong bool, action Action, format string, args ...any) {
		if wrong {
			list = append(list, Finding{Text: fmt.Sprintf(format, args...), Action: action})
		}
	}
	down := b.NVLinks &^ p.NVLinks
	add(p.RemapFailed, Service, "a row of its memory could not be remapped")
	add(p.RemapPending, Reset, "a row of its memory is remapped at the next reset")
	add(p.RetirementPending, Reset, "a page of its memory is retired at the next reset")
	add(p.UncorrectedECC > b.UncorrectedECC, Probe, "its memory had uncorrected errors since the last probe")
	add(down != 0, None, "%d of its %d NVLinks are down", bits.OnesCount64(down), bits.OnesCount64(b.NVLinks|p.NVLinks))
	add(p.Fabric == gpu.FabricStarting && !p.MIGEnabled, None, "the fabric manager has not configured it yet")
	add(p.Fabric == gpu.FabricFailed && !p.MIGEnabled, Reset, "it could not join the NVLink fabric")
	add(p.Fabric == gpu.FabricUnhealthy && !p.MIGEnabled, None, "the driver reports its NVLink fabric as unhealthy")
	add(p.ShutdownTemperature > 0 && p.Temperature >= p.ShutdownTemperature-shutdownMargin, None,
		"it is about to overheat: it shuts down at %d °C", p.ShutdownTemperature)
	if !p.MIGEnabled {
		b.NVLinks |= p.NVLinks
	}
	b.UncorrectedECC = p.UncorrectedECC
	return list
}

// Probe handles a probe of a GPU and returns the transitions of the GPU and its MIG devices.
func (m *Machine) Probe(now time.Time, p *gpu.Probe) []Transition {
	b := m.baselines[p.UUID]
	if b == nil {
		// The count includes errors before the first probe, which had events of their own. A reset does not clear it.
		b = &baseline{UncorrectedECC: p.UncorrectedECC}
		m.baselines[p.UUID] = b
	}
	findings := b.findings(p)
	if f, ok := recoveryFinding(p.RecoveryAction); ok {
		findings = append(findings, f)
	}
	var worst *Finding
	for i := range findings {
		if worst == nil || findings[i].Action.worse(worst.Action) {
			worst = &findings[i]
		}
	}
	var transitions []Transition
	for _, e := range m.of(p.UUID) {
		before := e.condition()
		if e.Lost && p.Error == "" && !e.Event.Action.worse(Reboot) { // initialised again, as by a reboot
			e.Event = Finding{}
		}
		e.Lost = p.Lost || e.Lost && p.Error != ""
		if worst != nil {
			e.failed(now, *worst)
		} else {
			e.passed(now, p.RecoveryAction, m.rules.CleanFor)
		}
		transitions = e.changed(before, transitions)
	}
	return transitions
}

// failed applies a finding of a probe. It replaces the finding of an earlier probe, even if that was worse. It
// replaces the finding of an event only if it is worse than that.
func (e *entry) failed(now time.Time, f Finding) {
	if needed := e.needed(); !f.Action.worse(needed.Action) {
		f = needed
	}
	e.fault(now, f)
}

// passed applies a probe without findings. After a time such probes make a device healthy, unless the device needs an
// action because of an event. If the driver reports that no recovery action is needed, a device needs such an action
// only if an administrator's rule requires it.
func (e *entry) passed(now time.Time, recoveryAction int, cleanFor time.Duration) {
	if recoveryAction == 0 {
		e.Event = Finding{}
	}
	needed := e.needed()
	switch {
	case e.State == Healthy:
		return
	case needed.Action != "":
		e.Reason, e.Remedy = needed.Text, needed.Action // the finding of a probe may have been worse
		return
	}
	if e.clean.IsZero() {
		e.clean = now
	}
	if e.State != Recovering {
		e.State, e.Since = Recovering, now
	}
	wait := cleanFor << min(max(e.Relapses-1, 0), maxDoublings)
	if now.Sub(e.clean) >= wait {
		e.State, e.Reason, e.Remedy, e.Since, e.Recovered = Healthy, "", None, now, now
	}
}
