package soak

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

var soakRounds = flag.Int("soak", 1, "rounds in each of the three phases of TestSoak; 60 take 10 minutes")

const soakConfig = `gpu-timeout: 3s
mig-strategy: mixed
sharing:
  time-slicing:
    resources:
      - {name: nvidia.com/gpu, replicas: 3}
      - {name: nvidia.com/mig-1g.10gb, replicas: 2}
health:
  clean-for: 20ms     # each relapse doubles it, up to 64 times
  xids:
    - {xid: 48, action: probe}
    - {xid: 95, action: reset}
`

// TestSoak makes random faults of all kinds and repairs them, on the shipped program. When all are repaired all devices
// are healthy, and the program has not grown. The faults come in three phases: what the first takes, such as the
// threads of calls that hang at the same time, the others may not add to.
func TestSoak(t *testing.T) {
	t.Parallel()
	s := &soak{
		served: startServe(t, "mig-h100", soakConfig), random: rand.New(rand.NewPCG(1, 2)), broken: map[int]*fault{},
	}
	t.Logf("before: %+v", s.settle())
	var after []usage
	for range 3 {
		for range *soakRounds {
			s.makeFaults()
			s.repairAll()
		}
		after = append(after, s.settle())
		t.Logf("after %d faults: %+v", s.made, after[len(after)-1])
	}
	first, last := after[0], after[2]
	for what, c := range map[string]struct{ first, last, slack int }{
		"goroutines":                    {first.Goroutines, last.Goroutines, 2},
		"file descriptors":              {first.Descriptors, last.Descriptors, 2},
		"threads":                       {first.Threads, last.Threads, 10}, // on a busy machine more calls coincide
		"kilobytes of anonymous memory": {first.Anonymous, last.Anonymous, 2000},
	} {
		if c.last > c.first+c.slack {
			t.Errorf("%d %s after the first phase, and %d after the last", c.first, what, c.last)
		}
	}
}

// soak makes faults of the GPUs of a node.
type soak struct {
	*served
	random *rand.Rand
	due    []*fault       // those of the kinds that have not had their turn
	broken map[int]*fault // by GPU
	made   int            // number of faults
}

// fault is a kind of fault.
type fault struct {
	gpus  []int // that can have it; none are all
	begin func(gpu int) error
	hangs bool // calls of the driver do not return
	reset bool // only a reset repairs it
}

// makeFaults makes faults of random GPUs and repairs some. In the middle it waits until all agree about what is
// healthy.
func (s *soak) makeFaults() {
	s.Helper()
	const steps = 20
	for step := range steps {
		if len(s.due) == 0 {
			s.due = s.faults()
			s.random.Shuffle(len(s.due), func(i, j int) { s.due[i], s.due[j] = s.due[j], s.due[i] })
		}
		next := s.due[0]
		g := s.random.IntN(len(s.node.Machine().GPUs))
		if len(next.gpus) > 0 {
			g = next.gpus[s.random.IntN(len(next.gpus))]
		}
		switch before := s.broken[g]; {
		case before == nil:
			testenv.Must(s, next.begin(g))
			s.broken[g], s.due = next, s.due[1:]
			s.made++
		case !before.reset:
			s.repair(g)
		}
		time.Sleep(time.Duration(s.random.IntN(200)) * time.Millisecond)
		if step == steps/2 {
			// While a call hangs the driver's library stays open, and does not have a GPU that was bound meanwhile.
			for g, f := range s.broken {
				if f.hangs {
					s.repair(g)
				}
			}
			s.await("serve and devices agree while GPUs are broken", s.disagreement)
		}
	}
}

func (s *soak) repair(g int) {
	s.Helper()
	testenv.Must(s, s.node.ClearGPU(g))
	delete(s.broken, g)
}

// repairAll repairs all GPUs, and has serve reset those that need it.
func (s *soak) repairAll() {
	s.Helper()
	testenv.Must(s, s.node.Clear())
	for g, f := range s.broken {
		if f.reset {
			s.await(fmt.Sprintf("reset of GPU %d", g), func() string {
				result, err := proc.Run(s.Context(), s.command("device", "reset", s.node.Machine().GPUs[g].UUID))
				testenv.Must(s, err)
				if result.Code != 0 { // such as: the driver has just been opened again
					return result.String()
				}
				return ""
			})
		}
	}
	clear(s.broken)
}

