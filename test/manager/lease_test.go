package manager

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

var (
	callerKills  = flag.Int64("caller-kills", 1000, "how many callers of run are killed")
	managerKills = flag.Int64("manager-kills", 1000, "how often the manager is killed meanwhile")
)

const gpus = "nvidia.com/gpu"

// leasing is a simulated node with 8 GPUs, which the real plugin offers and the device manager leases.
type leasing struct {
	*program
	node   *sim.Node
	plugin *proc.Process
	leases *api.Client
	found  string // the directory in which those who have devices write what they find
}

// newLeasing starts the programs. Users other than root can reach the socket of leases if a group may use it.
func newLeasing(t *testing.T, options ...string) *leasing {
	t.Helper()
	testenv.Root(t)
	testenv.Command(t, "cc")
	l := &leasing{program: newProgram(t), node: simtest.Node(t, "dgx-h100")}
	l.options = append([]string{"--device-info", filepath.Join(l.dir, "gpu", "devices")}, options...)
	for _, name := range []string{"self", "thread-self"} { // a check needs the plugin's own process
		testenv.Must(t, os.Symlink("/proc/"+name, filepath.Join(l.node.Root(), "proc", name)))
	}
	l.found = filepath.Join(l.dir, "found")
	l.leases = api.NewClient(filepath.Join(l.dir, "api", "manager-leases.sock"))
	testenv.Must(t, os.Chmod(l.dir, 0o755), os.Mkdir(l.found, 0o777))
	testenv.Must(t, os.Chmod(l.found, 0o777))
	t.Cleanup(func() {
		if l.plugin != nil {
			_ = l.plugin.Kill()
		}
	})
	l.start()
	l.plug()
	return l
}

// plug starts the plugin and returns when its devices can be had.
func (l *leasing) plug() {
	l.Helper()
	l.launchPlugin()
	l.await("the GPUs can be had", func() bool { return l.allocatable(gpus) == 8 })
}

// launchPlugin starts the plugin and does not wait for it.
func (l *leasing) launchPlugin() {
	l.Helper()
	var err error
	l.plugin, err = proc.Start(proc.Cmd{Args: []string{
		shared.Program(l.T, "gpu-cdi-plugin"), "--root", l.node.Root(), "--cdi-dir", filepath.Join(l.dir, "cdi"),
		"--runtime-dir", filepath.Join(l.dir, "run"), "--state-dir", filepath.Join(l.dir, "gpu"), "serve",
		"--device-plugin-dir", l.plugins, "--plugins-registry-dir", filepath.Join(l.dir, "registry"),
		"--pod-resources-socket", filepath.Join(l.dir, "pod-resources", "kubelet.sock"), "--hook-path", "/bin/true",
	}}, l.log)
	testenv.Must(l, err)
}

// args are those of a caller whose command has its devices for a time.
func (l *leasing) args(count int, time time.Duration, flags ...string) []string {
	self, err := os.Executable()
	testenv.Must(l, err)
	args := append([]string{
		shared.Program(l.T, "device-manager"), "--api-socket", filepath.Join(l.dir, "api", "manager.sock"),
		"run", "--quiet", "--gpus", strconv.Itoa(count),
	}, flags...)
	return append(args, "--", self, holder, l.node.Root(), l.found, strconv.Itoa(count), time.String())
}

// holder is the first argument of this program when it is the command of a caller.
const holder = "hold-devices"

// hold is the command of a caller. It uses each of its devices as a process that the driver lists, and so finds out
// whether another process has it too. What it finds does not depend on what the manager knows.
func hold(root, found, count, duration string) int {
	note := func(file, what string) {
		f, err := os.OpenFile(filepath.Join(found, file), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o666)
		if err == nil {
			_, err = f.WriteString(what + "\n")
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, what, err)
		}
	}
	fail := func(what string) int {
		note("violations", what)
		return 99
	}
	ids := strings.Split(os.Getenv("CUDA_VISIBLE_DEVICES"), ",")
	if strconv.Itoa(len(ids)) != count {
		return fail(fmt.Sprintf("wants %s devices and has %q", count, ids))
	}
	for _, id := range ids {
		if os.Geteuid() != 0 { // only root can change the simulated node
			break
		}
		if err := use(root, id); err != nil {
			return fail(err.Error())
		}
	}
	note("turns", strings.Join(ids, ","))
	wait, err := time.ParseDuration(duration)
	if err != nil {
		return fail(err.Error())
	}
	time.Sleep(wait)
	return 0
}

