package health

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Random faults and repairs, which overlap: what was repaired is healthy in the end, and what was not is not.
func TestSoak(t *testing.T) {
	for _, driver := range []struct {
		name     string
		recovery int // its recovery action while nothing is wrong
	}{{"with recovery actions", 0}, {"without recovery actions", noRecovery}} {
		t.Run(driver.name, func(t *testing.T) {
			for seed := range uint64(2) {
				s := newSoak(t, seed, driver.recovery)
				for i := range 10_000 {
					s.now = s.now.Add(time.Duration(s.IntN(20)) * time.Second)
					s.step()
					s.check(fmt.Sprint("step ", i), false)
					if i%100 == 99 {
						s.settle()
						s.check(fmt.Sprint("after step ", i), true)
					}
				}
				for _, state := range []State{Healthy, Unhealthy, Cordoned} {
					if s.seen[state] < 200 {
						t.Errorf("seed %d: only %d devices were %s when all probes had passed", seed, s.seen[state], state)
					}
				}
			}
		})
	}
}

// soak is a machine with 8 GPUs, half of them with two MIG devices each, and a model of what is wrong with them.
type soak struct {
	*rand.Rand
	t        *testing.T
	machine  *Machine
	now      time.Time
	boot     int
	recovery int
	gpus     []*soakGPU
	seen     map[State]int
}

// soakGPU is a GPU of the model.
type soakGPU struct {
	probe   gpu.Probe // what the driver reports now
	devices []*soakDevice
	links   uint64 // those that should be up
	broken  bool   // whether the last probe had a fault
	lost    bool   // whether the GPU was lost and has not answered since
}

// soakDevice is a GPU or a MIG device of the model.
type soakDevice struct {
	Device
	needs    map[need]bool
	times    []time.Time // of its XIDs 74 since the program has started
	cordoned bool
}

// need is what a device needs by an event, and whether a rule says so.
type need struct {
	action Action
	byRule bool
}

var soakRules = Rules{XIDs: map[uint64]Rule{
	31: {Action: Service}, 74: {Action: Reset, Count: 3, Within: 10 * time.Minute},
	94: {Action: Reset}, 109: {Action: None},
}}

func newSoak(t *testing.T, seed uint64, recovery int) *soak {
	t.Helper()
	s := &soak{
		Rand: rand.New(rand.NewPCG(seed, 1)), t: t, machine: New(soakRules), now: start, recovery: recovery,
		seen: map[State]int{},
	}
	for i := range 8 {
		uuid := fmt.Sprint("GPU-", i)
		g := &soakGPU{}
		g.add(uuid, uuid, noInstance, noInstance)
		for j := range i % 2 * 2 {
			g.add(fmt.Sprintf("MIG-%d-%d", i, j), uuid, j, 0)
		}
		g.probe = gpu.Probe{UUID: uuid, MIGEnabled: i%2 == 1}
		s.gpus = append(s.gpus, g)
		s.repair(g)
	}
	s.setDevices()
	for _, g := range s.gpus {
		s.probe(g)
	}
	return s
}

func (g *soakGPU) add(uuid, gpuUUID string, gpuInstance, computeInstance int) {
	d := &soakDevice{Device: Device{uuid, gpuUUID, gpuInstance, computeInstance}, needs: map[need]bool{}}
	g.devices = append(g.devices, d)
}

func (s *soak) setDevices() {
	var list []Device
	for _, g := range s.gpus {
		for _, d := range g.devices {
			list = append(list, d.Device)
		}
	}
	s.machine.SetDevices(s.now, list)
}

// step does something at random.
func (s *soak) step() {
	g := s.gpus[s.IntN(len(s.gpus))]
	switch s.IntN(24) {
	case 0, 1:
		s.fault(g)
	case 2, 3:
		s.xid(g)
	case 4, 5, 6:
		s.pass(g)
	case 7:
		s.reset(g)
	case 8:
		s.setCordon(g, true)
	case 9, 10, 11:
		s.setCordon(g, false)
	case 12:
		s.restart()
	case 13:
		if s.IntN(20) == 0 {
			s.reboot()
		}
	default:
		s.probe(g)
	}
}