// faults are the kinds of faults, each once.
func (s *soak) faults() []*fault {
	const partitioned = 0 // a GPU with MIG devices
	whole := []int{6, 7}  // GPUs that are not in MIG mode
	one := s.node.Machine().GPUs[partitioned].MIG[0]
	instance := &sim.Instance{GPU: one.GPUInstance, Compute: one.ComputeInstance}
	set := func(value, text string) func(int) error {
		return func(g int) error { return s.node.Set(g, map[string]string{value: text}) }
	}
	xid := func(code uint64, of *sim.Instance) func(int) error {
		return func(g int) error { return s.node.XID(g, code, of) }
	}
	fail := func(function string) func(int) error {
		return func(g int) error { return s.node.Fail(function, g, 999) } // NVML_ERROR_UNKNOWN
	}
	hang := func(function string) func(int) error {
		return func(g int) error { return s.node.Hang(function, g) }
	}
	return []*fault{
		{begin: xid(31, nil)},
		{begin: xid(48, nil)},
		{begin: xid(48, instance), gpus: []int{partitioned}},
		{begin: xid(95, nil), gpus: whole, reset: true},
		{begin: func(g int) error { return s.node.Report(sim.Event{GPU: g, Type: sim.EventUnavailable}) }},
		{begin: s.node.Lose},
		{begin: s.node.Unbind},
		{begin: s.node.Unplug},
		{begin: fail("nvmlDeviceGetHandleByUUID")},
		{begin: fail("nvmlDeviceRegisterEvents")},
		{begin: hang(sim.AnyFunction), hangs: true},
		{begin: hang("nvmlDeviceGetTemperature"), hangs: true},
		{begin: set("ecc-uncorrected", "3")},
		{begin: set("remap-pending", "1")},
		{begin: set("remap-failed", "1")},
		{begin: set("recovery-action", "drain-and-reset")},
		{begin: set("recovery-action", "99")}, // not known
		{begin: set("temperature", "91")},
		{begin: set("links-down", "3"), gpus: whole},
		{begin: set("fabric-state", "in-progress"), gpus: whole},
	}
}

// settle waits until all devices are healthy and all agree about it, and returns what the program uses then.
func (s *soak) settle() usage {
	s.Helper()
	s.await("all devices are healthy", func() string {
		return cmp.Diff(s.all(), s.healthy())
	})
	s.await("serve and devices agree", s.disagreement)
	time.Sleep(time.Second)
	least := s.usage()
	for range 5 { // collections of garbage come and go
		time.Sleep(200 * time.Millisecond)
		u := s.usage()
		least = usage{
			min(least.Goroutines, u.Goroutines), min(least.Descriptors, u.Descriptors), min(least.Threads, u.Threads),
			min(least.Anonymous, u.Anonymous),
		}
	}
	return least
}

// all are the UUIDs of the devices of the node.
func (s *soak) all() []string {
	s.Helper()
	snapshot, err := s.node.Snapshot()
	testenv.Must(s, err)
	return allocatable(snapshot.Devices)
}

func allocatable(devices []gpu.Device) (uuids []string) {
	for i := range devices {
		for _, a := range devices[i].Allocatables() {
			if a.Reason == "" {
				uuids = append(uuids, a.UUID())
			}
		}
	}
	slices.Sort(uuids)
	return uuids
}

// disagreement is the difference between what `devices` has as healthy and what the kubelet has.
func (s *soak) disagreement() string {
	s.Helper()
	listed, err := s.listed()
	if err != nil {
		return err.Error()
	}
	return cmp.Diff(listed, s.healthy())
}

// listed are the UUIDs of the devices that `devices` has as healthy.
func (s *soak) listed() ([]string, error) {
	s.Helper()
	cmd := s.command("devices", "-o", "json")
	result, err := proc.Run(s.Context(), cmd)
	testenv.Must(s, err)
	var list struct {
		Devices []struct {
			gpu.Device
			Error string `json:"error"`
		} `json:"devices"`
		Health map[string]health.Status `json:"health"`
	}
	if err := json.Unmarshal([]byte(result.Stdout), &list); err != nil {
		return nil, fmt.Errorf("%w: %v", err, result)
	}
	var devices []gpu.Device
	for _, d := range list.Devices {
		d.Device.Error = d.Error
		devices = append(devices, d.Device)
	}
	return withoutFaults(allocatable(devices), list.Health), nil
}

// withoutFaults are the devices that are healthy by the record of their health.
func withoutFaults(uuids []string, recorded map[string]health.Status) []string {
	return slices.DeleteFunc(uuids, func(uuid string) bool {
		h, known := recorded[uuid] // nothing is recorded of one that never had a fault
		return known && h.State != health.Healthy
	})
}
