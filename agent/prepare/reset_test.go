package prepare

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
	testimage "gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestReset(t *testing.T) {
	cleaned := []string{"restore exclusive=false"}
	release := append(cleaned[:1:1], "released true")
	try := []string{"released true", "reset", "released false"}
	for name, c := range map[string]struct {
		outcomes   []Outcome
		persistent bool
		strict     bool
		limit      time.Duration
		releases   int // how often the driver can be closed, if that is limited
		result     Result
		err        string
		calls      []string
	}{
		"it works": {
			outcomes: []Outcome{ResetDone}, result: OK,
			calls: append(release[:2:2], "reset", "released false", "was reset"),
		},
		"persistence mode is off meanwhile": {
			outcomes: []Outcome{ResetDone}, persistent: true, result: OK,
			calls: []string{
				cleaned[0], "persistence false", "released true", "reset", "released false", "was reset",
				"persistence true",
			},
		},
		"persistence mode is on again after a failure": {
			outcomes: []Outcome{ResetFailed}, persistent: true, result: Failed, err: "(reset): it broke",
			calls: []string{
				cleaned[0], "persistence false", "released true", "reset", "released false", "persistence true",
			},
		},
		"the GPU is busy at first": {
			outcomes: []Outcome{ResetBusy, ResetBusy, ResetDone}, result: OK,
			calls: slices.Concat(cleaned, try, try, try, []string{"was reset"}),
		},
		"the GPU stays busy until the deadline": {
			outcomes: []Outcome{ResetBusy}, limit: 500 * time.Millisecond, result: Failed,
			err:   "(reset): in use by another client",
			calls: slices.Concat(cleaned, try, try), // the next one would begin after the deadline
		},
		"the GPU is busy, and the driver cannot be closed for the next try": {
			outcomes: []Outcome{ResetBusy}, limit: time.Second, releases: 1, result: Failed,
			err:   "(reset): in use by another client",
			calls: slices.Concat(cleaned, try, []string{"released false"}),
		},
		"not supported": {
			outcomes: []Outcome{ResetNotSupported}, result: Skipped,
			calls: append(release[:2:2], "reset", "released false"),
		},
		"not supported, and strict": {
			outcomes: []Outcome{ResetNotSupported}, strict: true, result: Failed,
			err:   "(reset): the GPU must be reset and cannot be: Not Supported",
			calls: append(release[:2:2], "reset", "released false"),
		},
		"refused": {
			outcomes: []Outcome{ResetRefused}, result: Skipped,
			calls: append(release[:2:2], "reset", "released false"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeNode{persistent: c.persistent, releases: c.releases}
				r := newRunner(t, f)
				r.opts.Resetter = &fakeReset{node: f, outcomes: c.outcomes}
				if c.limit == 0 {
					c.limit = 20 * time.Second
				}
				rec, err := runOne(r, within(t, c.limit), device, Rules{Policy: Reset, Strict: c.strict})
				checkError(t, err, c.err)
				r.Wait(t.Context())
				if last := resetStep(rec); last.Result != c.result {
					t.Errorf("the last step is %+v", last)
				}
				if diff := cmp.Diff(c.calls, f.log); diff != "" {
					t.Errorf("calls (-want +got):\n%s", diff)
				}
				if f.released || f.persistent != c.persistent {
					t.Errorf("afterwards released %t, persistent %t", f.released, f.persistent)
				}
			})
		})
	}
}

func resetStep(rec Record) Step {
	for _, s := range rec.Steps {
		if s.Name == "reset" {
			return s
		}
	}
	return Step{}
}

func TestResetThatIsNotSupportedIsRemembered(t *testing.T) {
	f := &fakeNode{}
	reset := &fakeReset{node: f, outcomes: []Outcome{ResetNotSupported}}
	r := newRunner(t, f)
	r.opts.Resetter = reset
	for _, c := range []struct {
		strict bool
		calls  int
		note   string
	}{
		{false, 1, "not reset: Not Supported"},
		{false, 1, "not reset: Not Supported (found by an earlier reset)"},
		{true, 1, "the GPU must be reset and cannot be: Not Supported (found by an earlier reset)"},
	} {
		rec, err := runOne(r, t.Context(), device, Rules{Policy: Reset, Strict: c.strict})
		last := rec.Steps[len(rec.Steps)-1]
		if (err != nil) != c.strict || reset.calls != c.calls || last.Note != c.note {
			t.Errorf("%+v: error %v, %d resets, step %+v", c, err, reset.calls, last)
		}
	}
}

// A GPU that does not come back is not given away, nor is one whose driver could not be released reset.
func TestAfterReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{}
		r := newRunner(t, f)
		r.opts.Resetter = &fakeReset{node: f, outcomes: []Outcome{ResetDone}}
		r.opts.State = &unhealthyAfterReset{fakeNode: f}
		_, err := runOne(r, within(t, time.Second), device, Rules{Policy: Reset})
		checkError(t, err, "(reset): after the reset: lost")
	})
}

