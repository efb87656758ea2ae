package agent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// fakeDriver is a driver in memory with the GPUs of a snapshot.
type fakeDriver struct {
	library string

	mu       sync.Mutex
	snapshot gpu.Snapshot
	reading  chan struct{}               // if not nil, Snapshot waits until it is closed
	err      error                       // of the driver as a whole
	use      gpu.Use                     // of each device
	probing  func()                      // if not nil, is called by a probe of one GPU
	faults   map[int]gpu.Probe           // what probes of a GPU find, by its index
	receive  func(gpu.Event)             // gets the driver's events
	closing  func(context.Context) error // if not nil, decides whether the driver can be released
	released bool
	open     bool // since a snapshot
	reads    int  // of snapshots
}

// newFakeDriver returns a driver with the GPUs of a host.
func newFakeDriver(t *testing.T, node *sim.Node) *fakeDriver {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "nvml", "testdata", node.Machine().Name+".golden.json"))
	testenv.Must(t, err)
	d := &fakeDriver{
		library: node.Library(), faults: map[int]gpu.Probe{},
	}
	testenv.Must(t, json.Unmarshal(data, &d.snapshot))
	return d
}

// set changes the driver.
func (d *fakeDriver) set(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
}

func (d *fakeDriver) Open(context.Context) error { return nil }

func (d *fakeDriver) Close() error {
	d.set(func() { d.open = false })
	return nil
}

func (d *fakeDriver) CloseIdle(context.Context) bool { return false }

func (d *fakeDriver) Library() string { return d.library }

func (d *fakeDriver) Snapshot(ctx context.Context) (*gpu.Snapshot, error) {
	if d.reading != nil {
		select {
		case <-d.reading:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		return nil, d.err
	}
	s := d.snapshot
	s.Devices = slices.Clone(s.Devices)
	d.open = true
	d.reads++
	return &s, nil
}

func (d *fakeDriver) Released() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.released
}

func (d *fakeDriver) Notify(events func(gpu.Event), _ func()) { d.receive = events }

// xid reports an XID of a GPU, which the driver says no more about.
func (d *fakeDriver) xid(index int, code uint64) {
	d.receive(gpu.Event{
		GPU: d.snapshot.Devices[index].UUID, Kind: gpu.EventXID, XID: code,
		GPUInstance: gpu.NoInstance, ComputeInstance: gpu.NoInstance, RecoveryAction: gpu.NoRecoveryAction,
	})
}

// lose makes the GPUs with these indices unreadable, and all others readable.
func (d *fakeDriver) lose(indices ...int) {
	d.snapshot.Devices = slices.Clone(d.snapshot.Devices)
	for i := range d.snapshot.Devices {
		d.snapshot.Devices[i].Error = ""
		if slices.Contains(indices, i) {
			d.snapshot.Devices[i].Error = "GPU is lost"
		}
	}
}

func (d *fakeDriver) Probes(_ context.Context, uuids ...string) ([]gpu.Probe, error) {
	if d.probing != nil && len(uuids) == 1 {
		d.probing()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.released {
		return nil, errors.New("the driver is probed while it is released")
	}
	var probes []gpu.Probe
	for i := range d.snapshot.Devices {
		one := &d.snapshot.Devices[i]
		if len(uuids) > 0 && !slices.Contains(uuids, one.UUID) {
			continue
		}
		p, faulty := d.faults[i]
		if !faulty {
			p.RecoveryAction = gpu.NoRecoveryAction
		}
		p.UUID, p.MIGEnabled = one.UUID, one.MIGEnabled
		probes = append(probes, p)
	}
	return probes, d.err
}

func (d *fakeDriver) Use(context.Context, string) (gpu.Use, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.use, nil
}

func (d *fakeDriver) RestoreDefaults(context.Context, string, bool) ([]string, error) {
	return nil, nil
}

func (d *fakeDriver) SetPersistence(context.Context, string, bool) (bool, error) { return false, nil }
func (d *fakeDriver) SetExclusive(context.Context, string, bool) error           { return nil }

func (d *fakeDriver) Release(ctx context.Context) error {
	d.mu.Lock()
	closing := d.closing
	d.mu.Unlock()
	if closing != nil {
		if err := closing(ctx); err != nil {
			return err
		}
	}
	d.set(func() { d.released = true })
	return nil
}

func (d *fakeDriver) Reopen(context.Context) error {
	d.set(func() { d.released = false })
	return nil
}

// fakeTrust trusts everything but the hook and the directories that have an error.
type fakeTrust struct {
	hook error
	dirs map[string]error // by option
}

func (f fakeTrust) CheckHook() error                { return f.hook }
func (f fakeTrust) CheckProgram(string) error       { return nil }
func (f fakeTrust) CheckDir(option, _ string) error { return f.dirs[option] }

// nodes has a host for each machine that tests have used. No test changes such a host: to make one takes longer than
// most tests.
var nodes struct {
	sync.Mutex

	dir       string
	byMachine map[string]*sim.Node
}

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "agent-hosts-")
	if err != nil {
		panic(err)
	}
	nodes.dir, nodes.byMachine = dir, map[string]*sim.Node{}
	code := m.Run()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

