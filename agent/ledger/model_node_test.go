package ledger

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"time"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
)

// The node of the model: its GPUs, the configuration, and the processes of this program. A process does what agent
// (publisher.go, prestart.go) and agent/dra (claims.go) do with a ledger.

const (
	modelGPUs   = 3
	modelDriver = "gpu.nvidia.com"
	modelWhole  = "nvidia.com/gpu"
)

// modelGPU is a GPU. In MIG mode it has the MIG devices of a layout.
type modelGPU struct {
	mig    bool
	layout int
}

// modelLayouts are the profiles of the MIG devices of a GPU. A place in two layouts with the same profile is the same
// MIG device, with the same UUID.
var modelLayouts = [][]string{{"3g", "3g"}, {"3g", "1g"}, {"1g", "1g", "1g"}, {"7g"}, {}}

// modelUnit is a GPU or MIG device.
type modelUnit struct {
	uuid, parent, profile string
	memory                uint64
}

func modelGPUUUID(g int) string { return fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d", g) }

func modelMIGUUID(g int, profile string, place int) string {
	return fmt.Sprintf("MIG-0000000%c-0000-0000-0000-%06d%06d", profile[0], g, place)
}

// modelUnits are the devices of a GPU.
func (g *modelGPU) units(index int) []modelUnit {
	parent := modelGPUUUID(index)
	if !g.mig {
		return []modelUnit{{parent, parent, "", 80}}
	}
	var list []modelUnit
	for place, profile := range modelLayouts[g.layout] {
		list = append(list, modelUnit{modelMIGUUID(index, profile, place), parent, profile, 10 * uint64(profile[0]-'0')})
	}
	return list
}

// apart reports whether some layout has both MIG devices.
func apart(one, two string) bool {
	for g := range modelGPUs {
		for layout := range modelLayouts {
			gpu := modelGPU{mig: true, layout: layout}
			has := map[string]bool{}
			for _, u := range gpu.units(g) {
				has[u.uuid] = true
			}
			if has[one] && has[two] {
				return true
			}
		}
	}
	return false
}

// modelForm is how a GPU or its MIG devices are shared. Zero replicas: not at all.
type modelForm struct {
	replicas     int
	renamed, mps bool
}

var modelForms = []modelForm{{}, {}, {2, true, false}, {3, false, false}, {2, false, true}, {4, true, true}}

// modelConfig is a configuration: the door and the sharing of each GPU.
type modelConfig struct {
	byDRA  [modelGPUs]bool
	forms  [modelGPUs]modelForm
	single bool // whether MIG devices have the resource name of GPUs
}

// onlyDRA reports whether the door of the whole node is DRA: then the kubelet does not call PreStartContainer.
func (c *modelConfig) onlyDRA() bool { return c.byDRA == [modelGPUs]bool{true, true, true} }

func (c *modelConfig) chooseDoors(r *rand.Rand) {
	mode := r.IntN(4)
	for g := range c.byDRA {
		c.byDRA[g] = mode == 1 || mode > 1 && r.IntN(2) == 0
	}
}

func (c *modelConfig) chooseForms(r *rand.Rand) {
	for g := range c.forms {
		c.forms[g] = modelForms[r.IntN(len(modelForms))]
	}
	c.single = r.IntN(2) == 0
}

func (c *modelConfig) String() string {
	text := ""
	for g := range modelGPUs {
		door := "plugin"
		if c.byDRA[g] {
			door = "dra"
		}
		text += fmt.Sprintf(" %d:%s%v", g, door, c.forms[g])
	}
	return text
}

// build returns the resources of the node in a configuration.
func (w *model) build(c *modelConfig) []resource.Resource {
	byName := map[string][]resource.Device{}
	for g := range w.gpus {
		form := c.forms[g]
		for _, u := range w.gpus[g].units(g) {
			name := modelWhole
			if u.profile != "" && !c.single {
				name = "nvidia.com/mig-" + u.profile
			}
			if form.replicas > 0 && form.renamed {
				name += ".shared"
			}
			d := resource.Device{
				ID: u.uuid, UUID: u.uuid, Parent: u.parent, Healthy: true, Replica: resource.NoReplica, MemoryBytes: u.memory,
			}
			if form.replicas == 0 {
				byName[name] = append(byName[name], d)
			}
			for r := range form.replicas {
				d.ID, d.Replica = fmt.Sprintf("%s::%d", u.uuid, r), r
				if form.mps {
					d.MPS = &resource.MPSLimits{MemoryBytes: u.memory / uint64(form.replicas)}
				}
				byName[name] = append(byName[name], d)
			}
		}
	}
	var list []resource.Resource
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		list = append(list, resource.Resource{Name: name, Devices: byName[name]})
	}
	return list
}