// use has this process use a GPU until it ends. It returns an error if another process uses the GPU too.
func use(root, uuid string) error {
	node, err := sim.Open(root)
	if err != nil {
		return err
	}
	gpu := slices.IndexFunc(node.Machine().GPUs, func(g sim.GPU) bool { return g.UUID == uuid })
	err = node.AddProcess(gpu, sim.Process{PID: os.Getpid(), Type: sim.ComputeProcess, MemoryBytes: 1 << 30})
	if err != nil {
		return err
	}
	pids, err := node.PIDs(gpu)
	if err == nil && len(pids) != 1 {
		err = fmt.Errorf("%s is used by the processes %v", uuid, pids)
	}
	return err
}

// turns has the devices of each holder.
func (l *leasing) turns() [][]string {
	l.Helper()
	text, err := os.ReadFile(filepath.Join(l.found, "turns"))
	if !errors.Is(err, os.ErrNotExist) {
		testenv.Must(l, err)
	}
	var turns [][]string
	for line := range strings.Lines(string(text)) {
		turns = append(turns, strings.Split(strings.TrimSpace(line), ","))
	}
	return turns
}

// inUse is in the plugin's reason for not giving a device that a process uses.
const inUse = "still uses it"

// checkHolders fails the test if a device had two holders. If the manager gives a device that is in use, the plugin
// refuses it, which the log says.
func (l *leasing) checkHolders() {
	l.Helper()
	text, err := os.ReadFile(filepath.Join(l.found, "violations"))
	if err == nil {
		l.Errorf("what the holders found:\n%s", text)
	}
	log, err := os.ReadFile(l.log.Name())
	testenv.Must(l, err)
	for line := range strings.Lines(string(log)) {
		if strings.Contains(line, inUse) {
			l.Errorf("a device in use was given: %s", line)
		}
	}
	given := slices.Concat(l.turns()...)
	slices.Sort(given)
	if n := len(slices.Compact(given)); n != 8 {
		l.Errorf("%d GPUs were given, want all 8", n)
	}
}

// checkFree fails the test unless all devices are free in the end, and nobody waits.
func (l *leasing) checkFree() {
	l.Helper()
	l.await("all leases have ended", func() bool {
		list, err := l.leases.Leases(l.Context())
		return err == nil && len(list.Items)+len(list.Waiting) == 0
	})
	list, err := l.api.Devices(l.Context())
	testenv.Must(l, err)
	for _, r := range list.Items {
		for _, d := range r.Devices {
			if d.Pod != "" {
				l.Errorf("%s is held by %s", d.ID, d.Pod)
			}
		}
	}
	res, err := proc.Run(l.Context(), proc.Cmd{Args: l.args(8, 0, "--wait", "10s")})
	if err != nil || res.Code != 0 {
		l.Errorf("all devices at once: %v, %v", res, err)
	}
}

// Many callers at once for 8 GPUs: no GPU has two holders, all get their turn, and nothing is leaked.
func TestManyCallersOfRun(t *testing.T) { manyCallers(t, 40) }

func TestSlowManyCallersOfRun(t *testing.T) { manyCallers(t, 200) }

func manyCallers(t *testing.T, n int) {
	t.Helper()
	l := newLeasing(t)
	var callers sync.WaitGroup
	for i := range n {
		random := rand.New(rand.NewPCG(uint64(i), 0))
		callers.Go(func() {
			args := l.args(1+random.IntN(1+random.IntN(8)), time.Duration(random.IntN(30))*time.Millisecond)
			if res, err := proc.Run(t.Context(), proc.Cmd{Args: args}); err != nil || res.Code != 0 {
				t.Errorf("a caller: %v, %v", err, res)
			}
		})
	}
	callers.Wait()
	l.checkHolders()
	l.checkFree()
}

