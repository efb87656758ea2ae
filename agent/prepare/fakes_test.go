package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

const uuid = "GPU-8f6c3a1e-0000-4000-8000-000000000001"

var device = Device{UUID: uuid, GPU: uuid, PCIBusID: "0000:17:00.0"}

// fakeNode is a driver and a node's state, with one GPU.
type fakeNode struct {
	mu         sync.Mutex
	use        gpu.Use
	useErr     error
	healthErr  error
	shared     string
	changed    []string
	changeErr  error
	persistent bool
	persistErr error            // of switching it on
	unhealthy  map[string]error // by UUID
	hang       chan struct{}    // calls of Use for the GPU uuid wait for it, if it is not nil
	releases   int              // how often the driver can be closed, if not 0
	closed     int              // how often it was
	released   bool
	cannot     string // be reset, and why
	log        []string
}

func (f *fakeNode) do(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.log = append(f.log, fmt.Sprintf(format, args...))
}

func (f *fakeNode) called() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.released {
		panic("the driver is called while it is released")
	}
}

func (f *fakeNode) Use(_ context.Context, of string) (gpu.Use, error) {
	f.called()
	if f.hang != nil && of == uuid {
		<-f.hang
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.use, f.useErr
}

func (f *fakeNode) set(u gpu.Use) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.use = u
}

func (f *fakeNode) failUse(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.useErr = err
}

func (f *fakeNode) RestoreDefaults(_ context.Context, uuid string, exclusive bool) ([]string, error) {
	f.called()
	f.do("restore exclusive=%t", exclusive)
	return f.changed, f.changeErr
}

func (f *fakeNode) SetPersistence(_ context.Context, _ string, on bool) (bool, error) {
	f.called()
	f.mu.Lock()
	if on && f.persistErr != nil {
		f.mu.Unlock()
		return false, f.persistErr
	}
	changed := f.persistent != on
	f.persistent = on
	f.mu.Unlock()
	if changed {
		f.do("persistence %t", on)
	}
	return changed, nil
}

func (f *fakeNode) Release(ctx context.Context) error {
	if f.releases > 0 && f.closed >= f.releases {
		<-ctx.Done()
		return fmt.Errorf("close the driver: %w", context.Cause(ctx))
	}
	f.closed++
	return f.release(true)
}

func (f *fakeNode) Reopen(context.Context) error { return f.release(false) }

func (f *fakeNode) release(released bool) error {
	f.mu.Lock()
	f.released = released
	f.mu.Unlock()
	f.do("released %t", released)
	return nil
}

func (f *fakeNode) Healthy(_ context.Context, uuid string) error {
	f.called()
	return cmp.Or(f.unhealthy[uuid], f.healthErr)
}

func (f *fakeNode) Shared(string) string          { return f.shared }
func (f *fakeNode) WasReset(string)               { f.do("was reset") }
func (f *fakeNode) HoldForReset(uuid, why string) { f.do("hold %s: %s", uuid, why) }
func (f *fakeNode) EndHold(string)                { f.do("end of the hold") }
func (f *fakeNode) CannotReset(string) string     { return f.cannot }
func (f *fakeNode) SetCannotReset(_, why string)  { f.cannot = why }

var (
	_ Driver = (*fakeNode)(nil)
	_ State  = (*fakeNode)(nil)
)

// fakeReset returns its outcomes one after the other, and the last again and again, each for all GPUs.
type fakeReset struct {
	node     *fakeNode
	outcomes []Outcome
	takes    time.Duration
	ends     chan struct{} // if not nil, the first reset is abandoned at its deadline, and ends when it is closed
	calls    int
	hung     bool // while the first reset is abandoned
}

func (f *fakeReset) Ready() error {
	f.node.mu.Lock()
	defer f.node.mu.Unlock()
	if f.hung {
		return errors.New("another GPU is still being reset")
	}
	return nil
}

func (f *fakeReset) setHung(hung bool) {
	f.node.mu.Lock()
	defer f.node.mu.Unlock()
	f.hung = hung
}

func (f *fakeReset) Reset(ctx context.Context, gpus []Device) []ResetResult {
	f.node.do("reset")
	began := time.Now()
	time.Sleep(f.takes)
	r := f.result()
	if f.ends != nil && f.calls == 1 {
		deadline, _ := ctx.Deadline()
		time.Sleep(time.Until(deadline))
		done := r
		hung := &AbandonedError{Since: began}
		f.setHung(true)
		go func() { <-f.ends; f.setHung(false) }()
		hung.Wait = func(ctx context.Context) ResetResult {
			select {
			case <-f.ends:
				return done
			case <-ctx.Done():
				return ResetResult{Err: hung}
			}
		}
		r = ResetResult{Err: hung}
	}
	return slices.Repeat([]ResetResult{r}, len(gpus))
}