// split splits resources by door, as agent/doors.go does.
func (c *modelConfig) split(all []resource.Resource) (plugin, claimable []resource.Resource) {
	for _, r := range all {
		byPlugin, byDRA := resource.Resource{Name: r.Name}, resource.Resource{Name: r.Name}
		for _, d := range r.Devices {
			var g int
			_, _ = fmt.Sscanf(d.Parent, "GPU-00000000-0000-0000-0000-%d", &g)
			if c.byDRA[g] {
				byDRA.Devices = append(byDRA.Devices, d)
			} else {
				byPlugin.Devices = append(byPlugin.Devices, d)
			}
		}
		plugin = append(plugin, byPlugin)
		if len(byDRA.Devices) > 0 {
			claimable = append(claimable, byDRA)
		}
	}
	return plugin, claimable
}

func (w *model) snapshot() *gpu.Snapshot {
	s := &gpu.Snapshot{}
	for g := range w.gpus {
		one := gpu.Device{UUID: modelGPUUUID(g)}
		for _, u := range w.gpus[g].units(g) {
			if u.profile != "" {
				one.MIG = append(one.MIG, gpu.MIGDevice{UUID: u.uuid})
			}
		}
		s.Devices = append(s.Devices, one)
	}
	return s
}

// exists reports whether the node has a GPU or MIG device now.
func (w *model) exists(uuid string) bool {
	for g := range w.gpus {
		for _, u := range w.gpus[g].units(g) {
			if u.uuid == uuid {
				return true
			}
		}
	}
	return false
}

// modelRecord is the record of a claim on disk.
type modelRecord struct {
	claim Claim
	since time.Time
	boot  int
}

// instance is a process of this program.
type instance struct {
	w          *model
	number     int
	ledger     *Ledger
	changed    wake.Chan
	publishing chan struct{} // full while the devices are published
	endRun     context.CancelFunc
	end        context.CancelFunc
	life       context.Context // of all calls that it serves

	// Guarded by w.mu.
	config            modelConfig
	all               []resource.Resource // of the node, without what the ledger says
	plugin, claimable []resource.Resource // as they are advertised
	records           map[string]modelRecord
	last              *kubelet.Checkpoint
	seen              map[string]bool // what it has read in the kubelet's files: POD/CONTAINER, and claims
	beside            bool            // until the process beside it has ended
	dead              bool
	retired           bool // another one has taken over
}

// instanceBooks is the kubelet as an instance reads it.
type instanceBooks struct{ i *instance }

var _ Kubelet = instanceBooks{}

// List implements Kubelet.
func (b instanceBooks) List(ctx context.Context) (podresources.Answer, error) {
	return b.i.w.list(ctx)
}

// Checkpoint implements Kubelet.
func (b instanceBooks) Checkpoint() (*kubelet.Checkpoint, podresources.Version, error) {
	w := b.i.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if !b.i.beside && !b.i.dead { // what the reads before this one have seen is written
		maps.Copy(w.kept, b.i.seen)
	}
	c, version, err := w.kubelet.readCheckpoint()
	b.i.last = c
	return c, version, err
}

