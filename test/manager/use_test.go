package manager

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// seeProcesses has the plugin see the processes of this host, one of whose users is alice.
func (l *leasing) seeProcesses(alice int) {
	l.Helper()
	testenv.Must(l, l.plugin.Kill())
	l.await("the plugin has ended", func() bool { return l.allocatable(gpus) == 0 })
	procfs, driver := filepath.Join(l.node.Root(), "proc"), l.TempDir()
	mount := func(source, target, fstype string, flags uintptr) {
		l.Helper()
		testenv.Must(l, unix.Mount(source, target, fstype, flags, ""))
		l.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
	}
	mount(filepath.Join(procfs, "driver"), driver, "", unix.MS_BIND)
	mount("proc", procfs, "proc", 0)
	mount(driver, filepath.Join(procfs, "driver"), "", unix.MS_BIND)
	etc := filepath.Join(l.node.Root(), "etc")
	testenv.Must(l, os.MkdirAll(etc, 0o755),
		os.WriteFile(filepath.Join(etc, "passwd"), fmt.Appendf(nil, "alice:x:%d:%d::/:/bin/sh\n", alice, alice), 0o644))
	l.plug()
}

// use has a process of a user use a GPU.
func (l *leasing) use(gpu, user int) *proc.Process {
	l.Helper()
	p, err := proc.Start(proc.Cmd{
		Args: []string{"setpriv", "--reuid", strconv.Itoa(user), "--clear-groups", "--", "sleep", "1000"},
	}, l.log)
	testenv.Must(l, err)
	l.Cleanup(func() { _ = p.Kill() })
	l.await("the process runs as its user", func() bool {
		name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.Pid()))
		return err == nil && string(name) == "sleep\n"
	})
	testenv.Must(l, l.node.AddProcess(gpu, sim.Process{
		PID: p.Pid(), Type: sim.ComputeProcess, MemoryBytes: 1 << 30,
	}))
	return p
}

// adopt leases a GPU for a process that uses it.
func (l *leasing) adopt(p *proc.Process, gpu int) {
	l.Helper()
	proc.Must(l, 0, proc.Cmd{Args: append(l.args(1, 0)[:3:3],
		"lease", "adopt", "--wait", "1m", strconv.Itoa(p.Pid()), "--device", l.node.Machine().GPUs[gpu].UUID)})
}

// awaitBusy waits until exactly this process is shown to use a GPU without a lease, or none if the process is nil.
func (l *leasing) awaitBusy(gpu int, p *proc.Process) {
	l.Helper()
	l.await("the process that uses a GPU without a lease is shown", func() bool {
		list, err := l.leases.Leases(l.Context())
		if err != nil || p == nil {
			return err == nil && len(list.Busy) == 0
		}
		who := fmt.Sprintf("process %d (sleep, user alice, cgroup ", p.Pid())
		return len(list.Busy) == 1 && list.Busy[0].Device == l.node.Machine().GPUs[gpu].UUID &&
			strings.HasPrefix(list.Busy[0].Reason, who)
	})
}

// A GPU that a process uses without a lease is shown with the process before anybody asks, and is given to nobody but
// to that process. When the process has ended, a request that waits gets the GPU.
func TestAGPUThatIsUsedWithoutALease(t *testing.T) {
	t.Parallel()
	testenv.Command(t, "setpriv")
	const alice, used = 12347, 3
	l := newLeasing(t)
	l.seeProcesses(alice)
	keeper := l.use(0, 0)
	l.adopt(keeper, 0)
	foreign := l.use(used, alice)
	l.awaitBusy(used, foreign)
	table := proc.Must(t, 0, proc.Cmd{Args: append(l.args(1, 0)[:3:3], "leases")}).Stdout
	if who := fmt.Sprintf("process %d (sleep, user alice, ", foreign.Pid()); !strings.Contains(table, who) {
		t.Errorf("%q is not in:\n%s", who, table)
	}

	all, err := proc.Start(proc.Cmd{Args: l.args(8, 0)}, l.log)
	testenv.Must(t, err)
	l.await("a request for all knows why it waits", func() bool {
		list, err := l.leases.Leases(t.Context())
		return err == nil && len(list.Waiting) == 1 &&
			strings.Contains(list.Waiting[0].Reason, fmt.Sprintf("is left out: process %d (sleep, user alice", foreign.Pid()))
	})
	proc.Must(t, 0, proc.Cmd{Args: l.args(6, 0, "--wait", "1m")})
	busyToo := l.args(7, 0, "--wait", "1m", "--allow-busy")
	busyToo = append(busyToo[:slices.Index(busyToo, "--")+1], "printenv", "CUDA_VISIBLE_DEVICES")
	taken := proc.Must(t, 0, proc.Cmd{Args: busyToo})
	if !strings.Contains(taken.Stdout, l.node.Machine().GPUs[used].UUID) {
		t.Errorf("root has not got the GPU that is in use: %v", taken)
	}

	l.await("the last lease has ended", func() bool { return len(l.list()) == 1 })
	l.awaitBusy(used, foreign)
	l.adopt(foreign, used)
	l.awaitBusy(used, nil)
	if list := l.list(); len(list) != 2 {
		t.Errorf("the leases are %+v", list)
	}
	testenv.Must(t, foreign.Kill())
	l.await("the lease of the process has ended", func() bool { return len(l.list()) == 1 })
	again := l.use(used, alice)
	l.awaitBusy(used, again)
	testenv.Must(t, keeper.Kill())
	l.await("only that GPU is not free", func() bool { return len(l.list()) == 0 })
	testenv.Must(t, again.Kill())
	select {
	case <-all.Done():
	case <-time.After(time.Minute):
		t.Fatal("the request for all still waits")
	}
	if all.Code() != 0 {
		t.Errorf("the request for all ended with %d", all.Code())
	}
	l.checkFree()
}

func (l *leasing) list() []lease.Lease {
	l.Helper()
	list, err := l.leases.Leases(l.Context())
	testenv.Must(l, err)
	return list.Items
}