func (f *fakeReset) result() ResetResult {
	f.node.mu.Lock()
	defer f.node.mu.Unlock()
	r := ResetResult{Outcome: f.outcomes[min(f.calls, len(f.outcomes)-1)]}
	f.calls++
	if r.Outcome != ResetDone {
		texts := []string{"it broke", "", "in use by another client", "Not Supported", "NVLink"}
		r.Err = errors.New(texts[r.Outcome])
	}
	return r
}

func realHost(t testing.TB) host.Host {
	t.Helper()
	h, err := host.New("", "", "")
	testenv.Must(t, err)
	if err := proc.SeesAll(h.Proc()); err != nil {
		testenv.Skip(t, err.Error())
	}
	return h
}

// newRunner returns a runner on this machine's processes.
func newRunner(t testing.TB, f *fakeNode) *Runner {
	t.Helper()
	return New(Options{
		Host: realHost(t), Driver: f, State: f, AwaitUnused: 300 * time.Millisecond, Log: slog.New(slog.DiscardHandler),
	})
}

// runOne prepares one device.
func runOne(r *Runner, ctx context.Context, d Device, rules Rules) (Record, error) { //nolint:revive // as Run
	records, err := r.Run(ctx, []Device{d}, rules)
	return records[0], err
}

func containerName(c string) string { return "cri-containerd-" + strings.Repeat(c, 64) + ".scope" }

// makeCgroup makes a cgroup of version 2 with that name, and removes it and its processes at the end of the test.
func makeCgroup(t testing.TB, name string) string {
	t.Helper()
	testenv.Root(t)
	for _, root := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			continue
		}
		own, err := os.ReadFile("/proc/self/cgroup")
		testenv.Must(t, err)
		_, path, _ := strings.Cut(string(own), "0::")
		top := filepath.Join(root, strings.TrimSpace(path), "prestart-test-"+strconv.Itoa(os.Getpid()))
		dir := filepath.Join(top, name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			testenv.Skip(t, "needs to make cgroups: "+err.Error())
		}
		t.Cleanup(func() {
			_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0)
			testenv.Eventually(t, "the cgroup is empty", func() bool { return os.Remove(dir) == nil })
			_ = os.Remove(top)
		})
		return dir
	}
	testenv.Skip(t, "needs cgroups of version 2")
	return ""
}

// start starts a program in a cgroup, or in that of the test if it is empty. It ends with the test.
func start(t testing.TB, cgroup string, attr *syscall.SysProcAttr, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	if attr == nil {
		attr = &syscall.SysProcAttr{}
	}
	if cgroup != "" {
		dir, err := os.Open(cgroup)
		testenv.Must(t, err)
		defer dir.Close()
		attr.UseCgroupFD, attr.CgroupFD = true, int(dir.Fd())
	}
	cmd.SysProcAttr = attr
	testenv.Must(t, cmd.Start())
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-ended })
	return cmd
}

// copyProgram copies sleep to a program of another name.
func copyProgram(t testing.TB, name string) string {
	t.Helper()
	data, err := os.ReadFile(testenv.Command(t, "sleep"))
	testenv.Must(t, err)
	dir := t.TempDir()
	for d := dir; d != "/"; d = filepath.Dir(d) { // another user runs it
		if info, err := os.Stat(d); err == nil && info.Mode()&0o005 != 0o005 {
			_ = os.Chmod(d, info.Mode()|0o055)
		}
	}
	path := filepath.Join(dir, name)
	testenv.WriteProgram(t, path, data)
	return path
}

// results are the steps of a record, such as "health ok".
func results(rec Record) []string {
	var list []string
	for _, s := range rec.Steps {
		list = append(list, s.Name+" "+string(s.Result))
	}
	return list
}

// plenty ends a test that hangs, also on a busy machine.
const plenty = time.Minute

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func checkError(t testing.TB, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("error %v", err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("error %v, want one with %q", err, want)
	case err != nil && strings.ContainsAny(err.Error(), "\n\t\x1b"):
		t.Errorf("the error is not one line: %q", err)
	}
}

// DefaultRules are the rules by the default configuration.
func DefaultRules() Rules {
	return Rules{Policy: Check, Programs: DefaultPrograms(), MemoryTolerance: DefaultMemoryTolerance}
}