// Callers, the manager and the plugin are killed at random.
func TestCallersAndManagerAreKilled(t *testing.T) { killCallers(t, 40, 20) }

func TestSlowCallersAndManagerAreKilled(t *testing.T) { killCallers(t, *callerKills, *managerKills) }

// killCallers has callers killed at least so many times, and the manager, which is mostly young then: it has not served
// yet, finds the leases of the one before it, or waits for the plugin. The plugin is killed once for 100 callers. Then
// the callers that are left get their turn.
func killCallers(t *testing.T, callerKills, managerKills int64) {
	t.Helper()
	l := newLeasing(t)
	var killed, ended, failed atomic.Int64
	calm := make(chan struct{}) // closed when nothing is killed any more
	var callers sync.WaitGroup
	for i := range 12 {
		callers.Go(func() { l.call(rand.New(rand.NewPCG(uint64(i), 1)), calm, &killed, &ended, &failed) })
	}
	managers, plugins := int64(0), int64(0)
	begin := time.Now()
	for managers < managerKills || killed.Load() < callerKills {
		if time.Since(begin) > 10*time.Minute {
			t.Fatalf("%d callers and %d managers were killed in %v", killed.Load(), managers, time.Since(begin))
		}
		life := 200 * time.Millisecond
		if managers%10 == 0 { // so that many callers get devices too
			life = time.Second
		}
		time.Sleep(time.Duration(rand.Int64N(int64(life))))
		testenv.Must(t, l.process.Kill())
		managers++
		l.launch()
		if (plugins+1)*100-80 < killed.Load() {
			testenv.Must(t, l.plugin.Kill())
			l.launchPlugin()
			plugins++
		}
	}
	took := time.Since(begin)
	testenv.Must(t, l.process.Kill())
	l.start()
	l.await("the GPUs can be had", func() bool { return l.allocatable(gpus) == 8 })
	close(calm)
	callers.Wait()
	turns := len(l.turns())
	t.Logf("killed %d callers, %d times the manager and %d times the plugin in %v; %d got devices, %d ended by "+
		"themselves, and %d had no manager", killed.Load(), managers, plugins, took.Round(time.Second), turns,
		ended.Load(), failed.Load())
	if int64(turns) < callerKills/4 {
		t.Error("too few callers got devices")
	}
	l.checkHolders()
	l.checkFree()
}

// call is a caller again and again, which is mostly killed at a random time. When all is calm it is one more, which
// must get its turn.
func (l *leasing) call(random *rand.Rand, calm chan struct{}, killed, ended, failed *atomic.Int64) {
	for last := false; !last; {
		select {
		case <-calm:
			last = true
		default:
		}
		p, err := proc.Start(proc.Cmd{
			Args: l.args(1+random.IntN(1+random.IntN(8)), time.Duration(random.IntN(100))*time.Millisecond),
		}, l.log)
		if err != nil {
			l.Error(err)
			return
		}
		after := time.Duration(random.IntN(1000)) * time.Millisecond
		if last {
			after = time.Minute
		}
		select {
		case <-p.Done():
		case <-time.After(after):
			_ = p.Kill()
		}
		switch code := p.Code(); {
		case code == 128+int(syscall.SIGKILL):
			killed.Add(1)
		case code == 0:
			ended.Add(1)
		case code == 125: // the manager was killed
			failed.Add(1)
		default:
			l.Errorf("a caller ended with %d", code)
		}
		if last && p.Code() != 0 {
			l.Errorf("a caller did not get its turn: %d", p.Code())
		}
	}
}

