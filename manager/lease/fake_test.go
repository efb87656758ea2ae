package lease

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	resource     = "example.com/gpu"
	twinResource = "example.com/twin"
)

// fake is a manager in memory with devices of one resource, or two.
type fake struct {
	t *testing.T
	// lease, start and release are called before the methods do something; an error is their result.
	lease   func(among []string) error
	start   func(ctx context.Context, ids []string) error
	release func(uid string) error
	options func() error

	dir string // for the service

	mu       sync.Mutex
	devices  []manager.Device
	twins    []manager.Device  // of another plugin, perhaps with the same IDs
	uses     map[string]string // what uses the devices without a lease, by ID
	pods     []model.Placement
	watchers []chan manager.Event
}

var _ Manager = (*manager.Manager)(nil)

func newFake(t *testing.T, n int) *fake {
	t.Helper()
	m := &fake{
		t: t, lease: func([]string) error { return nil }, start: func(context.Context, []string) error { return nil },
		release: func(string) error { return nil }, options: func() error { return nil }, dir: t.TempDir(),
	}
	for i := range n {
		m.devices = append(m.devices, manager.Device{ID: fmt.Sprint("d", i), Health: manager.Healthy})
	}
	return m
}

func (m *fake) Lease(_ context.Context, p model.Pod, by model.Caller, l model.Lease) (model.Placement, error) {
	if err := m.lease(p.Among); err != nil {
		return model.Placement{}, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.ContainsFunc(m.pods, func(o model.Placement) bool { return o.Pod.UID == p.UID }) {
		m.t.Errorf("the pod %s is placed again", p.UID)
	}
	a, devices := model.Allocation{Container: container, Resource: resource}, m.devices
	if p.Containers[0].Limits[resource] == 0 {
		a.Resource, devices = twinResource, m.twins
	}
	for i := range devices {
		d := &devices[i]
		if slices.Contains(p.Among, d.ID) && d.Pod == "" && len(a.IDs) < p.Containers[0].Limits[a.Resource] {
			d.Pod = p.UID
			a.IDs = append(a.IDs, d.ID)
		}
	}
	if len(a.IDs) != p.Containers[0].Limits[a.Resource] {
		m.t.Errorf("%d of %v are wanted and %v are free", p.Containers[0].Limits[a.Resource], p.Among, a.IDs)
	}
	placed := model.Placement{
		Pod: p, Admitted: time.Now(), Caller: by, Lease: &l, Allocations: []model.Allocation{a},
	}
	m.pods = append(m.pods, placed)
	m.changed()
	return placed, nil
}

// changed tells the watchers. The caller holds m.mu.
func (m *fake) changed() {
	for _, w := range m.watchers {
		w <- manager.Event{}
	}
}

func (m *fake) Start(ctx context.Context, uid, _ string) (model.RunOptions, error) {
	p, found := m.Pod(uid)
	if !found {
		return model.RunOptions{}, manager.ErrNotFound
	}
	return model.RunOptions{CDIDevices: held(p)}, m.start(ctx, held(p))
}

func (m *fake) RunOptions(_ context.Context, uid, _ string) (model.RunOptions, error) {
	p, found := m.Pod(uid)
	if !found {
		return model.RunOptions{}, manager.ErrNotFound
	}
	return model.RunOptions{CDIDevices: held(p)}, m.options()
}

func (m *fake) ChangeLease(_ context.Context, uid string, change func(*model.Lease) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.pods {
		if m.pods[i].Pod.UID == uid {
			lease := *m.pods[i].Lease
			err := change(&lease)
			if err == nil {
				m.pods[i].Lease = &lease
			}
			return err
		}
	}
	return manager.ErrNotFound
}

func (m *fake) Release(_ context.Context, uid string) error {
	if err := m.release(uid); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	before := len(m.pods)
	m.pods = slices.DeleteFunc(m.pods, func(p model.Placement) bool { return p.Pod.UID == uid })
	if len(m.pods) == before {
		return manager.ErrNotFound
	}
	for _, list := range [][]manager.Device{m.devices, m.twins} {
		for i := range list {
			if list[i].Pod == uid {
				list[i].Pod = ""
			}
		}
	}
	m.changed()
	return nil
}

func (m *fake) Pods() []model.Placement {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.pods)
}

func (m *fake) Pod(uid string) (model.Placement, bool) {
	for _, p := range m.Pods() {
		if p.Pod.UID == uid {
			return p, true
		}
	}
	return model.Placement{}, false
}

func (m *fake) Resources() []manager.Resource {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := []manager.Resource{{Name: resource, Connected: true, Devices: slices.Clone(m.devices)}}
	if len(m.twins) > 0 {
		list = append(list, manager.Resource{Name: twinResource, Connected: true, Devices: slices.Clone(m.twins)})
	}
	return list
}

// use has something use a device without a lease, or nothing any more if the text is empty.
func (m *fake) use(i int, what string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.uses = map[string]string{m.devices[i].ID: what}
	if m.devices[i].Health = manager.Healthy; what != "" {
		m.devices[i].Health = manager.Unhealthy
	}
	m.changed()
}

// usedBy says that process 7 uses what is used.
func (m *fake) usedBy(id string) Use {
	m.mu.Lock()
	defer m.mu.Unlock()
	return Use{Reason: m.uses[id], PIDs: []int{7}}
}

