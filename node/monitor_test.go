package node

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// fakeProber returns the probes that were set, by default none, and counts how often it was asked.
type fakeProber struct {
	mu     sync.Mutex
	probes []gpu.Probe
	asked  int
	before func(context.Context) // is called for each probe; may be nil
}

func (p *fakeProber) Probes(ctx context.Context, _ ...string) ([]gpu.Probe, error) {
	if p.before != nil {
		p.before(ctx)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	return p.probes, ctx.Err()
}

func (p *fakeProber) set(probes ...gpu.Probe) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.probes = probes
}

// recordHealth gives a reconciler a record of the health of the devices.
func recordHealth(path string) func(*Options) {
	return func(o *Options) { o.Health.Path = path }
}

func xid(gpuUUID string, code uint64) gpu.Event {
	return gpu.Event{
		GPU: gpuUUID, GPUInstance: gpu.NoInstance, ComputeInstance: gpu.NoInstance,
		Kind: gpu.EventXID, XID: code, RecoveryAction: gpu.NoRecoveryAction,
	}
}

func TestAnEventIsPublishedWithoutAReconciliation(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	b.wantDevices(b.rec.State(), count{healthy: 4})
	b.rec.Receive(xid(b.uuids()[2], 95))
	s := b.rec.State()
	b.wantDevices(s, count{healthy: 3, unhealthy: 1})
	if why := reasons(s)[b.uuids()[2]]; !strings.Contains(why, "XID 95") ||
		s.Health[b.uuids()[2]].State != health.Unhealthy {
		t.Errorf("the GPU is unhealthy for %q, and its health is %+v", why, s.Health[b.uuids()[2]])
	}
	b.wantDevices(b.reconcile(), count{healthy: 3, unhealthy: 1}) // reconciling does not undo it
}

// The driver's events begin with the first snapshot, before the first state is published.
func TestAnEventDuringTheStartCounts(t *testing.T) {
	during := &eventAtReconciliation{}
	b := newFixture(t, "pcie-quad", func(o *Options) { o.Observer = during })
	during.send = func() { b.rec.Receive(xid(b.uuids()[2], 95)) }
	b.start()
	b.wantDevices(b.rec.State(), count{healthy: 3, unhealthy: 1})
}

// Events arrive before the devices of the first snapshot are known. With an old driver only its event
// reports an XID.
func TestAnEventDuringTheFirstSnapshotCounts(t *testing.T) {
	source := &eventInSnapshot{}
	b := newFixture(t, "pcie-quad", func(o *Options) { source.Source, o.Source = o.Source, source })
	const many = 10_000
	source.send = func() {
		for range many { // which push out no other
			b.rec.Receive(xid(b.uuids()[1], 45))
		}
		b.rec.Receive(xid(b.uuids()[2], 95))
		b.rec.Receive(xid("GPU-of-another-node", 95))
	}
	b.start()
	b.wantDevices(b.rec.State(), count{healthy: 3, unhealthy: 1})
	if n := b.rec.State().Health[b.uuids()[1]].XIDs[45]; n != many {
		t.Errorf("%d of %d events were counted", n, many)
	}
	if n := len(b.rec.monitor.waitingXIDs); n != 0 {
		t.Errorf("%d events are kept", n)
	}
}

// eventInSnapshot sends an event at the end of each snapshot.
type eventInSnapshot struct {
	Source
	send func()
}

func (e *eventInSnapshot) Snapshot(ctx context.Context) (*gpu.Snapshot, error) {
	s, err := e.Source.Snapshot(ctx)
	e.send()
	return s, err
}