// A GPU that a process uses without a lease is left out.
func TestAGPUInUseIsLeftOut(t *testing.T) {
	t.Parallel()
	l := newLeasing(t)
	p, err := proc.Start(proc.Cmd{Args: []string{"sleep", "1000"}}, l.log)
	testenv.Must(t, err)
	defer func() { _ = p.Kill() }()
	testenv.Must(t, l.node.AddProcess(3, sim.Process{PID: p.Pid(), Type: sim.ComputeProcess, MemoryBytes: 1 << 30}))
	proc.Must(t, 0, proc.Cmd{Args: l.args(7, 0)})
	res, err := proc.Run(t.Context(), proc.Cmd{Args: l.args(8, 0, "--wait", "8s")})
	uuid := l.node.Machine().GPUs[3].UUID
	if err != nil || res.Code != 124 || !strings.Contains(res.Stderr, uuid) || !strings.Contains(res.Stderr, inUse) {
		t.Errorf("all GPUs: %v, %v", err, res)
	}
}

// The time of a lease is over, also when the manager was away at that time.
func TestTheTimeOfALeaseIsOver(t *testing.T) {
	t.Parallel()
	l := newLeasing(t)
	p, err := proc.Start(proc.Cmd{Args: l.args(8, time.Hour, "--for", "1s")}, l.log)
	testenv.Must(t, err)
	l.await("it has its devices", func() bool {
		return len(l.turns()) == 1
	})
	testenv.Must(t, l.process.Kill())
	l.start()
	<-p.Done()
	if p.Code() != 128+int(syscall.SIGTERM) {
		t.Errorf("it ended with %d", p.Code())
	}
	l.await("the plugin is back", func() bool { return l.allocatable(gpus) == 8 })
	l.checkFree()
}

// A signal that arrives between the begin of the lease and that of the command ends the caller instead.
func TestASignalBeforeTheCommandBegins(t *testing.T) {
	l := newLeasing(t)
	// A caller who writes a line then, which nobody reads, is held up there.
	reader, writer, err := os.Pipe()
	testenv.Must(t, err)
	defer reader.Close()
	defer writer.Close()
	fillPipe(t, writer)
	args := slices.DeleteFunc(l.args(1, 0), func(arg string) bool { return arg == "--quiet" })
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "GPU_CDI_") }) // no warnings
	p, err := proc.Start(proc.Cmd{Args: args, Env: env}, writer)
	testenv.Must(t, err)
	defer func() { _ = p.Kill() }()
	l.await("the lease has begun, and the caller writes", func() bool {
		list, err := l.leases.Leases(t.Context())
		return err == nil && len(list.Items) == 1 && writes(p.Pid(), 2)
	})
	testenv.Must(t, syscall.Kill(p.Pid(), syscall.SIGTERM))
	go func() { _, _ = io.Copy(io.Discard, reader) }()
	<-p.Done()
	if turns := l.turns(); p.Code() != 130 || len(turns) != 0 {
		t.Errorf("the caller ended with %d, and its command had devices: %v", p.Code(), turns)
	}
}

// writes reports whether a thread of a process waits in write(2) to a file descriptor.
func writes(pid, fd int) bool {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", pid))
	return slices.ContainsFunc(threads, func(path string) bool {
		call, _ := os.ReadFile(path)
		return strings.HasPrefix(string(call), fmt.Sprintf("%d %#x ", unix.SYS_WRITE, fd))
	})
}

// fillPipe fills a pipe, so that the next who writes to it waits.
func fillPipe(t *testing.T, writer *os.File) {
	t.Helper()
	fd := int(writer.Fd())
	testenv.Must(t, unix.SetNonblock(fd, true))
	for {
		_, err := unix.Write(fd, make([]byte, 1))
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		testenv.Must(t, err)
	}
	testenv.Must(t, unix.SetNonblock(fd, false))
}