func (m *fake) Watch(context.Context) <-chan manager.Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.watchers = append(m.watchers, make(chan manager.Event, 10_000))
	return m.watchers[len(m.watchers)-1]
}

// hold has an earlier manager's lease hold a device.
func (m *fake) hold(i int, l model.Lease, user int) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	id := fmt.Sprint("old", i)
	m.devices[i].Pod = "lease-" + id
	m.pods = append(m.pods, model.Placement{
		Pod: model.Pod{UID: "lease-" + id, Name: id}, Lease: &l, Caller: model.Caller{UID: user}, Admitted: time.Now(),
		Allocations: []model.Allocation{{Container: container, Resource: resource, IDs: []string{m.devices[i].ID}}},
	})
	return id
}

// held returns the devices that leases have, sorted.
func (m *fake) held() string {
	var ids []string
	for _, p := range m.Pods() {
		ids = append(ids, held(p)...)
	}
	slices.Sort(ids)
	return strings.Join(ids, " ")
}

// service is a Service that runs.
type service struct {
	*testing.T
	*Service

	m    *fake
	log  *testenv.Log
	stop func() // ends Run and waits for that
}

const boot = "this boot"

func run(t *testing.T, m *fake, changes ...func(*Options)) *service {
	t.Helper()
	s := &service{T: t, m: m, log: &testenv.Log{}}
	o := Options{
		Manager: m, Describe: func(string) Info { return Info{} }, UsedBy: m.usedBy, Procfs: "/proc", Boot: boot, Dir: m.dir,
		Grace: 2 * time.Second, Log: slog.New(slog.NewTextHandler(s.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, change := range changes {
		change(&o)
	}
	s.Service = New(o)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Service.Run(ctx) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(s.stop)
	return s
}

// asked is a request that was made in another goroutine.
type asked struct {
	give func() // gives it up
	done chan struct{}
	Granted
	err     error // after done
	mu      sync.Mutex
	reasons []string
}

// ask makes a request for this process.
func (s *service) ask(count int) *asked {
	return s.askAs(Ask{Request: Request{Count: count}, By: model.Caller{UID: os.Getuid(), PID: os.Getpid()}})
}

func (s *service) askAs(ask Ask) *asked {
	ctx, cancel := context.WithCancel(s.Context())
	a := &asked{give: cancel, done: make(chan struct{})}
	_, before, _ := s.List()
	go func() {
		defer close(a.done)
		a.err = s.Acquire(ctx, ask, func(w Waiting) {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.reasons = append(a.reasons, w.Reason)
		}, func(g Granted) error {
			a.Granted = g
			return nil
		})
	}()
	for !s.arrived(a, ask.By.PID, len(before)) {
		runtime.Gosched() // in a bubble of synctest, no timer fires while a process is followed
	}
	return a
}

// arrived reports whether a request waits, or has ended.
func (s *service) arrived(a *asked, pid, before int) bool {
	select {
	case <-a.done:
		return true
	default:
	}
	leases, now, _ := s.List()
	return len(now) > before || slices.ContainsFunc(leases, func(l Lease) bool { return l.PID == pid })
}

// reason is the last reason why it waits.
func (a *asked) reason() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.reasons) == 0 {
		return ""
	}
	return a.reasons[len(a.reasons)-1]
}

// granted fails the test unless a request gets devices.
func (s *service) granted(a *asked) string {
	s.Helper()
	select {
	case <-a.done:
	case <-time.After(20 * time.Second):
		s.Fatal("the request waits: " + a.reason())
	}
	if a.err != nil {
		s.Fatal(a.err)
	}
	return strings.Join(a.Devices, " ")
}

func (s *service) until(what string, ok func() bool) {
	s.Helper()
	testenv.Eventually(s.T, what, ok)
}

// free fails the test unless all devices are free in the end, and nobody waits.
func (s *service) free() {
	s.Helper()
	s.until("all devices are free", func() bool { return s.m.held() == "" })
	s.until("nothing is kept", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.queue)+len(s.begun)+len(s.ends) == 0
	})
}

// child is a process that may have a lease.
type child struct {
	*exec.Cmd
	user int
	out  *bufio.Reader
}

// start starts a shell script as a user, and returns when it has written a line.
func start(t *testing.T, user int, script string) *child {
	t.Helper()
	cmd := exec.CommandContext(context.Background(), "sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if user != os.Getuid() {
		testenv.Root(t)
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(user), Gid: uint32(user)}
	}
	out, err := cmd.StdoutPipe()
	testenv.Must(t, err)
	testenv.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	c := &child{cmd, user, bufio.NewReader(out)}
	_, err = c.out.ReadString('\n')
	testenv.Must(t, err)
	return c
}

// sleeper starts a process that sleeps.
func sleeper(t *testing.T, user int) *child {
	t.Helper()
	return start(t, user, "echo ready; exec sleep 1000")
}

func (c *child) ask(count int) Ask {
	return Ask{Request: Request{Count: count}, By: model.Caller{UID: c.user, PID: c.Process.Pid}, Command: "sleep"}
}

// signal waits for the end of the child and returns the signal that has ended it. SIGABRT means that nothing has.
func (c *child) signal() syscall.Signal {
	timer := time.AfterFunc(30*time.Second, func() { _ = c.Process.Signal(syscall.SIGABRT) })
	defer timer.Stop()
	_ = c.Wait()
	return c.ProcessState.Sys().(syscall.WaitStatus).Signal()
}