// Whatever reports events without end, the log has a line for each kind, and all are counted.
func TestEventsOfAllKindsAreCountedAndLoggedOnce(t *testing.T) {
	log, counts := &testenv.Log{}, eventCounts{}
	b := newFixture(t, "pcie-quad", func(o *Options) {
		o.Log = slog.New(slog.NewTextHandler(log, nil))
		o.Health.Observer = counts
	})
	b.start()
	var events []gpu.Event
	for code := range uint64(25) {
		events = append(events, xid(b.uuids()[1], 1000+code))
	}
	for _, kind := range []gpu.EventKind{gpu.EventECC, gpu.EventRecovery, gpu.EventUnavailable, gpu.EventMIG} {
		events = append(events, gpu.Event{GPU: b.uuids()[1], Kind: kind, RecoveryAction: 0})
	}
	before := log.String()
	const each = 1000
	for range each {
		for _, e := range events {
			e.RecoveryAction = 0 // whatever the codes are, the GPU needs nothing
			b.rec.Receive(e)
		}
	}
	if n := strings.Count(strings.TrimPrefix(log.String(), before), "\n"); n != len(events) {
		t.Errorf("%d lines about %d kinds of events", n, len(events))
	}
	for _, line := range []string{"GPU 1 reported an uncorrected memory error", "GPU 1 reported that its MIG devices"} {
		if !strings.Contains(log.String(), line) {
			t.Errorf("the log has no line %q", line)
		}
	}
	if len(counts) != len(events) {
		t.Errorf("%d kinds are counted", len(counts))
	}
	for kind, n := range counts {
		if n != each {
			t.Errorf("%d of %d events %v are counted", n, each, kind)
		}
	}
}

// eventCounts counts events by kind and code.
type eventCounts map[gpu.Event]int

func (c eventCounts) Event(e gpu.Event) { c[gpu.Event{Kind: e.Kind, XID: e.XID}]++ }

func (c eventCounts) EventSource(string, bool) {}

// eventAtReconciliation sends an event when a reconciliation is observed.
type eventAtReconciliation struct{ send func() }

func (e *eventAtReconciliation) Reconciled(time.Duration, bool, error) { e.send() }

// A driver that comes late must not make all GPUs healthy, nor empty the record.
func TestTheRecordIsReadWhenTheDriverComes(t *testing.T) {
	record := filepath.Join(t.TempDir(), "health.json")
	before := newFixture(t, "pcie-quad", recordHealth(record))
	before.start()
	before.rec.Receive(xid(before.uuids()[1], 79))
	before.rec.monitor.saveOrRemark()
	want, err := os.ReadFile(record)
	testenv.Must(t, err)

	b := newFixtureOn(t, before.node, recordHealth(record), func(o *Options) { o.AwaitDriver = true })
	b.source.set(gpu.ErrNoDriver)
	b.start()
	b.rec.monitor.saveOrRemark()
	if got, err := os.ReadFile(record); err != nil || string(got) != string(want) {
		t.Errorf("without a driver the record is %s, error %v", got, err)
	}
	b.source.set(nil)
	b.wantDevices(b.reconcile(), count{healthy: 3, unhealthy: 1})
}

// A driver that hangs must not keep a state from the record.
func TestAnEventIsRecordedBeforeTheProbe(t *testing.T) {
	record := filepath.Join(t.TempDir(), "health.json")
	b := newFixture(t, "pcie-quad", recordHealth(record))
	b.start()
	b.rec.Receive(xid(b.uuids()[2], 95))
	b.prober.before = func(context.Context) {
		if data, err := os.ReadFile(record); err != nil || !strings.Contains(string(data), "XID 95") {
			t.Errorf("the record is %s, error %v", data, err)
		}
	}
	b.rec.poll(t.Context())
	if b.prober.asked != 1 {
		t.Errorf("%d probes", b.prober.asked)
	}
}

// A reset that a container waits for may end after run: the next start must not ask for it again.
func TestAResetIsRecordedAtOnce(t *testing.T) {
	record := filepath.Join(t.TempDir(), "health.json")
	b := newFixture(t, "pcie-quad", recordHealth(record))
	b.start()
	b.rec.Receive(xid(b.uuids()[1], 95))
	b.rec.monitor.saveOrRemark()
	needsReset := func() bool {
		t.Helper()
		data, err := os.ReadFile(record)
		testenv.Must(t, err)
		return strings.Contains(string(data), `"event": {`)
	}
	if !needsReset() {
		t.Error("the XID is not in the record")
	}
	b.rec.Monitor().WasReset(b.uuids()[1])
	if needsReset() {
		t.Error("the reset is not in the record")
	}
}