// Claims implements Kubelet. It is called when what Checkpoint has returned last is taken over.
func (b instanceBooks) Claims() ([]kubelet.Claim, error) {
	w := b.i.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if b.i.last != nil && w.kubelet.answers() {
		for _, e := range b.i.last.PodDeviceEntries {
			b.i.seen[e.PodUID+"/"+e.ContainerName] = true
		}
	}
	for uid := range b.i.records {
		b.i.seen[uid] = true
	}
	list := slices.Clone(w.kubelet.claimsFile)
	for _, c := range list {
		if !w.kubelet.answers() {
			break // then the ledger does not take it over
		}
		b.i.seen[c.UID] = b.i.seen[c.UID] || len(c.Devices[modelDriver]) > 0
	}
	return list, nil
}

// start starts a process, which reads the records, publishes, and registers with the kubelet.
func (w *model) start(c modelConfig) *instance { return w.startBeside(c, false) }

// startBeside starts a process that another one, if there is one beside it, hands over to.
func (w *model) startBeside(c modelConfig, beside bool) *instance {
	life, end := context.WithCancel(w.ctx)
	running, endRun := context.WithCancel(life)
	w.mu.Lock()
	w.instances++
	i := &instance{
		w: w, number: w.instances, config: c, changed: wake.New(), publishing: make(chan struct{}, 1), life: life,
		end: end, endRun: endRun, records: maps.Clone(w.records), seen: map[string]bool{},
	}
	w.note("instance %d starts:%s", i.number, c.String())
	w.loseWhatNobodyKnows(i)
	w.mu.Unlock()
	i.beside = beside
	i.ledger = New(Options{
		Kubelet: instanceBooks{i}, Driver: modelDriver, Resend: i.resend, Pods: w.runningPods, Beside: beside,
		Files: Files{
			Parents: filepath.Join(w.dir, "parents.json"), Forgotten: filepath.Join(w.dir, "forgotten.json"),
			Known: filepath.Join(w.dir, "holders.json"),
		},
		Changed: i.changed, Log: slog.New(slog.DiscardHandler),
	})
	for _, r := range i.records {
		i.ledger.RestoreClaim(r.claim, r.since)
	}
	w.mu.Lock()
	w.current = i
	w.mu.Unlock()
	w.goes(func() { _ = i.ledger.Run(running) })
	i.publish()
	w.goes(func() { i.republish(running) })
	w.goes(func() { i.dropGone(running) })
	w.goes(i.register)
	return i
}

// kill ends the process at once. The caller has locked w.mu.
func (i *instance) kill() {
	i.dead = true
	i.end()
	i.w.kubelet.leave(i)
}

// publish passes on the devices of the node.
func (i *instance) publish() {
	i.publishing <- struct{}{}
	defer func() { <-i.publishing }()
	i.w.mu.Lock()
	i.all = i.w.build(&i.config)
	snapshot, config, all := i.w.snapshot(), i.config, i.all
	i.w.mu.Unlock()
	plugin, claimable := config.split(all)
	i.ledger.Offer(snapshot, plugin, claimable...)
	i.advertise(config, all)
}

func (i *instance) republish(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-i.changed:
		}
		i.publishing <- struct{}{}
		i.w.mu.Lock()
		config, all := i.config, i.all
		i.w.mu.Unlock()
		i.advertise(config, all)
		<-i.publishing
	}
}

// advertise does what publisher.advertise does.
func (i *instance) advertise(config modelConfig, all []resource.Resource) {
	all = resource.MarkUnhealthy(all, func(d *resource.Device) (why string) {
		why, d.Ending = i.ledger.Reason(d)
		return why
	})
	plugin, claimable := config.split(all)
	plugin = resource.MarkUnhealthy(plugin, i.ledger.Claim)
	for n := range plugin {
		of := plugin[n : n+1]
		of[0] = resource.MarkUnhealthy(of, func(d *resource.Device) string { return i.ledger.Unread(of[0].Name, d) })[0]
	}
	claimable = resource.MarkUnhealthy(claimable, i.ledger.Unscheduled)
	i.w.mu.Lock()
	defer i.w.mu.Unlock()
	if i.retired || i.dead {
		return
	}
	same := maps.EqualFunc(healthyOf(i.plugin), healthyOf(plugin), maps.Equal)
	i.plugin, i.claimable = plugin, claimable
	i.w.slices = claimable
	if !same {
		i.w.kubelet.send(i, false)
	}
}