// On a full disk callers wait, and the devices of those who end are free as soon as that can be written.
func TestLeasesOnAFullDisk(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	disk := filepath.Join(t.TempDir(), "disk")
	testenv.SmallDisk(t, disk, 0)
	l := newLeasing(t, "--state-dir", filepath.Join(disk, "state"))
	first, err := proc.Start(proc.Cmd{Args: l.args(7, time.Hour)}, l.log)
	testenv.Must(t, err)
	leases := func() int {
		list, err := l.leases.Leases(t.Context())
		testenv.Must(t, err)
		return len(list.Items)
	}
	l.await("the first has its devices", func() bool { return leases() == 1 })
	full := filepath.Join(disk, "full")
	fill(t, full)
	res, err := proc.Run(t.Context(), proc.Cmd{Args: l.args(1, 0, "--wait", "1s")})
	testenv.Must(t, err)
	if res.Code != 124 || !strings.Contains(res.Stderr, "no space left on device") {
		t.Errorf("one that cannot be recorded: %v", res)
	}
	fill(t, full) // what the failure has freed
	testenv.Must(t, first.Kill())
	l.await("the log says that devices are kept", func() bool {
		text, err := os.ReadFile(l.log.Name())
		return err == nil && strings.Contains(string(text), "cannot be given back yet")
	})
	if leases() != 1 {
		t.Error("what could not be written is not a lease any more")
	}
	testenv.Must(t, os.Remove(full))
	l.await("the devices are given back", func() bool { return leases() == 0 })
	l.checkFree()
}

// fill appends to a file until its disk is full.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	testenv.Must(t, err)
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 512))
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Fatal(err)
	}
}

// Users other than root lease if they are of the group, and nobody else does; nor do they anything else.
func TestWhoMayLease(t *testing.T) {
	t.Parallel()
	testenv.Command(t, "setpriv")
	const member, outsider, group = "12345", "12346", "54321"
	l := newLeasing(t, "--lease-group", group)
	as := func(user string, args ...string) proc.Result {
		t.Helper()
		groups := "--clear-groups"
		if user == member {
			groups = "--groups=" + group
		}
		res, err := proc.Run(t.Context(), proc.Cmd{
			Args: append([]string{"setpriv", "--reuid", user, "--regid", user, groups, "--"}, args...), Dir: "/",
		})
		testenv.Must(t, err)
		return res
	}
	verb := func(args ...string) []string { return append(l.args(1, 0)[:3:3], args...) }
	readable(t, l.args(1, 0))
	if res := as(member, l.args(2, 0)...); res.Code != 0 {
		t.Errorf("a member: %v", res)
	}
	const denied = "may not use the device manager"
	if res := as(outsider, l.args(2, 0)...); res.Code != 125 || !strings.Contains(res.Stderr, denied) {
		t.Errorf("an outsider: %v", res)
	}
	res := as(member, l.args(2, 0, "--allow-busy")...)
	if res.Code != 125 || !strings.Contains(res.Stderr, "--api-group") {
		t.Errorf("a member, with busy devices: %v", res)
	}
	for _, args := range [][]string{{"pods"}, {"node"}, {"release", "x"}} {
		if res := as(member, verb(args...)...); res.Code == 0 || !strings.Contains(res.Stderr, denied) {
			t.Errorf("a member, %s: %v", args, res)
		}
	}
	root, err := proc.Start(proc.Cmd{Args: l.args(1, time.Hour)}, l.log)
	testenv.Must(t, err)
	var id string
	l.await("root has a lease", func() bool {
		list, err := l.leases.Leases(t.Context())
		if err == nil && len(list.Items) == 1 {
			id = list.Items[0].ID
		}
		return id != ""
	})
	if res := as(member, verb("leases", "-o", "name")...); res.Stdout != id+"\n" {
		t.Errorf("a member's list: %v", res)
	}
	res = as(member, verb("lease", "end", id)...)
	if res.Code == 0 || !strings.Contains(res.Stderr, "belongs to another user") {
		t.Errorf("a member ends root's lease: %v", res)
	}
	proc.Must(t, 0, proc.Cmd{Args: verb("lease", "end", id)})
	<-root.Done()
	if root.Code() != 128+int(syscall.SIGTERM) {
		t.Errorf("root's command ended with %d", root.Code())
	}
	l.checkFree()
}

// readable lets other users execute the programs of a caller.
func readable(t *testing.T, args []string) {
	t.Helper()
	for _, arg := range args {
		if !filepath.IsAbs(arg) {
			continue
		}
		for dir := filepath.Dir(arg); dir != "/tmp" && strings.HasPrefix(dir, "/tmp/"); dir = filepath.Dir(dir) {
			testenv.Must(t, os.Chmod(dir, 0o755))
		}
	}
}