// A full disk has space again at some time.
func TestARecordThatCannotBeWrittenIsWrittenLater(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	record := filepath.Join(dir, "health.json")
	testenv.Must(t, os.Mkdir(dir, 0o755))
	b := newFixture(t, "pcie-quad", recordHealth(record))
	b.start()
	testenv.Must(t, os.RemoveAll(dir))
	testenv.Must(t, os.WriteFile(dir, nil, 0o644))
	err := b.rec.Monitor().Cordon(b.uuids()[1], "a fan is loud")
	if err == nil || !strings.HasPrefix(err.Error(), "the change is in effect, but a restart would undo it: ") {
		t.Errorf("the error is %v", err)
	}
	testenv.Must(t, os.Remove(dir))
	testenv.Must(t, os.Mkdir(dir, 0o755))
	b.rec.poll(t.Context())
	if data, err := os.ReadFile(record); err != nil || !strings.Contains(string(data), "a fan is loud") {
		t.Errorf("the record is %s, error %v", data, err)
	}
}

func TestAGPUThatGoesAndComesIsLogged(t *testing.T) {
	log := &testenv.Log{}
	b := newFixture(t, "pcie-quad", func(o *Options) { o.Log = slog.New(slog.NewTextHandler(log, nil)) })
	b.start()
	gone, back := "GPU 2 is gone: the driver no longer reports "+b.uuids()[2], "GPU 2 is new: "+b.uuids()[2]
	testenv.Must(t, b.node.Remove(2))
	b.reconcile()
	if text := log.String(); strings.Count(text, " is gone") != 1 || !strings.Contains(text, gone) {
		t.Errorf("no line %q in\n%s", gone, text)
	}
	testenv.Must(t, b.node.Clear())
	b.reconcile()
	if text := log.String(); strings.Count(text, " is new") != 1 || !strings.Contains(text, back) {
		t.Errorf("no line %q in\n%s", back, text)
	}
}

// It is not known which devices were unhealthy. A node without a record is new.
func TestDevicesAreSuspectWithoutAUsableRecord(t *testing.T) {
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "none"), filepath.Join(dir, "health.json")
	testenv.Must(t, os.WriteFile(bad, []byte(`{"version": 2}`), 0o644))
	for path, want := range map[string]health.State{good: health.Healthy, bad: health.Suspect} {
		b := newFixture(t, "pcie-quad", recordHealth(path))
		b.start()
		s := b.reconcile()
		for _, uuid := range b.uuids() {
			if got := s.Health[uuid]; got.State != want {
				t.Errorf("%s: %+v, want %s", path, got, want)
			}
		}
	}
	if _, err := os.Stat(bad + ".damaged"); err != nil {
		t.Error(err)
	}
}

// A record that cannot be written is a remark of the state until it is written.
func TestAHealthRecordThatCannotBeWrittenIsARemark(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	f := newFixture(t, "mig-h100", recordHealth(filepath.Join(dir, "health.json")))
	f.start()
	said := func() bool {
		s := f.rec.State()
		return slices.ContainsFunc(s.Remarks(), func(text string) bool {
			return strings.Contains(text, "the health of the devices is not recorded for the next start")
		})
	}
	testenv.Must(t, os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600))
	f.rec.Receive(xid(f.uuids()[0], 95))
	f.rec.monitor.saveOrRemark()
	if !said() {
		t.Error("no remark says so")
	}
	testenv.Must(t, os.Remove(dir), os.Mkdir(dir, 0o755))
	f.rec.monitor.saveOrRemark()
	if said() {
		t.Error("the remark stays")
	}
}