// sharedNode returns the host of all tests with the GPUs of a machine.
func sharedNode(t *testing.T, machine string) *sim.Node {
	t.Helper()
	testenv.Root(t)
	testenv.Command(t, "cc")
	nodes.Lock()
	defer nodes.Unlock()
	if nodes.byMachine[machine] == nil {
		m, err := sim.LoadMachine(machine)
		testenv.Must(t, err)
		nodes.byMachine[machine], err = sim.Create(t.Context(), filepath.Join(nodes.dir, machine), m, sim.Options{})
		testenv.Must(t, err)
	}
	return nodes.byMachine[machine]
}

// fixture is what a service runs with: a simulated host, a driver and a kubelet.
type fixture struct {
	t       *testing.T
	node    *sim.Node
	driver  *fakeDriver
	kubelet *kubelettest.Kubelet
	log     *testenv.Log
	opts    *Options
	reload  chan os.Signal

	mu   sync.Mutex
	next Options // what the next reload reads
	err  error   // the error of the next reload, or nil

	ended chan error // has the result of the service that was started
	stop  func()     // ends the service
}

const gpuResource = "nvidia.com/gpu"

// newFixture makes a host with the GPUs of a machine, where the service can be started with the default configuration
// after some changes.
func newFixture(t *testing.T, machine string, changes ...func(*config.Config)) *fixture {
	t.Helper()
	f := newFixtureOn(t, sharedNode(t, machine), changes...)
	f.kubelet.Start()
	return f
}

// newFixtureOn is newFixture on a host where the kubelet does not run.
func newFixtureOn(t *testing.T, node *sim.Node, changes ...func(*config.Config)) *fixture {
	t.Helper()
	h, err := host.New(node.Root(), "", "")
	testenv.Must(t, err)
	// A socket's path is short, and that of a test's directory may not be.
	run, err := os.MkdirTemp("", "agent") //nolint:usetesting // see above
	testenv.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(run) })
	f := &fixture{
		t: t, node: node, driver: newFakeDriver(t, node), kubelet: kubelettest.New(t),
		log: &testenv.Log{}, reload: make(chan os.Signal, 1),
	}
	dir := t.TempDir()
	c := config.Default()
	c.Root, c.CDIDir, c.StateDir = node.Root(), filepath.Join(dir, "cdi"), filepath.Join(dir, "state")
	c.RuntimeDir, c.DevicePluginDir = filepath.Join(run, "run"), f.kubelet.Dir
	for _, change := range changes {
		change(&c)
	}
	f.opts = &Options{
		Config: c, Host: h, HookPath: "/bin/true", SpecDirs: []string{c.CDIDir}, Driver: f.driver,
		PollInterval: 50 * time.Millisecond,
		LogSlowCalls: func() *time.Timer { return time.NewTimer(0) }, Trust: fakeTrust{},
		Log:    slog.New(slog.NewTextHandler(f.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Reload: f.reload, Reread: f.reread, Hint: func(error) string { return "" },
	}
	f.next = Options{Config: c, Trust: f.opts.Trust}
	return f
}

// reread is Options.Reread.
func (f *fixture) reread() (*Options, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return nil, f.err
	}
	fresh := f.next
	return &fresh, nil
}

// reconfigure makes the service read another configuration: the first one, changed.
func (f *fixture) reconfigure(change func(*config.Config)) {
	f.t.Helper()
	c := f.opts.Config
	change(&c)
	f.mu.Lock()
	f.next.Config, f.err = c, nil
	f.mu.Unlock()
	f.reload <- os.Interrupt
}