// A GPU is reset although it is unhealthy, if that may heal it and the reset is due.
func TestUnhealthyGPU(t *testing.T) {
	const why = "it is unhealthy: XID 95"
	heals := &NeedsResetError{Err: errors.New(why)}
	part := device
	part.UUID = "MIG-1"
	for name, c := range map[string]struct {
		device  Device
		policy  Policy
		err     error
		outcome Outcome
		want    string
	}{
		"a reset heals it":      {device, Reset, heals, ResetDone, ""},
		"it needs more":         {device, Reset, errors.New(why), ResetDone, "(health): " + why},
		"it is not to be reset": {device, Clean, heals, ResetDone, "(health): " + why},
		"a part of a GPU":       {part, Reset, heals, ResetDone, "(health): " + why},
		"it cannot be reset": {
			device, Reset, heals, ResetNotSupported, "(reset): " + why + ", and the GPU cannot be reset",
		},
		"nothing is asked about it": {device, None, heals, ResetDone, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeNode{healthErr: c.err}
			r := newRunner(t, f)
			r.opts.Resetter = &fakeReset{node: f, outcomes: []Outcome{c.outcome}}
			r.opts.State = &healthyAfterReset{fakeNode: f}
			rec, err := runOne(r, within(t, plenty), c.device, Rules{Policy: c.policy})
			checkError(t, err, c.want)
			if c.want == "" && c.policy == Reset && rec.Steps[1].Note != why {
				t.Errorf("steps %+v", rec.Steps)
			}
		})
	}
}

// A driver that refuses the steps before a reset asks for the reset, unless there is none.
func TestResetThatTheDriverRequires(t *testing.T) {
	const why = "read what uses it: the GPU requires a reset"
	for name, c := range map[string]struct {
		policy  Policy
		outcome Outcome
		want    string
	}{
		"it is reset":             {Reset, ResetDone, ""},
		"it is not to be reset":   {Clean, ResetDone, "(processes): " + why},
		"it cannot be reset":      {Reset, ResetNotSupported, "(reset): " + why + ", and the GPU cannot be reset"},
		"the reset does not help": {Reset, ResetDone, "(memory): " + why},
	} {
		t.Run(name, func(t *testing.T) {
			f := &fakeNode{useErr: fmt.Errorf("read what uses it: %w", gpu.ErrResetRequired)}
			r := newRunner(t, f)
			r.opts.Resetter = &fakeReset{node: f, outcomes: []Outcome{c.outcome}}
			if c.want == "" {
				r.opts.State = &readableAfterReset{f}
			}
			_, err := runOne(r, within(t, plenty), device, Rules{Policy: c.policy})
			checkError(t, err, c.want)
		})
	}
}

type readableAfterReset struct{ *fakeNode }

func (r *readableAfterReset) WasReset(string) { r.useErr = nil }

type healthyAfterReset struct{ *fakeNode }

func (h *healthyAfterReset) WasReset(string) { h.healthErr = nil }

type unhealthyAfterReset struct{ *fakeNode }

func (u *unhealthyAfterReset) WasReset(string) { u.healthErr = errors.New("lost") }

func TestBusyGPUNamesWhoHasItOpen(t *testing.T) {
	h := realHost(t)
	node := filepath.Join(t.TempDir(), "nvidia0")
	cmd := exec.Command("sleep", "1000")
	cmd.ExtraFiles = []*os.File{makeNode(t, node)}
	testenv.Must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	f := &fakeNode{}
	r := newRunner(t, f)
	r.opts.Resetter = &fakeReset{node: f, outcomes: []Outcome{ResetBusy}}
	d := device
	d.Nodes = []string{node}
	other := fmt.Sprintf("process %d (sleep, ", cmd.Process.Pid)
	if users, err := openers(t.Context(), h, d.Nodes, thisProgram); err != nil || len(users) != 1 ||
		!strings.HasPrefix(users[0], other) {
		t.Errorf("open in %v, error %v", users, err)
	}
	_, err := runOne(r, within(t, plenty), d, Rules{Policy: Reset})
	checkError(t, err, "(reset): "+other)
	checkError(t, err, "has the GPU open, so it cannot be reset: end it")
	if diff := cmp.Diff([]string{"restore exclusive=false"}, f.log); diff != "" {
		t.Errorf("other GPUs are disturbed (-want +got):\n%s", diff)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	synctest.Test(t, func(t *testing.T) {
		_, err := runOne(r, within(t, time.Second), d, Rules{Policy: Reset})
		const want = "in use by another client: process %d (this program) has the GPU open: end it"
		checkError(t, err, fmt.Sprintf(want, os.Getpid()))
	})
}

// What others than root can do does not keep a GPU from its reset: a file with the path of its node in a mount
// namespace of one's own, and the node opened by O_PATH, which needs no right to it.
func TestOnlyAnOpenDeviceHoldsTheGPU(t *testing.T) {
	h := realHost(t)
	dir := t.TempDir()
	node := filepath.Join(dir, "nvidia0")
	_ = makeNode(t, node).Close()
	held := func() []string {
		users, err := openers(t.Context(), h, []string{node}, thisProgram)
		testenv.Must(t, err)
		return users
	}
	file := start(t, "", &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS},
		"sh", "-c", fmt.Sprintf("mount -t tmpfs none %s && echo > %s && exec sleep 1000 < %[2]s", dir, node))
	testenv.Eventually(t, "the shell opens its file", func() bool { return hasOpen(file.Process.Pid, 0, node) })
	hold := func(flags int) {
		fd, err := unix.Open(node, flags, 0)
		testenv.Must(t, err)
		f := os.NewFile(uintptr(fd), node)
		defer f.Close()
		cmd := exec.Command("sleep", "1000")
		cmd.ExtraFiles = []*os.File{f}
		testenv.Must(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	}
	hold(unix.O_PATH)
	if users := held(); len(users) > 0 {
		t.Errorf("the GPU is held by %v", users)
	}
	hold(unix.O_RDONLY)
	if users := held(); len(users) != 1 {
		t.Errorf("an open node: the GPU is held by %v", users)
	}
	if _, err := openers(within(t, 0), h, []string{node}, skipNone); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("after the deadline: %v", err)
	}
}

