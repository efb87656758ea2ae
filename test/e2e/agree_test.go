package e2e

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
	for end := due.Add(*agreeFor); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(due) {
			s.storm()
			due = time.Now().Add(time.Duration(s.random.IntN(200)) * time.Millisecond)
		}
		byRecord.compare(t, "the record", withoutFaults(slices.Clone(all), s.recorded()), s.healthy())
		if s.random.IntN(20) == 0 {
			listed, err := s.listed()
			s.must(err)
			byVerb.compare(t, "devices", listed, s.healthy())
		}
	}
	t.Logf("%d faults; the longest differences: record %v, devices %v", s.made, byRecord.longest, byVerb.longest)
	if byRecord.changes < 3 || byVerb.samples < 3 {
		t.Errorf("%d changes of health and %d lists of devices are too few", byRecord.changes, byVerb.samples)
	}
}

// storm repairs a random GPU if it is broken, and else breaks it in a way that health alone knows of: the driver still
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
	s.must(f.begin(g))
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
	s.must(err)
	var of health.Identity
	s.must(json.Unmarshal(data, &of))
	all, err := health.Recorded(data, of)
	s.must(err)
	return all
}

// agreement compares the health of devices in two places.
type agreement struct {
	agreed  map[string]time.Time // when the two last agreed about a device
	longest time.Duration
	before  []string
	samples int
	changes int // of the kubelet's devices, between two samples
}

func newAgreement(uuids []string) *agreement {
	a := &agreement{agreed: map[string]time.Time{}}
	for _, uuid := range uuids {
		a.agreed[uuid] = time.Now()
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
	for uuid, agreed := range a.agreed {
		if slices.Contains(one, uuid) == slices.Contains(kubelet, uuid) {
			a.agreed[uuid] = time.Now()
			continue
		}
		differ := time.Since(agreed)
		a.longest = max(a.longest, differ)
		if differ > limit {
			t.Fatalf("%s and the kubelet differ about %s for %v: for the kubelet it is healthy: %v",
				what, uuid, differ, slices.Contains(kubelet, uuid))
		}
	}
}