// A GPU that cannot be read when the program starts has no MIG devices in the snapshot.
func TestAMIGDeviceIsAsRecordedWhenItsGPUAnswersAtLast(t *testing.T) {
	record := filepath.Join(t.TempDir(), "health.json")
	before := newFixture(t, "mig-h100", recordHealth(record))
	before.start()
	snapshot := before.rec.State().Snapshot
	one := &snapshot.Devices[0]
	mig := one.MIG[0]
	e := xid(one.UUID, 95)
	e.GPUInstance, e.ComputeInstance = mig.GPUInstance, mig.ComputeInstance
	before.rec.Receive(e)
	before.rec.monitor.saveOrRemark()

	b := newFixtureOn(t, before.node, recordHealth(record))
	unread := *snapshot
	unread.Devices = slices.Clone(snapshot.Devices)
	unread.Devices[0].Error, unread.Devices[0].MIG = "timed out", nil
	b.rec.monitor.setDevices(&unread)
	b.rec.monitor.setDevices(snapshot)
	if s := b.rec.monitor.machine.Statuses()[mig.UUID]; s.State != health.Unhealthy {
		t.Errorf("the MIG device is %+v", s)
	}
}

// The waits for events of a GPU that is gone end with an error, which is no reason for a warning for ever.
func TestOnlyEventsOfGPUsThatAreThereAreMissed(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	b.rec.Receive(gpu.Event{GPU: b.uuids()[2], Kind: gpu.EventSource, Err: errors.New("GPU is lost")})
	remarks := func(s State) string { return strings.Join(s.Remarks(), "; ") }
	if text := remarks(b.rec.State()); !strings.Contains(text, "events of GPU 2 are not received") {
		t.Errorf("the remarks are %q", text)
	}
	testenv.Must(t, b.node.Remove(2))
	if text := remarks(b.reconcile()); text != "" {
		t.Errorf("the remarks of a node without the GPU are %q", text)
	}
	testenv.Must(t, b.node.Clear())
	if text := remarks(b.reconcile()); !strings.Contains(text, "events of GPU 2 are not received") {
		t.Errorf("the remarks are %q when it is back", text)
	}
}

// The reset of the process before may end while the devices change.
func TestAHoldOfAnEarlierResetEndsWhileDevicesChange(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	m, held := b.rec.monitor, b.uuids()[2]
	var done sync.WaitGroup
	for range 2 {
		done.Go(func() {
			for range 20 {
				m.setDevices(b.rec.State().Snapshot)
				m.endOldResets([]string{held})
			}
		})
	}
	done.Wait()
	b.wantDevices(b.rec.State(), count{healthy: 4})
}

// The library is closed for each reset of a GPU, which is worth a line only if it lasts.
func TestEventsThatWereMissedForLongAreLoggedOnce(t *testing.T) {
	log := &testenv.Log{}
	b := newFixture(t, "pcie-quad", func(o *Options) { o.Log = slog.New(slog.NewTextHandler(log, nil)) })
	b.start()
	for lasts, lines := range map[time.Duration]int{0: 0, 23 * time.Second: 1} {
		before := log.String()
		for _, err := range []error{gpu.ErrLibraryClosed, nil} {
			for _, uuid := range b.uuids() {
				b.rec.Receive(gpu.Event{GPU: uuid, Kind: gpu.EventSource, Err: err})
			}
			b.rec.monitor.closed = b.rec.monitor.closed.Add(-lasts)
		}
		got := strings.TrimPrefix(log.String(), before)
		if strings.Count(got, "\n") != lines || strings.Contains(got, "not received for 23s") != (lines > 0) {
			t.Errorf("after %v the log has\n%s", lasts, got)
		}
		if s := b.rec.State(); len(s.Remarks()) > 0 {
			t.Errorf("the remarks are %q", s.Remarks())
		}
		b.rec.monitor.closed = time.Time{}
	}
}

// A container can cause events as fast as it likes.
func TestEventsInALoopDoNotCauseProbesInALoop(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	began := time.Now() // before the first probe
	b.run()
	probes := func() int {
		b.prober.mu.Lock()
		defer b.prober.mu.Unlock()
		return b.prober.asked
	}
	for probes() < 3 {
		b.rec.Receive(xid(b.uuids()[0], 31))
	}
	if took := time.Since(began); took < 2*minPollPause {
		t.Errorf("three probes in %s", took)
	}
}