func hasOpen(pid, fd int, path string) bool {
	target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, fd))
	return target == path
}

// makeNode makes a device node that no process has open, that of /dev/full, and opens it.
func makeNode(t testing.TB, path string) *os.File {
	t.Helper()
	testenv.Root(t)
	testenv.Must(t, unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 7))))
	f, err := os.Open(path)
	if err != nil {
		testenv.Skip(t, "needs to open device nodes: "+err.Error())
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestSMI(t *testing.T) {
	const all = `[ "$*" = "--gpu-reset -i 0000:17:00.0" ] || exit 9; `
	for name, c := range map[string]struct {
		script string
		want   Outcome
		err    string
	}{
		"done": {
			all + "echo 'GPU 00000000:17:00.0 was successfully reset.'; echo 'All done.'", ResetDone, "",
		},
		"done, in other words": {all + "echo 'GPU was re-initialised.'", ResetDone, ""},
		"NVLink is only mentioned": {
			all + "echo 'GPU X was successfully reset. NVLinks are being trained'", ResetDone, "",
		},
		"in use": {
			all + `printf 'The following GPUs could not be reset:\n  GPU 00000000:17:00.0: In use by another client\n` +
				`\n1 device is currently being used by one or more other processes (e.g. Fabric Manager, ...).'; ` +
				`exit 255`, ResetBusy, "nvidia-smi: GPU 00000000:17:00.0: In use by another client",
		},
		"in use, with an old driver": {
			"echo 'GPU 00000000:17:00.0 is currently in use by another process.'; exit 255",
			ResetBusy, "in use by another process",
		},
		"in use, but status 0": {
			"echo 'GPU 00000000:17:00.0 is currently in use by another process.'",
			ResetBusy, "in use by another process",
		},
		"not supported": {
			`printf 'The following GPUs could not be reset:\n  GPU 00000000:17:00.0: Not Supported\n'; exit 255`,
			ResetNotSupported, "nvidia-smi: GPU 00000000:17:00.0: Not Supported",
		},
		"not supported, with a status and no message": {"exit 3", ResetNotSupported, "nvidia-smi ended with status 3"},
		"the primary GPU": {
			`echo "GPU Reset couldn't run because GPU 00000000:17:00.0 is the primary GPU."; exit 255`,
			ResetRefused, "is the primary GPU",
		},
		"linked to others": {
			"echo 'All GPUs that are connected by NVLink must be reset together.' >&2; exit 255",
			ResetRefused, "NVLink",
		},
		"no permission": {
			"echo 'Unable to reset: Insufficient Permissions' >&2; exit 4", ResetFailed,
			"nvidia-smi ended with status 4: Unable to reset: Insufficient Permissions",
		},
		"its environment is its own": {
			`env | cut -d= -f1 | sort | tr '\n' ' '; exit 7`,
			ResetFailed, "status 7: LC_ALL PATH PWD", // the shell adds PWD
		},
		"too much output": {"yes | head -c 10000000; exit 255", ResetFailed, "ended with status 255: y y"},
		"killed":          {"kill -9 $$", ResetFailed, "ended with status -1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := smiReset(t, c.script)
			got, err := resetOne(r, within(t, plenty), device)
			if got != c.want {
				t.Errorf("outcome %d, want %d", got, c.want)
			}
			checkError(t, err, c.err)
		})
	}
}

// resetOne resets one GPU.
func resetOne(r *DriverReset, ctx context.Context, d Device) (Outcome, error) { //nolint:revive // as Reset
	result := r.Reset(ctx, []Device{d})[0]
	return result.Outcome, result.Err
}

// writeScript writes a shell script.
func writeScript(t testing.TB, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "program")
	testenv.WriteProgram(t, path, []byte("#!/bin/sh\n"+text+"\n"))
	return path
}

func accept(string) error { return nil }

func smiReset(t testing.TB, script string) *DriverReset {
	t.Helper()
	path := writeScript(t, script)
	return &DriverReset{
		Host: realHost(t), Check: accept,
		Find: func() (Program, bool) { return Program{Path: path}, true },
	}
}