// healthyOf returns the IDs of the healthy devices by resource.
func healthyOf(list []resource.Resource) map[string]map[string]bool {
	healthy := map[string]map[string]bool{}
	for _, r := range list {
		healthy[r.Name] = map[string]bool{}
		for _, d := range r.Devices {
			if d.Healthy {
				healthy[r.Name][d.ID] = true
			}
		}
	}
	return healthy
}

// register registers the process with the kubelet, which then watches it.
func (i *instance) register() {
	w := i.w
	w.sleepFor(between(w.randOf(i.number), 50*time.Millisecond, 600*time.Millisecond))
	w.mu.Lock()
	defer w.mu.Unlock()
	if i.dead || i.retired || w.current != i || !w.kubelet.up {
		return
	}
	w.kubelet.watch(i)
	i.ledger.Wake()
}

// resend is plugin.Plugin.Resend.
func (i *instance) resend() bool {
	w := i.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if i.dead || i.retired || !w.kubelet.up || w.kubelet.endpoint != i {
		return false
	}
	w.kubelet.send(i, true)
	return true
}

var errKilled = errors.New("the process was killed")

// allocate is Allocate of the device plugin.
func (i *instance) allocate(resourceName string, ids []string) error {
	w := i.w
	w.mu.Lock()
	var devices []*resource.Device
	for _, id := range ids {
		if d := findDevice(i.plugin, resourceName, id); d != nil && (d.Healthy || d.Ending) {
			devices = append(devices, d)
		}
	}
	dead := i.dead
	w.mu.Unlock()
	if dead || len(devices) != len(ids) {
		return errors.New("no such healthy device")
	}
	ctx, cancel := context.WithTimeout(i.life, 10*time.Second)
	defer cancel()
	err := i.ledger.Take(ctx, resourceName, devices)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil && w.killAtTake {
		w.killAtTake = false
		w.count("SIGKILL between Take and the kubelet's write")
		w.note("instance %d is killed in Allocate", i.number)
		i.kill()
		w.killed <- struct{}{}
		if w.rand2.IntN(2) == 0 {
			return errKilled
		}
	}
	if i.dead && err != nil {
		return errKilled
	}
	return err
}

func findDevice(list []resource.Resource, resourceName, id string) *resource.Device {
	for n := range list {
		for m := range list[n].Devices {
			if d := &list[n].Devices[m]; list[n].Name == resourceName && d.ID == id {
				return d
			}
		}
	}
	return nil
}

// preStart is PreStartContainer, with the wait of preparer.preStart.
func (i *instance) preStart(ctx context.Context, resourceName string, ids []string) error {
	w := i.w
	var devices []*resource.Device
	for _, id := range ids {
		w.mu.Lock()
		d := findDevice(i.plugin, resourceName, id)
		var old *resource.Device
		for n := range i.all {
			for m := range i.all[n].Devices {
				if i.all[n].Devices[m].UUID == resource.UUIDOf(id) {
					old = &i.all[n].Devices[m]
				}
			}
		}
		w.mu.Unlock()
		switch {
		case d != nil:
		case old != nil && i.ledger.HeldAs(resourceName, id):
			one := *old
			one.ID, d = id, &one
		default:
			return errors.New("no such device")
		}
		devices = append(devices, d)
	}
	waiting, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if err := i.ledger.AwaitFree(waiting, resourceName, ids, devices); err != nil {
		return err
	}
	for _, d := range devices {
		if !d.Healthy && !d.Ending {
			return errors.New(d.Reason)
		}
	}
	if i.life.Err() != nil {
		return errKilled
	}
	return nil
}