// A GPU that stops answering must be noticed within gpu-timeout, which may be only twice the interval.
func TestALateProbeIsRepeatedAtOnce(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	b.prober.set(gpu.Probe{UUID: b.uuids()[2], Late: true, RecoveryAction: gpu.NoRecoveryAction})
	b.run()
	probes := func() int {
		b.prober.mu.Lock()
		defer b.prober.mu.Unlock()
		return b.prober.asked
	}
	testenv.Eventually(t, "a third probe", func() bool { return probes() == 3 })
	b.prober.set(gpu.Probe{UUID: b.uuids()[2], Error: "does not answer", RecoveryAction: gpu.NoRecoveryAction})
	b.wait("a list with the GPU as unhealthy", func(s State) bool {
		return countOf(s) == (count{healthy: 3, unhealthy: 1})
	})
}

// The health of a GPU that is not offered is published too: metrics and the API server have it.
func TestTheHealthOfAnExcludedGPUIsPublished(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.config.GPUs.Exclude = []resource.Selector{"2"}
	b.start()
	b.rec.Receive(xid(b.uuids()[2], 95))
	if last := b.published[len(b.published)-1]; last.Health[b.uuids()[2]].State != health.Unhealthy {
		t.Errorf("the published health is %+v", last.Health[b.uuids()[2]])
	}
	before := len(b.published)
	b.rec.Receive(xid(b.uuids()[2], 95)) // it is counted
	b.reconcile()
	if n := len(b.published) - before; n != 0 {
		t.Errorf("%d states were published although nothing has changed", n)
	}
}

// A link that flaps must not have the record written each second.
func TestWhichTransitionsAreSavedAtOnce(t *testing.T) {
	for _, c := range []struct {
		from, to health.State
		want     bool
	}{
		{health.Healthy, health.Unhealthy, true},
		{health.Unhealthy, health.Unhealthy, true}, // for another reason
		{health.Unhealthy, health.Recovering, false},
		{health.Recovering, health.Unhealthy, false},
		{health.Recovering, health.Healthy, true},
		{health.Suspect, health.Healthy, true},
	} {
		if got := worthSaving(&health.Transition{From: c.from, To: health.Status{State: c.to}}); got != c.want {
			t.Errorf("from %s to %s: %t, want %t", c.from, c.to, got, c.want)
		}
	}
}

// What the process before resets still is held without a usable record too, and all GPUs while it is not known what
// that is.
func TestWhatIsResetStillIsHeldWithoutARecord(t *testing.T) {
	for name, c := range map[string]struct {
		unknown error
		held    int
	}{"the record is damaged": {nil, 1}, "resets are not known": {errors.New("an unreadable directory"), 4}} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "health.json")
			testenv.Must(t, os.WriteFile(path, []byte(`{"version":1,`), 0o600))
			b := newFixture(t, "pcie-quad", recordHealth(path))
			running, err := b.uuids()[2:3], c.unknown
			b.rec.monitor.opts.StillResetting = func() ([]string, error) { return running, err }
			held := func(want int, reason string) {
				t.Helper()
				n := 0
				for _, h := range b.rec.State().Health {
					if h.State == health.Cordoned && strings.Contains(h.Reason, reason) {
						n++
					}
				}
				if n != want {
					t.Errorf("%d GPUs are held, want %d: %+v", n, want, b.rec.State().Health)
				}
			}
			m := b.rec.monitor
			b.start()
			if held(c.held, "held"); c.unknown != nil {
				held(c.held, "held, since its reset may not have ended: an unreadable directory")
			}
			m.endOldResets(m.endedOldResets())
			held(c.held, "held")
			err = nil // from now on it is known
			m.endOldResets(m.endedOldResets())
			held(1, "held")
			running = nil
			m.endOldResets(m.endedOldResets())
			held(0, "held")
		})
	}
}