// What started serve may have left files open for it.
func TestProgramsInheritNoFiles(t *testing.T) {
	fd, err := unix.Open("/dev/full", unix.O_RDONLY, 0) // in a way in which programs inherit it
	testenv.Must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	p := Program{Path: writeScript(t, "readlink /proc/self/fd/*")}
	output, _, err := p.Run(t.Context(), accept)
	testenv.Must(t, err)
	if !strings.Contains(output, "/dev/null") || strings.Contains(output, "/dev/full") {
		t.Errorf("the program has open %q", output)
	}
}

// A root may have only the driver: a simulated node, or the directory of an installer for container hosts. A program
// that needs a dynamic loader cannot run in it.
func TestAProgramWhoseRootHasNoLoader(t *testing.T) {
	testenv.Root(t)
	root := t.TempDir()
	testenv.Must(t, os.MkdirAll(filepath.Join(root, "usr/bin"), 0o755))
	testimage.CopyFile(t, testenv.Command(t, "env"), filepath.Join(root, "usr/bin/env"))
	library := filepath.Join(root, "usr/lib/libnvidia-ml.so.1")
	var checked []string
	check := func(path string) error { checked = append(checked, path); return nil }
	p := Program{Path: "/usr/bin/env", Root: root, Env: []string{"A=b"}, Library: library}
	output, status, err := p.Run(t.Context(), check)
	testenv.Must(t, err)
	lines := strings.Split(output, "\n")
	for _, want := range []string{"LD_LIBRARY_PATH=" + filepath.Dir(library), "A=b"} {
		if !slices.Contains(lines, want) || status != 0 {
			t.Errorf("status %d, environment %q, want %s", status, lines, want)
		}
	}
	program := filepath.Join(root, "usr/bin/env")
	if diff := cmp.Diff([]string{program, library, program}, checked); diff != "" {
		t.Errorf("checked (-want +got):\n%s", diff)
	}
	p.Library = ""
	if _, _, err := p.Run(t.Context(), check); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a library: %v", err)
	}
	p.Library = library
	refuse := func(path string) error {
		if path == library {
			return errors.New("others can change it")
		}
		return nil
	}
	if output, _, err := p.Run(t.Context(), refuse); err == nil || output != "" {
		t.Errorf("with a library that others can change: %q, %v", output, err)
	}
}

// The GPUs of a container are reset by one nvidia-smi, and each gets its own answer.
func TestSMIOfSeveralGPUs(t *testing.T) {
	r := smiReset(t, `echo "$3" >>$0.log
echo 'GPU 00000000:17:00.0 was successfully reset.'
echo 'The following GPUs could not be reset:'
echo '  GPU 00000000:18:00.0: In use by another client'
echo '  GPU 00000000:19:00.0: Not Supported'
echo '  GPU 00000000:1A:00.0: Unknown Error'
echo
echo '1 device is currently being used by one or more other processes (e.g., Fabric Manager).'
exit 255`)
	want := map[string]Outcome{
		"0000:17:00.0": ResetDone, "0000:18:00.0": ResetBusy, "00000000:19:00.0": ResetNotSupported,
		"0000:1a:00.0": ResetFailed, "0001:17:00.0": ResetBusy, // which has no line of its own
	}
	var gpus []Device
	for address := range want {
		gpus = append(gpus, Device{GPU: "GPU-" + address, PCIBusID: address})
	}
	for i, got := range r.Reset(t.Context(), gpus) {
		if address := gpus[i].PCIBusID; got.Outcome != want[address] {
			t.Errorf("%s: outcome %d, want %d", address, got.Outcome, want[address])
		}
	}
	path, _ := r.Find()
	log, err := os.ReadFile(path.Path + ".log")
	if err != nil || strings.Count(string(log), "\n") != 1 || strings.Count(string(log), ",") != len(want)-1 {
		t.Errorf("runs: %q, error %v", log, err)
	}
	got, err := resetOne(r, t.Context(), Device{GPU: "GPU", PCIBusID: "0000:17:00"})
	if got != ResetFailed {
		t.Errorf("an address that is none: outcome %d", got)
	}
	checkError(t, err, `the GPU's PCI address "0000:17:00" is invalid`)
}

func TestSMIOfOthersIsNotRun(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "ran")
	r := smiReset(t, "touch "+mark)
	r.Check = nil
	path, _ := r.Find()
	testenv.Must(t, os.Chmod(path.Path, 0o777))
	got, err := resetOne(r, t.Context(), device)
	if got != ResetFailed {
		t.Errorf("outcome %d", got)
	}
	checkError(t, err, "others can change it")
	if _, err := os.Stat(mark); err == nil {
		t.Error("it ran")
	}
}