// fault breaks a GPU.
func (s *soak) fault(g *soakGPU) {
	p := &g.probe
	switch s.IntN(12) {
	case 0:
		p.RemapPending = true
	case 1:
		p.RemapFailed = s.IntN(4) == 0
	case 2:
		p.RetirementPending = true
	case 3:
		p.UncorrectedECC++
	case 4:
		p.NVLinks &^= 1 << s.IntN(4)
	case 5:
		p.Fabric = []gpu.Fabric{gpu.FabricStarting, gpu.FabricFailed}[s.IntN(2)]
	case 6:
		p.Temperature = p.ShutdownTemperature
	case 7:
		p.Error, p.Lost = "GPU is lost", true
	case 8:
		p.Error, p.Lost = "unknown error", false
	default:
		if s.recovery == 0 {
			p.RecoveryAction = []int{1, 2, 4, 5, 99}[s.IntN(5)]
		}
	}
}

// faulty reports whether a probe of a GPU has a fault that does not pass with the next one.
func (g *soakGPU) faulty() bool {
	p := &g.probe
	ofWhole := g.links&^p.NVLinks != 0 || p.Fabric == gpu.FabricStarting || p.Fabric == gpu.FabricFailed
	return p.Error != "" || p.RemapPending || p.RemapFailed || p.RetirementPending || p.RecoveryAction > 0 ||
		p.Temperature == p.ShutdownTemperature || ofWhole && !p.MIGEnabled
}

// xid reports an XID of a GPU or of one of its MIG devices.
func (s *soak) xid(g *soakGPU) {
	code := []uint64{13, 31, 48, 54, 74, 74, 74, 79, 94, 94, 94, 95, 95, 109}[s.IntN(14)]
	if code == 95 && s.recovery == 0 && s.IntN(2) == 0 {
		g.probe.RecoveryAction = 1
	}
	concerned := g.devices
	e := event(g.probe.UUID, noInstance, noInstance, code, g.probe.RecoveryAction)
	if len(g.devices) > 1 && s.IntN(2) == 0 {
		i := 1 + s.IntN(len(g.devices)-1)
		concerned = g.devices[i : i+1]
		e.GPUInstance, e.ComputeInstance = concerned[0].GPUInstance, concerned[0].ComputeInstance
	}
	s.machine.Event(s.now, e)
	for _, d := range concerned {
		if n := s.meaning(d, e); n.action != None {
			d.needs[n] = true
		}
	}
}

// meaning is what a device needs by an event.
func (s *soak) meaning(d *soakDevice, e gpu.Event) need {
	switch e.XID {
	case 31:
		return need{Service, true}
	case 94:
		return need{Reset, true}
	case 74:
		d.times = append(d.times, s.now)
		if n := len(d.times); n >= 3 && s.now.Sub(d.times[n-3]) <= 10*time.Minute {
			return need{Reset, true}
		}
		return need{None, true}
	case 109:
		return need{None, true}
	}
	if e.RecoveryAction != noRecovery {
		return need{map[int]Action{0: None, 1: Reset, 2: Reboot, 4: Reset, 5: Service, 99: Service}[e.RecoveryAction], false}
	}
	return need{map[uint64]Action{13: None, 48: None, 54: Service, 79: Reboot, 95: Reset}[e.XID], false}
}

// lift ends what is needed by all devices of a GPU as far as it fits.
func (g *soakGPU) lift(fits func(need) bool) {
	for _, d := range g.devices {
		for n := range d.needs {
			if fits(n) {
				delete(d.needs, n)
			}
		}
	}
}

// probe probes a GPU.
func (s *soak) probe(g *soakGPU) {
	p := g.probe
	if p.Error != "" {
		p = gpu.Probe{UUID: p.UUID, Error: p.Error, Lost: p.Lost, RecoveryAction: noRecovery}
	}
	s.machine.Probe(s.now, &p)
	g.broken = g.faulty()
	g.links |= p.NVLinks
	if p.Error == "" && g.lost {
		g.lift(func(n need) bool { return !n.byRule && n.action != Service })
	}
	g.lost = p.Lost || g.lost && p.Error != ""
	if !g.broken && p.RecoveryAction == 0 {
		g.lift(func(n need) bool { return !n.byRule })
	}
}

