package soak

import (
	"encoding/json"
	"errors"
	"flag"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

var agreeFor = flag.Duration("agree", 5*time.Second, "how long TestDevicesAndKubeletAgree makes faults")

// While faults come and go, what `devices` says about a device's health and what the kubelet has may differ for no
// longer than it takes to write the record of the health, which `devices` reads.
func TestDevicesAndKubeletAgree(t *testing.T) {
	t.Parallel()
	s := &soak{
		served: startServe(t, "mig-h100", soakConfig), random: rand.New(rand.NewPCG(3, 4)), broken: map[int]*fault{},
	}
	s.settle()
	all := s.all()
	byRecord, byVerb := newAgreement(all), newAgreement(all)
	due := time.Now()
	// On a busy machine it takes longer to see enough.
	enough := func() bool { return byRecord.changes >= 3 && byVerb.samples > 2*few }
	end, last := due.Add(*agreeFor), due.Add(*agreeFor+time.Minute)
	for now := due; now.Before(end) || !enough() && now.Before(last); now = time.Now() {
		if time.Now().After(due) {
			s.storm()
			due = time.Now().Add(time.Duration(s.random.IntN(200)) * time.Millisecond)
		}
		byRecord.compare(t, "the record", withoutFaults(slices.Clone(all), s.recorded()), s.healthy())
		if s.random.IntN(20) == 0 {
			listed, err := s.listed()
			testenv.Must(s, err)
			byVerb.compare(t, "devices", listed, s.healthy())
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Logf("%d faults; the longest differences: record %v, devices %v", s.made, byRecord.longest, byVerb.longest)
	if !enough() {
		t.Errorf("%d changes of health and %d lists of devices are too few", byRecord.changes, byVerb.samples)
	}
}

// storm repairs a random GPU if it is broken, and else breaks it in a way that only health knows of: the driver still
// lists it, and its calls return.
func (s *soak) storm() {
	s.Helper()
	g := s.random.IntN(len(s.node.Machine().GPUs))
	if s.broken[g] != nil {
		s.repair(g)
		return
	}
	one := s.node.Machine().GPUs[0].MIG[0]
	f := []*fault{
		{begin: func(g int) error { return s.node.XID(g, 48, nil) }},
		{begin: func(int) error {
			return s.node.XID(0, 48, &sim.Instance{GPU: one.GPUInstance, Compute: one.ComputeInstance})
		}},
		{begin: func(g int) error { return s.node.Set(g, map[string]string{"remap-pending": "1"}) }},
		{begin: func(g int) error { return s.node.Set(g, map[string]string{"temperature": "91"}) }},
	}[s.random.IntN(4)]
	testenv.Must(s, f.begin(g))
	s.broken[g] = f
	s.made++
}

// recorded is the health of the devices in the record, by UUID.
func (s *soak) recorded() map[string]health.Status {
	s.Helper()
	data, err := os.ReadFile(filepath.Join(s.dir, "state", "health.json"))
	if errors.Is(err, fs.ErrNotExist) { // nothing has happened yet
		return nil
	}
	testenv.Must(s, err)
	var of health.Identity
	testenv.Must(s, json.Unmarshal(data, &of))
	all, err := health.Recorded(data, of)
	testenv.Must(s, err)
	return all
}

// agreement compares the health of devices in two places.
type agreement struct {
	differ  map[string]difference // by UUID
	longest time.Duration
	before  []string
	samples int
	changes int // of the kubelet's devices, between two samples
}

// few samples in a row may be of as many short differences: on a busy machine they are far apart.
const few = 3

// difference is what all samples since a time have shown of a device.
type difference struct {
	since   time.Time
	samples int
}

func newAgreement(uuids []string) *agreement {
	a := &agreement{differ: map[string]difference{}}
	for _, uuid := range uuids {
		a.differ[uuid] = difference{}
	}
	return a
}

func (a *agreement) compare(t *testing.T, what string, one, kubelet []string) {
	t.Helper()
	const limit = 3 * time.Second // on a busy machine
	a.samples++
	if !slices.Equal(a.before, kubelet) {
		a.changes++
	}
	a.before = kubelet
	for uuid, d := range a.differ {
		if slices.Contains(one, uuid) == slices.Contains(kubelet, uuid) {
			a.differ[uuid] = difference{}
			continue
		}
		if d.samples == 0 {
			d.since = time.Now()
		}
		d.samples++
		a.differ[uuid] = d
		length := time.Since(d.since)
		a.longest = max(a.longest, length)
		if length > limit && d.samples > few {
			t.Fatalf("%s and the kubelet differ about %s for %v: for the kubelet it is healthy: %v",
				what, uuid, length, slices.Contains(kubelet, uuid))
		}
	}
}