// A reset that takes longer than its request is not interrupted, and no container gets the GPU or a part of it before
// it has ended, whatever the policy is.
func TestAbandonedReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{persistent: true}
		r := newRunner(t, f)
		reset := &fakeReset{node: f, outcomes: []Outcome{ResetDone}, ends: make(chan struct{})}
		r.opts.Resetter = reset
		other := devices(1)[0]
		_, err := r.Run(within(t, 10*time.Second), []Device{device, other}, Rules{Policy: Reset})
		const (
			still = "the reset that began at 2000-01-01T00:00:00Z"
			late  = " is not ready for a container (reset): " + still
		)
		checkError(t, err, uuid+late)
		checkError(t, err, other.UUID+late)
		part := device
		part.UUID = "MIG-1"
		for _, d := range []Device{device, part, other} {
			refused := time.Now()
			_, err := runOne(r, within(t, time.Second), d, Rules{Policy: None})
			checkError(t, err, "(wait): "+still)
			if took := time.Since(refused); took > 0 {
				t.Errorf("refused after %s", took)
			}
		}
		_, err = runOne(r, within(t, time.Second), Device{UUID: "GPU-9", GPU: "GPU-9"}, Rules{Policy: Check})
		checkError(t, err, "")
		if f.persistent {
			t.Error("the GPU's persistence mode is set while it is reset")
		}
		ended := within(t, time.Second)
		if r.Wait(ended); ended.Err() != nil {
			t.Error("the end of this program waits for the reset")
		}
		const hold = ": held for a reset that has not ended, since 2000-01-01T00:00:00Z"
		for _, gpu := range []string{device.GPU, other.GPU} {
			if !slices.Contains(f.log, "hold "+gpu+hold) {
				t.Errorf("%s is not held: %v", gpu, f.log)
			}
		}
		if slices.Contains(f.log, "end of the hold") {
			t.Error("a hold ended before the reset")
		}
		close(reset.ends)
		synctest.Wait()
		if n := strings.Count(strings.Join(f.log, "; "), "end of the hold"); n != 2 {
			t.Errorf("%d holds ended, want 2: %v", n, f.log)
		}
		if !f.persistent || f.released {
			t.Errorf("after the reset: persistence mode %t, released %t", f.persistent, f.released)
		}
		_, err = runOne(r, within(t, time.Second), device, Rules{Policy: Reset})
		checkError(t, err, "")
	})
}

// A request that is canceled, as when the program ends, does not interrupt the reset either.
func TestCanceledReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fakeNode{persistent: true}
		r := newRunner(t, f)
		r.opts.Resetter = &fakeReset{node: f, outcomes: []Outcome{ResetDone}, takes: 5 * time.Second}
		ctx, cancel := context.WithCancel(within(t, 20*time.Second))
		time.AfterFunc(time.Second, cancel)
		_, err := runOne(r, ctx, device, Rules{Policy: Reset})
		checkError(t, err, "(reset): the step has not returned in time: context canceled")
		r.Wait(t.Context())
		want := []string{
			"restore exclusive=false", "persistence false", "released true", "reset", "released false", "was reset",
			"persistence true",
		}
		if diff := cmp.Diff(want, f.log); diff != "" {
			t.Errorf("calls (-want +got):\n%s", diff)
		}
	})
}

// The deadline of a reset does not end nvidia-smi.
func TestAbandonedSMI(t *testing.T) {
	r := smiReset(t, "while [ ! -e $0.go ]; do sleep 0.05; done; echo 'GPU 00000000:17:00.0 was successfully reset.'")
	ctx, cancel := context.WithCancel(within(t, 50*time.Millisecond))
	cancel()
	_, err := resetOne(r, ctx, device)
	checkError(t, err, "context canceled")
	_, err = resetOne(r, within(t, 50*time.Millisecond), device)
	checkError(t, err, " has not ended; containers do not get the GPU before it has ended")
	const still = "nvidia-smi still resets " + uuid + " (0000:17:00.0), since "
	checkError(t, r.Ready(), still)
	_, again := resetOne(r, within(t, plenty), device)
	checkError(t, again, still)
	program, _ := r.Find()
	testenv.Must(t, os.WriteFile(program.Path+".go", nil, 0o600))
	abandoned, ok := errors.AsType[*AbandonedError](err)
	if !ok {
		t.Fatal(err)
	}
	if result := abandoned.Wait(t.Context()); result.Outcome != ResetDone || r.Ready() != nil {
		t.Errorf("after its end: %+v, error %v", result, r.Ready())
	}
}

// notReopened is a driver that cannot be reopened in time.
type notReopened struct{ *fakeNode }

func (n notReopened) Reopen(ctx context.Context) error {
	return errors.Join(n.fakeNode.Reopen(ctx), errors.New("does not answer"))
}