// prepare is NodePrepareResources.
func (i *instance) prepare(ctx context.Context, c *modelClaim) error {
	w := i.w
	defer c.lock(i)()
	w.mu.Lock()
	r, recorded := i.records[c.uid]
	var portions []Portion
	for _, g := range c.grants {
		for _, res := range i.all {
			for _, d := range res.Devices {
				if d.UUID == g.uuid {
					portions = append(portions, Portion{Device: &d, Memory: g.memory, Admin: g.admin})
					break
				}
			}
		}
	}
	boot, allocated, pods := w.boot, c.allocated, slices.Sorted(maps.Keys(c.reserved))
	w.mu.Unlock()
	seen := map[string]bool{}
	portions = slices.DeleteFunc(portions, func(p Portion) bool {
		again := seen[p.Device.UUID]
		seen[p.Device.UUID] = true
		return again
	})
	switch {
	case len(portions) != len(c.grants):
		return errors.New("the node has no such device any more")
	case recorded && r.boot == boot:
		return nil
	case !allocated:
		return errors.New("it is not allocated")
	}
	waiting, cancel := context.WithTimeout(ctx, 25*time.Second)
	defer cancel()
	held := Claim{UID: c.uid, Name: c.name, Pods: pods, Portions: portions}
	since := time.Now()
	if err := i.ledger.TakeClaim(waiting, held); err != nil {
		return err
	}
	w.sleepFor(between(w.randOf(len(c.uid)), time.Millisecond, 50*time.Millisecond))
	w.mu.Lock()
	defer w.mu.Unlock()
	if i.dead {
		return errKilled
	}
	i.records[c.uid] = modelRecord{held, since, w.boot}
	w.records[c.uid] = i.records[c.uid]
	return nil
}

// unprepare is NodeUnprepareResources.
func (i *instance) unprepare(c *modelClaim) error {
	defer c.lock(i)()
	return i.drop(c.uid)
}

func (i *instance) drop(uid string) error {
	i.w.mu.Lock()
	dead := i.dead
	i.w.mu.Unlock()
	if dead {
		return errKilled
	}
	i.ledger.DropClaim(uid)
	i.w.mu.Lock()
	defer i.w.mu.Unlock()
	if i.dead {
		return errKilled
	}
	delete(i.records, uid)
	delete(i.w.records, uid)
	return nil
}

// restoreAgain reads the records once more, after the process beside it has ended.
func (i *instance) restoreAgain() {
	i.w.mu.Lock()
	i.beside = false
	disk := maps.Clone(i.w.records)
	known := maps.Clone(i.records)
	i.records = maps.Clone(disk)
	i.w.mu.Unlock()
	for uid := range known {
		if _, found := disk[uid]; !found {
			i.ledger.DropClaim(uid)
		}
	}
	for _, r := range disk {
		i.ledger.RestoreClaim(r.claim, r.since)
	}
	i.ledger.Alone()
	_, _ = i.ledger.Read(i.life)
}

// dropGone is claims.dropGone.
func (i *instance) dropGone(ctx context.Context) {
	for pause := time.Second; ; pause = min(2*pause, 30*time.Second) {
		i.w.mu.Lock()
		list := maps.Clone(i.records)
		i.w.mu.Unlock()
		for uid := range list {
			i.dropIfGone(uid)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

func (i *instance) dropIfGone(uid string) {
	w := i.w
	if abandoned, err := i.ledger.IsAbandoned(uid); err != nil || !abandoned {
		return
	}
	w.mu.Lock()
	c := w.claims[uid]
	gone := !c.allocated
	w.mu.Unlock()
	if gone {
		defer c.lock(i)()
		w.mu.Lock()
		w.note("instance %d drops the abandoned %s", i.number, uid)
		w.mu.Unlock()
		_ = i.drop(uid)
	}
}

// runningPods are the pods that have processes. Sometimes those of one pod cannot be found out for a while.
func (w *model) runningPods() (proc.Pods, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	pods := proc.Pods{UIDs: map[string]bool{}}
	for _, p := range w.pods {
		if !p.sandbox && len(p.running) == 0 {
			continue
		}
		if p == w.hidden && time.Now().Before(w.hiddenUntil) {
			pods.Partial = true
			continue
		}
		pods.UIDs[p.uid] = true
	}
	return pods, true
}