// start runs Serve or Watch until the test ends.
func (f *fixture) start(run func(context.Context, *Options) error) {
	f.t.Helper()
	ctx, cancel := context.WithCancel(f.t.Context())
	ended := make(chan error, 1)
	f.ended, f.stop = ended, cancel
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := run(ctx, f.opts)
		if err != nil {
			f.opts.Log.Error("the service ends: " + err.Error())
		}
		ended <- err
	}()
	f.t.Cleanup(func() {
		cancel()
		<-done
		if f.t.Failed() {
			f.t.Logf("the log:\n%s", f.log)
		}
	})
}

// result waits for the end of the service and returns its error.
func (f *fixture) result() error {
	f.t.Helper()
	select {
	case err := <-f.ended:
		return err
	case <-time.After(time.Minute):
		f.t.Fatal("the service does not end")
		return nil
	}
}

// runs fails the test if the service has ended.
func (f *fixture) runs() {
	f.t.Helper()
	select {
	case err := <-f.ended:
		f.t.Errorf("the service has ended with %v", err)
	default:
	}
}

// writeForeign writes the spec of another program, with the name of a GPU, and returns the file's path.
func (f *fixture) writeForeign(index int) string {
	f.t.Helper()
	path := filepath.Join(f.opts.Config.CDIDir, "foreign.json")
	text := fmt.Sprintf(`{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [
		{"name": %q, "containerEdits": {"env": ["FOREIGN=1"]}}]}`, f.uuid(index))
	testenv.Must(f.t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// logs waits until the log has a text so many times.
func (f *fixture) logs(text string, times int) {
	f.t.Helper()
	what := fmt.Sprintf("logged %d times: %s", times, text)
	testenv.Eventually(f.t, what, func() bool { return f.logged(text) >= times })
	if got := f.logged(text); got != times {
		f.t.Errorf("logged %d times, want %d: %s", got, times, text)
	}
}

// logged returns how many lines of the log have a text.
func (f *fixture) logged(text string) int {
	return strings.Count(strings.ReplaceAll(f.log.String(), `\"`, `"`), text)
}

// uuid returns the UUID of a GPU.
func (f *fixture) uuid(index int) string { return f.driver.snapshot.Devices[index].UUID }

// allocate allocates devices, and returns the CDI names or the error.
func (f *fixture) allocate(e *kubelettest.Endpoint, ids ...string) ([]string, error) {
	answer, err := e.Client.Allocate(f.t.Context(), &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, d := range answer.GetContainerResponses()[0].GetCdiDevices() {
		names = append(names, d.GetName())
	}
	return names, nil
}

// preStart prepares devices for a container.
func (f *fixture) preStart(e *kubelettest.Endpoint, ids ...string) error {
	_, err := e.Client.PreStartContainer(f.t.Context(), &v1beta1.PreStartContainerRequest{DevicesIds: ids})
	return err
}

// send sends a request to the control socket.
func (f *fixture) send(r control.Request) (result string, err error) {
	f.t.Helper()
	testenv.Eventually(f.t, "a server at the control socket", func() bool {
		result, err = control.Send(f.t.Context(), f.opts.Config.RuntimeDir, r, func(string) {})
		return !errors.Is(err, control.ErrNoServer)
	})
	return result, err
}

// does sends a request that must succeed with a text.
func (f *fixture) does(text string, r control.Request) {
	f.t.Helper()
	if got, err := f.send(r); err != nil || !strings.Contains(got, text) {
		f.t.Errorf("%s: %q, error %v, want %q", r.String(), got, err, text)
	}
}

// refuses sends a request that must fail with a text.
func (f *fixture) refuses(text string, r control.Request) {
	f.t.Helper()
	if got, err := f.send(r); err == nil || !strings.Contains(err.Error(), text) {
		f.t.Errorf("%s: %q, error %v, want %q", r.String(), got, err, text)
	}
}

// wantError checks that an error has a text, or that there is none if the text is empty.
func wantError(t *testing.T, err error, text string) {
	t.Helper()
	if (err == nil) != (text == "") || err != nil && !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want %q", err, cmp.Or(text, "none"))
	}
}