// A reset counts also if it ended too late for its container or command, or if the driver could not be reopened in
// time: the GPU is not reset again for the next try.
func TestAResetThatIsTooLateCounts(t *testing.T) {
	container := func(t *testing.T, r *Runner) error {
		t.Helper()
		_, err := runOne(r, within(t, 10*time.Second), device, Rules{Policy: Reset})
		return err
	}
	for name, c := range map[string]struct {
		begin func(*testing.T, *Runner) error
		late  bool
		err   string
	}{
		"it takes too long for a container": {container, true, "(reset): the reset that began at "},
		"it takes too long for an administrator": {
			func(t *testing.T, r *Runner) error {
				t.Helper()
				return r.Reset(within(t, 10*time.Second), device, func(context.Context, string) error { return nil })
			}, true, "the reset that began at ",
		},
		"the driver is not reopened in time": {container, false, "(reset): after the reset: the library is closed"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeNode{}
				r := newRunner(t, f)
				reset := &fakeReset{node: f, outcomes: []Outcome{ResetDone}}
				r.opts.Resetter = reset
				if c.late {
					reset.ends = make(chan struct{})
				} else {
					r.opts.Driver, f.healthErr = notReopened{f}, &NeedsResetError{errors.New("the library is closed")}
				}
				checkError(t, c.begin(t, r), c.err)
				if c.late {
					close(reset.ends)
				}
				synctest.Wait()
				r.opts.Driver, f.healthErr = f, nil
				if _, err := r.FindUse(within(t, time.Second), device, Rules{Policy: Reset}); err != nil {
					t.Error(err)
				}
				if n := strings.Count(strings.Join(f.log, "; "), "was reset"); n != 1 {
					t.Errorf("it was reset %d times for the node: %v", n, f.log)
				}
				for i, want := range []string{"it was already reset, and no container has had it since", ""} {
					rec, err := runOne(r, within(t, time.Second), device, Rules{Policy: Reset})
					checkError(t, err, "")
					if note := resetStep(rec).Note; note != want || reset.calls != i+1 {
						t.Errorf("the note on the reset is %q, want %q; %d resets", note, want, reset.calls)
					}
				}
			})
		})
	}
}

// A reset that was too late does not count any more after another container, after long, or if the GPU needs another
// one.
func TestAnotherResetAfterOneThatWasTooLate(t *testing.T) {
	for name, between := range map[string]func(*testing.T, *Runner, *fakeNode){
		"after another container": func(t *testing.T, r *Runner, _ *fakeNode) {
			t.Helper()
			_, err := runOne(r, within(t, time.Second), device, Rules{Policy: None})
			checkError(t, err, "")
		},
		"after a container with a part of it": func(t *testing.T, r *Runner, _ *fakeNode) {
			t.Helper()
			part := device
			part.UUID = "MIG-1"
			_, err := runOne(r, within(t, time.Second), part, Rules{Policy: Check})
			checkError(t, err, "")
		},
		"after long": func(_ *testing.T, r *Runner, _ *fakeNode) {
			r.unusedResets[uuid] = r.unusedResets[uuid].Add(-unusedResetLimit)
		},
		"memory is in use": func(_ *testing.T, _ *Runner, f *fakeNode) {
			f.set(gpu.Use{MemoryUsed: DefaultMemoryTolerance + 1})
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeNode{}
				r := newRunner(t, f)
				reset := &fakeReset{node: f, outcomes: []Outcome{ResetDone}}
				r.opts.Resetter = reset
				f.healthErr = &NeedsResetError{errors.New("lost")}
				rules := Rules{Policy: Reset, MemoryTolerance: DefaultMemoryTolerance}
				_, err := runOne(r, within(t, time.Second), device, rules)
				checkError(t, err, "(reset): after the reset: lost")
				f.healthErr = nil
				between(t, r, f)
				_, _ = runOne(r, within(t, time.Second), device, rules)
				if reset.calls != 2 {
					t.Errorf("%d resets, want 2", reset.calls)
				}
			})
		})
	}
}

// That persistence mode stays off is logged, also when the record of the reset was returned long ago.
func TestPersistenceModeThatStaysOffIsLogged(t *testing.T) {
	for name, abandoned := range map[string]bool{"at once": false, "after an abandoned reset": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeNode{persistent: true, persistErr: errors.New("Unknown\nError")}
				r := newRunner(t, f)
				var log testenv.Log
				r.opts.Log = slog.New(slog.NewTextHandler(&log, nil))
				reset := &fakeReset{node: f, outcomes: []Outcome{ResetDone}}
				if abandoned {
					reset.ends = make(chan struct{})
				}
				r.opts.Resetter = reset
				_, err := runOne(r, within(t, time.Second), device, Rules{Policy: Reset})
				if abandoned {
					checkError(t, err, "the reset that began at ")
					close(reset.ends)
				}
				synctest.Wait()
				if want := "persistence mode of " + uuid + " was switched off"; !strings.Contains(log.String(), want) ||
					!strings.Contains(log.String(), ": Unknown Error") {
					t.Errorf("the log is %q", &log)
				}
			})
		})
	}
}

// An nvidia-smi that hangs is killed at last.
func TestHangingSMI(t *testing.T) {
	r := smiReset(t, "sleep 1000 & sleep 1000")
	program, _ := r.Find()
	program.Timeout = 200 * time.Millisecond
	r.Find = func() (Program, bool) { return program, true }
	_, err := resetOne(r, within(t, plenty), device)
	checkError(t, err, "killed, since it took too long")
}