// pass ends what passes by itself.
func (s *soak) pass(g *soakGPU) {
	p := &g.probe
	p.Error, p.Lost, p.NVLinks, p.Temperature, p.ShutdownTemperature = "", false, 15, 40, 90
	if p.Fabric == gpu.FabricStarting || s.IntN(4) == 0 {
		p.Fabric = gpu.FabricCompleted
	}
	if s.IntN(2) == 0 {
		p.RecoveryAction = s.recovery
	}
}

// repair makes all right with a GPU but for what its events need.
func (s *soak) repair(g *soakGPU) {
	g.probe = gpu.Probe{
		UUID: g.probe.UUID, MIGEnabled: g.probe.MIGEnabled, RecoveryAction: s.recovery, NVLinks: 15,
		Fabric: gpu.FabricCompleted, Temperature: 40, ShutdownTemperature: 90,
	}
}

func (s *soak) reset(g *soakGPU) {
	if g.probe.Error != "" {
		return
	}
	failed, asked := g.probe.RemapFailed, g.probe.RecoveryAction
	s.repair(g)
	g.probe.RemapFailed = failed
	if asked != 1 && asked != 4 { // it asks for more
		g.probe.RecoveryAction = asked
	}
	s.machine.WasReset(s.now, g.probe.UUID)
	g.lift(func(n need) bool { return n.action == Reset })
}

// setCordon cordons or uncordons a GPU or a MIG device.
func (s *soak) setCordon(g *soakGPU, cordoned bool) {
	i := s.IntN(len(g.devices))
	uuid := g.devices[i].UUID
	ofCordonedGPU := i > 0 && g.devices[0].cordoned
	switch {
	case cordoned:
		_, _ = s.machine.Cordon(s.now, uuid, "maintenance")
	case i == 0 && g.devices[0].cordoned:
		g.links = 0
		_, _ = s.machine.Uncordon(s.now, uuid)
	default:
		_, _ = s.machine.Uncordon(s.now, uuid)
	}
	if !cordoned && ofCordonedGPU {
		return // that is refused
	}
	for j, d := range g.devices {
		if i == 0 || i == j {
			d.cordoned = cordoned
		}
	}
}

// restart makes a new machine of the record, as in another boot if that has changed.
func (s *soak) restart() { s.restartFrom(s.boot) }

func (s *soak) restartFrom(boot int) {
	data, err := s.machine.Record(Identity{Boot: fmt.Sprint(boot)})
	testenv.Must(s.t, err)
	s.machine = New(soakRules)
	testenv.Must(s.t, s.machine.Restore(data, Identity{Boot: fmt.Sprint(s.boot)}))
	s.setDevices()
	for _, g := range s.gpus {
		for _, d := range g.devices {
			d.times = nil
		}
	}
}

// reboot reboots the node for service: what its events need is done, and probes decide about all devices.
func (s *soak) reboot() {
	s.boot++
	s.restartFrom(s.boot - 1)
	for _, g := range s.gpus {
		s.repair(g)
		g.lift(func(need) bool { return true })
		g.lost, g.broken = false, false
		s.probe(g)
	}
}

// settle probes the GPUs for longer than any device must be clean.
func (s *soak) settle() {
	for range 3 {
		for _, g := range s.gpus {
			s.probe(g)
		}
		s.now = s.now.Add(64 * DefaultCleanFor)
	}
}

// check compares the states with the model. Before all probes have passed for long enough, a device may also be not
// healthy yet.
func (s *soak) check(when string, settled bool) {
	all := s.machine.Statuses()
	for _, g := range s.gpus {
		for _, d := range g.devices {
			want, got := Healthy, all[d.UUID]
			switch {
			case d.cordoned:
				want = Cordoned
			case g.broken || len(d.needs) > 0:
				want = Unhealthy
			}
			if settled {
				s.seen[want]++
			}
			if got.State != want && (settled || want == Cordoned || got.State == Healthy || got.State == Cordoned) {
				s.t.Fatalf("%s: %s is %+v, want %s; it needs %v, the GPU is %+v", when, d.UUID, got, want, d.needs, g.probe)
			}
		}
	}
}