// The driver is not closed for a reset that cannot begin.
func TestNoResetBesideAnAbandonedOne(t *testing.T) {
	f := &fakeNode{}
	r := newRunner(t, f)
	reset := smiReset(t, "true")
	r.opts.Resetter = reset
	reset.setRunning("0000:18:00.0")
	if err := reset.Ready(); err != nil {
		t.Errorf("while it is waited for: %v", err)
	}
	reset.setAbandoned()
	_, err := runOne(r, within(t, plenty), device, Rules{Policy: Reset})
	checkError(t, err, "(reset): nvidia-smi still resets 0000:18:00.0")
	if slices.Contains(f.log, "released true") {
		t.Errorf("calls %v", f.log)
	}
}

// An nvidia-smi that outlived the process that started it keeps all GPUs from being reset until it has ended.
func TestSMIOfAnEarlierProcess(t *testing.T) {
	const other = "GPU-8f6c3a1e-0000-4000-8000-000000000002"
	r := smiReset(t, `[ "$(readlink /proc/$$/fd/3)" = "${0%program}locks/`+uuid+`" ] || exit 7
[ "$(readlink /proc/$$/fd/1)" = "/memfd:program (deleted)" ] || exit 8 # a pipe would end with the other process
echo 'GPU 00000000:17:00.0 was successfully reset.'
exit 9`)
	program, _ := r.Find()
	r.LockDir = filepath.Join(filepath.Dir(program.Path), "locks")
	if got, err := resetOne(r, within(t, plenty), device); got != ResetDone { // without a directory
		t.Fatalf("outcome %d, error %v", got, err)
	}
	l, err := fileio.AcquireLock(filepath.Join(r.LockDir, other))
	testenv.Must(t, err)
	if uuids, err := r.StillResetting(); err != nil || !slices.Equal(uuids, []string{other}) {
		t.Errorf("%v, %v, want %s", uuids, err, other)
	}
	checkError(t, r.Ready(), "nvidia-smi still resets "+other)
	_, err = resetOne(r, within(t, plenty), device)
	checkError(t, err, "nvidia-smi still resets "+other)
	testenv.Must(t, l.Release())
	if uuids, err := r.StillResetting(); err != nil || len(uuids) > 0 {
		t.Errorf("after its end: %v, %v", uuids, err)
	}
	if got, err := resetOne(r, within(t, plenty), device); got != ResetDone {
		t.Errorf("after its end: outcome %d, error %v", got, err)
	}
	r.setRunning("0000:17:00.0") // its own locks
	if err := r.Ready(); err != nil {
		t.Errorf("while its own nvidia-smi runs: %v", err)
	}
}

func TestPCIReset(t *testing.T) {
	realHost(t)
	const node, none = "nvidia0", ""
	for name, c := range map[string]struct {
		files map[string]string
		open  bool
		node  string // in /dev
		want  Outcome
		err   string
	}{
		"it works": {map[string]string{"reset": "", "boot_vga": "0\n"}, false, node, ResetDone, ""},
		"no file":  {nil, false, node, ResetNotSupported, "the PCI device has no reset"},
		"the primary GPU": {
			map[string]string{"reset": "", "boot_vga": "1\n"}, false, node, ResetRefused, "primary",
		},
		"a process has it":      {map[string]string{"reset": ""}, true, node, ResetBusy, "the GPU is in use"},
		"its nodes are unknown": {map[string]string{"reset": ""}, false, none, ResetFailed, "unknown"},
		"its node is missing":   {map[string]string{"reset": ""}, false, "nvidia-1", ResetFailed, "nvidia-1: no such"},
		"its node is a file":    {map[string]string{"reset": ""}, false, "file", ResetFailed, "is not a device node"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			h, err := host.New(root, "", "")
			testenv.Must(t, err)
			dir := h.Sys("bus/pci/devices", device.PCIBusID)
			for _, d := range []string{dir, h.Dev()} {
				testenv.Must(t, os.MkdirAll(d, 0o755))
			}
			testenv.Must(t, os.Symlink("/proc", h.Proc()))
			for file, text := range c.files {
				testenv.Must(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600))
			}
			d := device
			testenv.Must(t, os.WriteFile(h.Dev("file"), nil, 0o600))
			if node := makeNode(t, h.Dev("nvidia0")); !c.open {
				_ = node.Close()
			}
			if c.node != none {
				d.Nodes = []string{h.Dev(c.node)}
			}
			r := &DriverReset{Host: h, Find: func() (Program, bool) { return Program{}, false }}
			got, err := resetOne(r, t.Context(), d)
			checkError(t, err, c.err)
			written, _ := os.ReadFile(filepath.Join(dir, "reset"))
			if got != c.want || (string(written) == "1") != (c.want == ResetDone) {
				t.Errorf("outcome %d, want %d; written %q", got, c.want, written)
			}
		})
	}
	d := device
	d.Nodes = []string{"/dev/nvidia0"}
	r := &DriverReset{Host: fakeProc(t), Find: func() (Program, bool) { return Program{}, false }}
	if got, err := resetOne(r, t.Context(), d); got != ResetFailed || !errors.Is(err, proc.ErrNotHost) {
		t.Errorf("where other processes cannot be seen: outcome %d, error %v", got, err)
	}
}

func TestExec(t *testing.T) {
	for name, c := range map[string]struct {
		script string
		policy Policy
		check  func(string) error
		note   string
		err    string
	}{
		"it passes, with the device in its environment": {
			script: `echo "$GPU_DEVICE_UUID $GPU_PCI_BUS_ID $GPU_POLICY"; pwd`, policy: Check, check: accept,
			note: uuid + " 0000:17:00.0 check /",
		},
		"also with the policy none": {script: "echo fine", policy: None, check: accept, note: "fine"},
		"its failure refuses the device, with its last words": {
			script: "echo first; printf 'scrub: \\033[31mverify error\\n' >&2; exit 3", policy: Check, check: accept,
			err: "(exec): run PROGRAM: exit status 3: first scrub:  [31mverify error",
		},
		"it takes too long":    {script: "sleep 1000 & sleep 1000", policy: Check, check: accept, err: "took too long"},
		"it belongs to others": {script: "true", policy: Check, err: "others can change it"},
		"it does not run after a failure": {
			script: "touch $0.ran", policy: Check, check: accept, err: "(health): lost",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := &fakeNode{}
			if strings.Contains(c.err, "lost") {
				f.healthErr = errors.New("lost")
			}
			r := newRunner(t, f)
			r.opts.Check = c.check
			path := writeScript(t, c.script)
			if c.check == nil {
				testenv.Must(t, os.Chmod(path, 0o777))
			}
			limit := plenty
			if strings.Contains(c.err, "too long") {
				limit = 500 * time.Millisecond
			}
			rec, err := runOne(r, within(t, plenty), device, Rules{
				Policy: c.policy, Exec: Program{Path: path, Timeout: limit},
			})
			checkError(t, err, strings.ReplaceAll(c.err, "PROGRAM", path))
			last := rec.Steps[len(rec.Steps)-1]
			if err == nil && (last.Name != "exec" || last.Note != c.note) {
				t.Errorf("the last step is %+v", last)
			}
			if _, err := os.Stat(path + ".ran"); err == nil {
				t.Error("it ran")
			}
		})
	}
	f := &fakeNode{}
	_, err := runOne(newRunner(t, f), t.Context(), device, Rules{Policy: None, Exec: Program{Path: "bin/sh"}})
	checkError(t, err, `"bin/sh" is not the absolute path of a program`)
}

// The administrator's program gets to know of other users of the device with each policy, and is not run while a GPU is
// reset.
func TestExecWithEachPolicy(t *testing.T) {
	f := &fakeNode{shared: "it has 4 replicas"}
	r := newRunner(t, f)
	r.opts.Check = accept
	for _, p := range []Policy{None, Check, Clean} {
		rules := Rules{Policy: p, Exec: Program{Path: writeScript(t, `echo "$GPU_SHARED"`)}}
		rec, err := runOne(r, t.Context(), device, rules)
		checkError(t, err, "")
		if last := rec.Steps[len(rec.Steps)-1]; last.Name != "exec" || last.Note != f.shared {
			t.Errorf("%s: the last step is %+v", p, last)
		}
		err = r.WithoutDriver(t.Context(), "it is released", func() bool {
			_, err := runOne(r, within(t, 200*time.Millisecond), device, rules)
			checkError(t, err, "(wait): wait")
			return true
		})
		checkError(t, err, "")
	}
	rules := Rules{Policy: Reset, Exec: Program{Path: writeScript(t, "touch $0.runs; sleep 0.5; touch $0.ended")}}
	ran := make(chan error)
	go func() { _, err := runOne(r, t.Context(), device, rules); ran <- err }()
	testenv.Eventually(t, "the program runs", func() bool { return exists(rules.Exec.Path + ".runs") })
	err := r.WithoutDriver(t.Context(), "it is released", func() bool { return exists(rules.Exec.Path + ".ended") })
	checkError(t, err, "")
	checkError(t, <-ran, "")
	if f.released {
		t.Error("the driver was released while the program ran")
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func TestOutputIsBounded(t *testing.T) {
	p := Program{Path: writeScript(t, "yes | head -c 10000000; exit 3")}
	output, status, err := p.Run(t.Context(), accept)
	if len(output) != maxOutput || status != 3 || err != nil {
		t.Errorf("%d bytes, status %d, error %v", len(output), status, err)
	}
}

func FuzzParseReset(f *testing.F) {
	for _, text := range []string{
		"GPU 00000000:17:00.0 was successfully reset.\nAll done.\n", "GPU 00000000:17:00.0: In use by another client",
		"GPU 00000000:17:00.0: Not Supported", "", "\xff\n\x00nvlink",
	} {
		f.Add(text, 0)
		f.Add(text, 255)
	}
	f.Fuzz(func(t *testing.T, output string, status int) {
		outcome, err := parseReset(output, status, device.PCIBusID)
		if (outcome == ResetDone) != (err == nil) {
			t.Errorf("outcome %d, error %v", outcome, err)
		}
		if outcome == ResetDone && status != 0 && !strings.Contains(strings.ToLower(output), "successfully reset") {
			t.Errorf("done with status %d", status)
		}
		if err != nil && (len(err.Error()) > 2*maxText || strings.ContainsAny(err.Error(), "\n\x00\x1b")) {
			t.Errorf("the error is %q", err)
		}
	})
}
