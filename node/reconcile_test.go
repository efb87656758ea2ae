package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestStartWritesTheSpecAndListsItsDevices(t *testing.T) {
	b := newFixture(t, "dgx-h100")
	b.start()
	b.wantDevices(b.rec.State(), count{healthy: 8})
	if n := len(b.published); n != 1 {
		t.Errorf("%d states published, want 1", n)
	}
	spec, err := cdi.ReadFile(b.path)
	testenv.Must(t, err)
	if d := cdi.Diff(spec, b.rec.State().Spec); len(d) > 0 {
		t.Errorf("the file differs from the state: %v", d)
	}
}

func TestNothingIsDoneWhereNothingChanged(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	before := fileio.IDOf(b.path)
	b.reconcile()
	if fileio.IDOf(b.path) != before {
		t.Error("the spec was written again")
	}
	if n := len(b.published); n != 1 {
		t.Errorf("%d states published, want 1", n)
	}
	// The same spec in another form is not written again.
	data, err := cdi.Marshal(b.rec.State().Spec, cdi.JSON)
	testenv.Must(t, err)
	testenv.Must(t, os.WriteFile(b.path, append([]byte("\n\n"), data...), 0o644))
	before = fileio.IDOf(b.path)
	b.reconcile()
	if fileio.IDOf(b.path) != before {
		t.Error("a spec that means the same was written again")
	}
}

func TestStartRefuses(t *testing.T) {
	cases := map[string]struct {
		prepare func(b *fixture)
		want    []string // in the error
		is      func(error) bool
	}{
		"the names of all devices in another file of our directory": {
			func(b *fixture) { b.foreign(filepath.Join(b.dirs[1], "other.yaml"), b.uuids()...) },
			[]string{"define the names of all 4 healthy devices", "other.yaml also defines nvidia.com/gpu=GPU-"},
			isType[*TakenError],
		},
		"the names of all devices in two files": {
			func(b *fixture) {
				b.foreign(filepath.Join(b.dirs[1], "one.yaml"), b.uuids()[:1]...)
				b.foreign(filepath.Join(b.dirs[1], "two.yaml"), b.uuids()[1:]...)
			},
			[]string{"one.yaml also defines nvidia.com/gpu=GPU-", "two.yaml also defines nvidia.com/gpu=GPU-"},
			isType[*TakenError],
		},
		"the names of all devices beside a spec of ours": {
			func(b *fixture) {
				b.foreign(filepath.Join(b.dirs[1], "other.yaml"), b.uuids()...)
				b.foreign(b.path, b.uuids()...)
			},
			[]string{"other.yaml also defines nvidia.com/gpu=GPU-"},
			func(err error) bool { e, ok := errors.AsType[*TakenError](err); return ok && e.Path != "" },
		},
		"a name of an extra that is required": {
			func(b *fixture) {
				b.rec.files[1].extra.Required = true
				other := filepath.Join(b.dirs[1], "gds.yaml")
				b.foreign(other, "all")
				edit(b.t, other, "nvidia.com/gpu", "nvidia.com/gds")
			},
			[]string{"gds is required: ", "gds.yaml also defines nvidia.com/gds=all"},
			isType[*RequiredError],
		},
		"a directory of lower priority that engines cannot read": {
			func(b *fixture) { testenv.Must(b.t, os.WriteFile(b.dirs[0], nil, 0o644)) },
			[]string{"engines do not read", "etc-cdi: not a directory"},
			isAny,
		},
		"a file of our name that is of another kind": {
			func(b *fixture) {
				b.foreign(b.path, "0")
				edit(b.t, b.path, "nvidia.com/gpu", "example.com/gpu")
			},
			[]string{"it is a spec of kind example.com/gpu, not nvidia.com/gpu"},
			isType[*KindError],
		},
		"a directory that cannot be written to": {
			func(b *fixture) {
				b.rec.files[0] = newSpecFile("/proc/self/fd/nvidia.com-gpu.json", cdi.DefaultKind, nil)
			},
			[]string{"reconcile the node: lock /proc/self/fd"},
			isType[*SpecError],
		},
		"a directory whose parent is missing": {
			func(b *fixture) {
				b.rec.files[0] = newSpecFile("/nonexistent/cdi/x.json", cdi.DefaultKind, nil)
			},
			[]string{"make the spec directory"},
			isType[*SpecError],
		},
		"a driver whose files are broken": {
			func(b *fixture) {
				testenv.Must(b.t, os.RemoveAll(filepath.Join(b.node.Root(), b.node.LibDir())))
			},
			[]string{"no usable NVIDIA driver"},
			func(err error) bool { return errors.Is(err, gpu.ErrNoDriver) },
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			b := newExtrasFixture(t, []string{"gds"}, gds)
			c.prepare(b)
			before := tree(t, b.dirs)
			err := b.rec.Start(t.Context(), b.publish)
			if err == nil {
				t.Fatal("it started")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q lacks %q", err, want)
				}
			}
			if strings.Contains(err.Error(), "a spec that was written before an error") {
				t.Errorf("error %q is about specs that were written too", err)
			}
			if !c.is(err) {
				t.Errorf("the error has the wrong type: %v", err)
			}
			if after := tree(t, b.dirs); !slices.Equal(before, after) {
				t.Errorf("it left something behind: %v, before %v", after, before)
			}
			if len(b.published) > 0 {
				t.Error("it published devices")
			}
		})
	}
}

func isType[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

func isAny(error) bool { return true }

// tree lists what is in directories.
func tree(t *testing.T, dirs []string) []string {
	t.Helper()
	var names []string
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ENOTDIR) {
			t.Fatal(err)
		}
		for _, e := range entries {
			names = append(names, filepath.Join(dir, e.Name()))
		}
	}
	return names
}

func edit(t *testing.T, path, old, by string) {
	t.Helper()
	data, err := os.ReadFile(path)
	testenv.Must(t, err)
	testenv.Must(t, os.WriteFile(path, []byte(strings.ReplaceAll(string(data), old, by)), 0o644))
}

func TestMIGDevicesComeAfterTheSpecHasThemAndGoBeforeItLosesThem(t *testing.T) {
	b := newFixture(t, "dgx-h100")
	b.start()
	uuid := b.node.Machine().GPUs[2].UUID
	testenv.Must(t, b.node.SetMIG(2, []string{"3g.40gb", "1g.10gb"}))
	b.wantDevices(b.reconcile(), count{healthy: 9})
	if n := len(b.published); n != 3 {
		t.Fatalf("%d states published, want 3: at first, without what is gone, with what is new", n)
	}
	middle := b.published[1]
	b.wantDevices(middle.State, count{healthy: 7})
	if !slices.Contains(middle.offered, cdi.DefaultKind+"="+uuid) {
		t.Errorf("the spec lost %s before the list did", uuid)
	}
	if slices.Contains(b.disk(), uuid) {
		t.Errorf("the spec still has %s, which is in MIG mode", uuid)
	}
	var names []string
	for _, r := range b.rec.State().Resources {
		names = append(names, r.Name)
	}
	if want := []string{"nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"}; !slices.Equal(
		names,
		want,
	) {
		t.Errorf("resources %v, want %v", names, want)
	}
	testenv.Must(t, b.node.DisableMIG(2))
	b.wantDevices(b.reconcile(), count{healthy: 8})
}

func TestGPUsInMIGModeWithoutInstancesAreNoDevicesAndNoSpec(t *testing.T) {
	b := newFixture(t, "mig-h100")
	for i := range b.node.Machine().GPUs {
		testenv.Must(t, b.node.SetMIG(i, nil))
	}
	b.start()
	b.wantDevices(b.rec.State(), count{})
	if names := b.disk(); names != nil {
		t.Errorf("the spec has %v", names)
	}
	testenv.Must(t, b.node.SetMIG(0, []string{"1g.10gb"}))
	b.wantDevices(b.reconcile(), count{healthy: 1})
	testenv.Must(t, b.node.SetMIG(0, nil))
	b.wantDevices(b.reconcile(), count{})
	if _, err := os.Stat(b.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the spec of no device is still there: %v", err)
	}
}

func TestALostGPUIsUnhealthyAndTheOthersAreServed(t *testing.T) {
	b := newFixture(t, "dgx-h100")
	b.start()
	uuid := b.node.Machine().GPUs[3].UUID
	b.source.set(nil, 3)
	s := b.reconcile()
	b.wantDevices(s, count{healthy: 7, unhealthy: 1})
	if reason := reasons(s)[uuid]; !strings.Contains(reason, "GPU is lost") {
		t.Errorf("GPU 3 is unhealthy for the reason %q", reason)
	}
	if slices.Contains(b.disk(), uuid) {
		t.Errorf("the spec still has %s", uuid)
	}
	b.source.set(nil)
	b.wantDevices(b.reconcile(), count{healthy: 8})
}

func TestAGPUThatIsGoneLeavesTheListAndTheSpec(t *testing.T) {
	b := newFixture(t, "dgx-h100")
	b.start()
	uuid := b.node.Machine().GPUs[3].UUID
	testenv.Must(t, b.node.Remove(3))
	s := b.reconcile()
	b.wantDevices(s, count{healthy: 7})
	if _, listed := reasons(s)[uuid]; listed || slices.Contains(b.disk(), uuid) {
		t.Errorf("%s is listed: %t; in the spec: %v", uuid, listed, b.disk())
	}
}

func TestTheLastStateIsRetainedUntilTheDriverFailedThreeTimes(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	b.source.set(errors.New("no answer from the driver"))
	for range 2 {
		b.wantDevices(b.reconcile(), count{healthy: 4})
	}
	// The spec is still reconciled.
	testenv.Must(t, os.Remove(b.path))
	s := b.reconcile()
	b.wantDevices(s, count{unhealthy: 4})
	for _, reason := range reasons(s) {
		if reason != "no answer from the driver" {
			t.Errorf("reason %q", reason)
		}
	}
	if len(b.disk()) == 0 {
		t.Error("the deleted spec was not written again")
	}
	b.source.set(nil)
	s = b.reconcile()
	b.wantDevices(s, count{healthy: 4})
	if s.Err != nil {
		t.Errorf("the state still has the error %v", s.Err)
	}
}

func TestAnErrorThatLastedMakesTheDevicesUnhealthyAtOnce(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	b.source.set(fmt.Errorf("%w: the driver does not answer", gpu.ErrNotAnswering))
	b.wantDevices(b.reconcile(), count{unhealthy: 4})
	b.source.set(nil)
	b.wantDevices(b.reconcile(), count{healthy: 4})
}

func TestAnotherSpecTakesADevice(t *testing.T) {
	cases := map[string]struct {
		ours, other int // the directories
		good, bad   int
	}{
		"in the same directory":                                         {1, 1, 3, 1},
		"in a directory of higher priority":                             {0, 1, 3, 1},
		"not in a directory of lower priority, since engines take ours": {1, 0, 4, 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, "pcie-quad", func(o *Options) { o.Path = filepath.Join(o.Dirs[0], "ours.json") })
			if c.ours == 1 {
				b = newFixture(t, "pcie-quad")
			}
			b.start()
			other := filepath.Join(b.dirs[c.other], "other.json")
			uuid := b.uuids()[0]
			b.foreign(other, uuid)
			s := b.reconcile()
			b.wantDevices(s, count{healthy: c.good, unhealthy: c.bad})
			why := other + " also defines nvidia.com/gpu=" + uuid
			if reason := reasons(s)[uuid]; c.bad > 0 && reason != why {
				t.Errorf("it is unhealthy for the reason %q", reason)
			}
			effect := ": engines take these from this node's spec, and not from that file"
			if c.bad > 0 {
				effect = ": these devices are unhealthy"
			}
			if remarks := s.Remarks(); s.Err != nil || s.Ready() != nil || !slices.Equal(remarks, []string{why + effect}) {
				t.Errorf("error %v, ready %v, remarks %q", s.Err, s.Ready(), remarks)
			}
			testenv.Must(t, os.Remove(other))
			s = b.reconcile()
			b.wantDevices(s, count{healthy: 4})
			if len(s.Remarks()) > 0 {
				t.Errorf("afterwards: %q", s.Remarks())
			}
		})
	}
}

// With a name in both files engines would offer neither.
func TestATakenNameIsLeftToTheOtherSpec(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	other, taken := filepath.Join(b.dirs[1], "other.json"), []string{b.uuids()[0], "1", "all"}
	b.foreign(other, taken...)
	s := b.reconcile()
	for _, name := range taken {
		if file := b.engine()[cdi.DefaultKind+"="+name]; file != other {
			t.Errorf("engines take %s from %q", name, file)
		}
	}
	if file := b.engine()[cdi.DefaultKind+"=0"]; file != b.path {
		t.Errorf("engines take 0 from %q", file)
	}
	before := fileio.IDOf(b.path)
	b.wantDevices(s, count{healthy: 3, unhealthy: 1})
	b.reconcile()
	if fileio.IDOf(b.path) != before {
		t.Error("the spec was written again, where nothing changed")
	}
	b.foreign(other, append(b.uuids(), "0", "1", "2", "3", "all")...)
	s = b.reconcile()
	b.wantDevices(s, count{unhealthy: 4})
	if b.disk() != nil || s.Ready() == nil || !strings.Contains(s.Ready().Error(), other) {
		t.Errorf("without a free name the spec has %v, and readiness says %v", b.disk(), s.Ready())
	}
}

// A link to our spec defines what our spec defines. Leaving the names out would remove the conflict, and the next
// reconciliation would add them again, without end.
func TestALinkToOurSpecDoesNotHaveItWrittenForEver(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	link := filepath.Join(b.dirs[1], "link.json")
	testenv.Must(t, os.Symlink(filepath.Base(b.path), link))
	b.wantDevices(b.reconcile(), count{unhealthy: 4})
	before := fileio.IDOf(b.path)
	b.wantDevices(b.reconcile(), count{unhealthy: 4})
	if fileio.IDOf(b.path) != before {
		t.Error("the spec was written again")
	}
	testenv.Must(t, os.Remove(link))
	b.wantDevices(b.reconcile(), count{healthy: 4})
}

func TestConflictsAreLoggedWhenTheyBeginAndWhenTheyEnd(t *testing.T) {
	var log strings.Builder
	b := newExtrasFixture(t, []string{"gds"}, gds)
	b.rec.log = slog.New(slog.NewTextHandler(&log, nil))
	b.start()
	both, low := filepath.Join(b.dirs[1], "both.json"), filepath.Join(b.dirs[0], "low.json")
	b.foreign(both, b.uuids()[0], b.uuids()[1], "0", "all")
	b.foreign(low, b.uuids()[2])
	extra := filepath.Join(b.dirs[1], "extra.json")
	b.foreign(extra, "all")
	edit(t, extra, "nvidia.com/gpu", "nvidia.com/gds")
	begin := []string{
		both + " also defines nvidia.com/gpu=" + b.uuids()[0] + ", nvidia.com/gpu=" + b.uuids()[1] +
			": these devices are unhealthy; remove that file",
		both + " also defines nvidia.com/gpu=0, nvidia.com/gpu=all: engines do not take these names from this node's spec",
		low + " also defines nvidia.com/gpu=" + b.uuids()[2] +
			": engines take these from this node's spec, and not from that file",
		extra + " also defines nvidia.com/gds=all: containers do not get these",
	}
	var end []string
	for i, line := range begin {
		begin[i] = `msg="` + line
		end = append(end, `msg="no longer the case: `+strings.TrimSuffix(line, "; remove that file"))
	}
	expect := func(lines []string, times int) {
		t.Helper()
		for _, line := range lines {
			if n := strings.Count(log.String(), line); n != times {
				t.Errorf("%q is there %d times, want %d:\n%s", line, n, times, &log)
			}
		}
	}
	b.reconcile()
	b.source.set(errors.New("no answer from the driver"))
	b.reconcile()
	b.source.set(nil)
	b.reconcile()
	expect(begin, 1)
	expect(end, 0)
	for _, path := range []string{both, low, extra} {
		testenv.Must(t, os.Remove(path))
	}
	b.reconcile()
	b.reconcile()
	expect(begin, 1)
	expect(end, 1)
}

// A device is healthy again once the other file is gone, also where the driver does not answer.
func TestAConflictEndsWhileTheDriverDoesNotAnswer(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	other := filepath.Join(b.dirs[1], "other.json")
	b.foreign(other, b.uuids()[0])
	b.wantDevices(b.reconcile(), count{healthy: 3, unhealthy: 1})
	b.source.set(errors.New("no answer from the driver"))
	b.wantDevices(b.reconcile(), count{healthy: 3, unhealthy: 1})
	testenv.Must(t, os.Remove(other))
	b.wantDevices(b.reconcile(), count{healthy: 4})
}

// A device whose edits are right can be allocated, although the rest of the spec is wrong and cannot be written.
func TestADeviceThatIsRightInASpecThatCannotBeWrittenCanBeAllocated(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	edit(t, b.path, "nvidia2", "nvidia7")
	held := lockPath(b.path)
	testenv.Must(t, os.Remove(held))
	testenv.Must(t, os.Mkdir(held, 0o755)) // the lock cannot be held, so nothing is written
	t.Cleanup(func() { _ = os.Remove(held) })
	s := b.reconcile()
	b.wantDevices(s, count{healthy: 3, unhealthy: 1})
	if s.Err == nil {
		t.Fatal("no error")
	}
	for uuid, reason := range reasons(s) {
		if reason != "" && reason != s.Err.Error() {
			t.Errorf("%s is unhealthy for the reason %q, and the error is %v", uuid, reason, s.Err)
		}
	}
}

func TestRunNotices(t *testing.T) {
	cases := map[string]struct {
		do   func(b *fixture)
		seen func(b *fixture) bool
	}{
		"a deleted spec": {func(b *fixture) { testenv.Must(b.t, os.Remove(b.path)) }, (*fixture).specIsWhole},
		"an edited spec": {
			func(b *fixture) { edit(b.t, b.path, "nvidiactl", "nvidiactk") },
			(*fixture).specIsWhole,
		},
		"a spec that is a ruin": {
			func(b *fixture) { testenv.Must(b.t, os.WriteFile(b.path, []byte("{"), 0o644)) },
			(*fixture).specIsWhole,
		},
		"a spec that few can read": {
			func(b *fixture) { testenv.Must(b.t, os.Chmod(b.path, 0o600)) }, (*fixture).specIsWhole,
		},
		"a spec that all can change": {
			func(b *fixture) { testenv.Must(b.t, os.Chmod(b.path, 0o666)) }, (*fixture).specIsWhole,
		},
		"a spec of another user": {func(b *fixture) {
			testenv.Root(b.t)
			testenv.Must(b.t, os.Chown(b.path, 1000, 1000))
		}, (*fixture).specIsWhole},
		"a conflicting spec": {
			func(b *fixture) { b.foreign(filepath.Join(b.dirs[1], "other.yaml"), b.uuids()...) },
			func(b *fixture) bool { return countOf(b.rec.State()) == (count{unhealthy: 1}) },
		},
	}
	for name, c := range cases {
		t.Run(name+", by inotify", func(t *testing.T) {
			b := newFixture(t, "workstation")
			b.start()
			b.run()
			c.do(b)
			testenv.Eventually(t, "it is noticed", func() bool { return c.seen(b) })
		})
		t.Run(name+", by a poll", func(t *testing.T) {
			b := newFixture(t, "workstation")
			b.start()
			if b.rec.poll(t.Context()) {
				t.Error("a poll finds a difference before")
			}
			c.do(b)
			if !b.rec.poll(t.Context()) {
				t.Error("it is not noticed")
			}
			b.reconcile()
			if !c.seen(b) || b.rec.poll(t.Context()) {
				t.Error("it is noticed again, or without effect")
			}
		})
	}
}

// specIsWhole reports whether the spec is what it should be, and readable.
func (b *fixture) specIsWhole() bool {
	var st unix.Stat_t
	if unix.Stat(b.path, &st) != nil || st.Mode&0o777 != 0o644 || int(st.Uid) != os.Geteuid() {
		return false
	}
	spec, err := cdi.ReadFile(b.path)
	return err == nil && len(cdi.Diff(spec, b.rec.State().Spec)) == 0
}

// A poll reconciles only where the node differs from the last reconciliation.
func TestAPollNotices(t *testing.T) {
	for name, c := range map[string]struct {
		do        func(b *fixture)
		good, bad int
	}{
		"a GPU that is lost, which a probe shows": {func(b *fixture) {
			b.source.set(nil, 1)
			b.prober.set(gpu.Probe{UUID: b.uuids()[1], Error: "GPU is lost", Lost: true, RecoveryAction: gpu.NoRecoveryAction})
		}, 7, 1},
		"a GPU in MIG mode, which a probe shows": {func(b *fixture) {
			testenv.Must(b.t, b.node.SetMIG(1, []string{"1g.10gb"}))
			b.prober.set(gpu.Probe{UUID: b.uuids()[1], MIGEnabled: true, RecoveryAction: gpu.NoRecoveryAction})
		}, 8, 0},
		"a program of the driver is replaced": {func(b *fixture) {
			smi := b.node.SMI()
			testenv.Must(b.t, os.Rename(smi, smi+".old"))
			data, err := os.ReadFile(smi + ".old")
			testenv.Must(b.t, err)
			testenv.Must(b.t, os.WriteFile(smi, data, 0o755))
		}, 8, 0},
		"a GPU is about to be unbound, which only sysfs shows": {func(b *fixture) {
			address := b.node.Machine().GPUs[1].Bus
			testenv.Must(b.t, os.Remove(filepath.Join(b.node.Root(), "sys/bus/pci/devices", address, "driver")))
		}, 8, 0},
		"the driver is unbound from a GPU": {func(b *fixture) { testenv.Must(b.t, b.node.Unbind(1)) }, 7, 0},
		"a GPU is unplugged":               {func(b *fixture) { testenv.Must(b.t, b.node.Unplug(1)) }, 7, 0},
		"what nothing shows but a reconciliation, after a minute": {func(b *fixture) {
			b.source.set(nil, 1)
			b.rec.reconciled = b.rec.reconciled.Add(-maxReconcilePause)
		}, 7, 1},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, "dgx-h100")
			b.start()
			if b.rec.poll(t.Context()) {
				t.Fatal("a poll finds a difference before")
			}
			c.do(b)
			if !b.rec.poll(t.Context()) {
				t.Fatal("it is not noticed")
			}
			b.wantDevices(b.reconcile(), count{healthy: c.good, unhealthy: c.bad})
			if b.rec.poll(t.Context()) {
				t.Error("it is noticed again")
			}
		})
	}
}

// A GPU that cannot be read may be readable again at any time, which its probes do not show.
func TestAnUnreadableGPUIsReadAtEachPoll(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.source.set(nil, 1)
	b.start()
	if b.rec.poll(t.Context()) {
		t.Error("a poll finds a difference although the GPU stays lost")
	}
	b.source.set(nil)
	if !b.rec.poll(t.Context()) {
		t.Error("it is not noticed that the GPU is back")
	}
}

func TestRunReconcilesWhenTriggeredAndPollsAtTheInterval(t *testing.T) {
	for name, c := range map[string]struct {
		interval time.Duration
		trigger  bool
	}{
		"triggered":          {time.Hour, true},
		"after the interval": {20 * time.Millisecond, false},
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, "pcie-quad", func(o *Options) { o.Interval = c.interval })
			b.start()
			b.run()
			testenv.Must(t, b.node.Unbind(1))
			if c.trigger {
				b.rec.Trigger()
			}
			b.wait("a list without the GPU", func(s State) bool { return countOf(s) == (count{healthy: 3}) })
		})
	}
}

// While the library was closed, neither events nor polls have noticed anything.
func TestRunExaminesTheNodeWhenTheLibraryIsOpenAgain(t *testing.T) {
	b := newFixture(t, "pcie-quad", func(o *Options) { o.Interval = never })
	b.start()
	b.run()
	probes := func() int {
		b.prober.mu.Lock()
		defer b.prober.mu.Unlock()
		return b.prober.asked
	}
	testenv.Eventually(t, "the first probe", func() bool { return probes() == 1 })
	testenv.Must(t, b.node.Unbind(1))
	b.prober.set(gpu.Probe{UUID: b.uuids()[2], Error: "GPU is lost", Lost: true, RecoveryAction: gpu.NoRecoveryAction})
	b.rec.examine()
	b.wait("a list without the one GPU and with the other one unhealthy", func(s State) bool {
		return countOf(s) == (count{healthy: 2, unhealthy: 1})
	})
}

// What must hold before a reconciliation, such as the owner of the hook, is checked at each poll.
func TestRunNoticesACheckThatFails(t *testing.T) {
	var fails atomic.Bool
	b := newFixture(t, "pcie-quad", func(o *Options) {
		o.Interval = 20 * time.Millisecond
		o.Check = func() error {
			if fails.Load() {
				return errors.New("the hook is gone")
			}
			return nil
		}
	})
	b.start()
	b.run()
	fails.Store(true)
	b.wait("no healthy GPU", func(s State) bool { return countOf(s) == (count{unhealthy: 4}) })
	fails.Store(false)
	b.wait("healthy GPUs", func(s State) bool { return countOf(s) == (count{healthy: 4}) })
}

// upgrade replaces the node's driver in place.
func (b *fixture) upgrade(version string) {
	b.t.Helper()
	_, err := sim.Create(b.t.Context(), b.node.Root(), b.node.Machine(), sim.Options{Driver: version, Force: true})
	testenv.Must(b.t, err)
}

func TestADriverThatWasReplacedEndsRun(t *testing.T) {
	b := newFixture(t, "workstation", func(o *Options) { o.Interval = 20 * time.Millisecond })
	b.start()
	done := make(chan error, 1)
	go func() { done <- b.rec.Run(t.Context()) }()
	b.upgrade("590.44.01")
	select {
	case err := <-done:
		if !errors.Is(err, ErrDriverChanged) || !strings.Contains(err.Error(), "590.44.01") {
			t.Errorf("Run ended with %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("Run goes on")
	}
}

func TestADriverWhoseModuleIsNotReloadedMakesItsDevicesUnhealthy(t *testing.T) {
	b := newFixture(t, "workstation")
	b.start()
	b.upgrade("590.44.01")
	node, err := sim.Open(b.node.Root())
	testenv.Must(t, err)
	testenv.Must(t, node.SetKernelVersion("580.126.09"))
	s := b.reconcile()
	b.wantDevices(s, count{unhealthy: 1})
	if s.Err == nil ||
		!strings.Contains(s.Err.Error(), "libraries have version 590.44.01, but the loaded kernel module has 580.126.09") {
		t.Errorf("error %v", s.Err)
	}
	testenv.Must(t, node.SetKernelVersion("590.44.01"))
	if err := b.rec.reconcile(t.Context()); !errors.Is(err, ErrDriverChanged) {
		t.Errorf("after the module was reloaded: %v", err)
	}
}

// An administrator releases the driver to replace it.
func TestAReleasedDriverIsNotLookedAt(t *testing.T) {
	b := newFixture(t, "workstation")
	b.start()
	b.source.released.Store(true)
	b.source.set(errors.New("the driver was used"))
	testenv.Must(t, os.Remove(b.node.Library()))
	b.wantDevices(b.reconcile(), count{healthy: 1})
	testenv.Must(t, os.RemoveAll(b.dirs[1]))
	b.wantDevices(b.reconcile(), count{healthy: 1})
	if !b.specIsWhole() {
		t.Error("the spec is not whole")
	}
	b.upgrade("590.44.01")
	b.wantDevices(b.reconcile(), count{healthy: 1})
	b.source.released.Store(false)
	if err := b.rec.reconcile(t.Context()); !errors.Is(err, ErrDriverChanged) {
		t.Errorf("after the release: %v", err)
	}
}

// A reload changes at once which devices are offered, also while the driver is released.
func TestAReleasedDriverIsOfferedAnew(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	b.source.released.Store(true)
	b.source.set(errors.New("the driver was used"))
	b.config.GPUs.Exclude = []resource.Selector{"1"}
	b.wantDevices(b.reconcile(), count{healthy: 3})
	b.config.GPUs.Exclude = nil
	b.wantDevices(b.reconcile(), count{healthy: 4})
}

func TestTwoInstancesDoNotWriteOneSpec(t *testing.T) {
	b := newFixture(t, "workstation")
	b.start()
	second := New(b.rec.opts)
	if err := second.Start(t.Context(), func(State) {}); !errors.Is(err, fileio.ErrHeld) {
		t.Errorf("a second instance starts with the error %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	testenv.Must(t, b.rec.Run(ctx), b.rec.Unlock())
	testenv.Must(t, second.Start(t.Context(), func(State) {}))
	testenv.Must(t, second.Unlock())
	if got := tree(t, b.dirs); !slices.Equal(got, []string{b.path}) {
		t.Errorf("the CDI directories have %v", got)
	}
}

// After Unlock another instance writes the record, also if a reset ends later.
func TestTheHealthRecordIsNotWrittenAfterUnlock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "health.json")
	b := newFixture(t, "pcie-quad", recordHealth(path))
	b.start()
	uuid := b.uuids()[1]
	testenv.Must(t, b.rec.Monitor().HoldForReset(uuid, "held"))
	testenv.Must(t, b.rec.Unlock(), os.WriteFile(path, []byte("of another instance"), 0o600))
	b.rec.Monitor().EndHold(uuid)
	if err := b.rec.Monitor().Cordon(uuid, "x"); !errors.Is(err, errUnlocked) {
		t.Errorf("Cordon: %v", err)
	}
	if data, err := os.ReadFile(path); err != nil || string(data) != "of another instance" {
		t.Errorf("the record is %.80q, %v", data, err)
	}
}

func TestARemovedDirectoryComesBack(t *testing.T) {
	b := newFixture(t, "workstation")
	b.start()
	testenv.Must(t, os.RemoveAll(b.dirs[1]))
	b.wantDevices(b.reconcile(), count{healthy: 1})
	if !b.specIsWhole() {
		t.Error("the spec is not whole")
	}
}

func TestAlive(t *testing.T) {
	b := newFixture(t, "workstation")
	b.start()
	testenv.Must(t, b.rec.Alive())
	b.rec.heartbeat.Add(-int64(3 * time.Minute))
	if err := b.rec.Alive(); err == nil || err.Error() != "the reconciler has been stuck for 3m0s" {
		t.Errorf("after three minutes: %v", err)
	}
}

func TestWithoutASpecFileNothingIsWritten(t *testing.T) {
	b := newFixture(t, "pcie-quad", func(o *Options) { o.Path = "" })
	b.foreign(filepath.Join(b.dirs[1], "other.json"), b.uuids()...) // takes nothing then
	b.start()
	b.wantDevices(b.rec.State(), count{healthy: 4})
	if got := tree(t, b.dirs); len(got) != 1 {
		t.Errorf("the CDI directories have %v", got)
	}
}

// The spec of a node has a hook, and what runtimes without CDI get has mounts in its place.
func TestGrantsWithoutCDI(t *testing.T) {
	for _, withoutCDI := range []bool{false, true} {
		b := newFixture(t, "workstation", func(o *Options) { o.WithoutCDI = withoutCDI })
		b.start()
		s := b.rec.State()
		isLink := func(m *specs.Mount) bool { return m.ContainerPath == "/usr/lib64/libcuda.so.1" }
		common, dev := s.Resources[0].Grant.WithoutCDI, s.Resources[0].Devices[0].Grant.WithoutCDI
		if got := slices.ContainsFunc(common.Mounts, isLink); got != withoutCDI || (len(dev.DeviceNodes) > 0) != got {
			t.Errorf("without CDI: %v: mounts %v, nodes %v", withoutCDI, common.Mounts, dev.DeviceNodes)
		}
		if edits := s.Spec.ContainerEdits; len(edits.Hooks) != 1 || slices.ContainsFunc(edits.Mounts, isLink) {
			t.Errorf("without CDI: %v: the spec has other hooks or mounts: %+v", withoutCDI, edits)
		}
	}
}

// The driver may take seconds to answer, and engines read the spec meanwhile.
func TestADamagedSpecIsRestoredBeforeTheDriverAnswers(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	testenv.Must(t, os.Remove(b.path))
	b.source.mu.Lock() // the driver does not answer
	done := make(chan error, 1)
	go func() { done <- b.rec.reconcile(t.Context()) }()
	testenv.Eventually(t, "the spec is restored", func() bool { return len(b.disk()) > 0 })
	b.source.mu.Unlock()
	testenv.Must(t, <-done)
}

// A device whose node is gone leaves the published state before the spec loses it.
func TestADeviceThatLeavesTheSpecIsUnhealthyBefore(t *testing.T) {
	b := newFixture(t, "pcie-quad")
	b.start()
	s, err := b.node.Snapshot()
	testenv.Must(t, err)
	gone := s.Devices[1]
	testenv.Must(t, os.Remove(filepath.Join(b.node.Root(), "dev", fmt.Sprintf("nvidia%d", gone.Minor))))
	// publish expects every healthy device to be in the specs.
	b.wantDevices(b.reconcile(), count{healthy: 3, unhealthy: 1})
	first := b.published[1]
	if reasons(first.State)[gone.UUID] == "" || !slices.Contains(first.offered, cdi.DefaultKind+"="+gone.UUID) {
		t.Errorf("%s is healthy in the first state, or left the spec before", gone.UUID)
	}
}

// An upgrade may remove the old driver before it installs the new one, and a process without the library cannot start.
func TestADriverWhoseLibraryIsRemovedIsWaitedFor(t *testing.T) {
	b := newFixture(t, "workstation")
	b.start()
	library := b.rec.library
	testenv.Must(t, os.Rename(library, library+".away"))
	s := b.reconcile()
	b.wantDevices(s, count{unhealthy: 1})
	if s.Err == nil || !strings.Contains(s.Err.Error(), "the driver is being replaced") {
		t.Errorf("error %v", s.Err)
	}
	testenv.Must(t, os.Rename(library+".away", library))
	b.wantDevices(b.reconcile(), count{healthy: 1})
}

func TestAFailedCheckMakesTheDevicesUnhealthyUntilItPasses(t *testing.T) {
	var failure error
	b := newFixture(t, "pcie-quad", func(o *Options) { o.Check = func() error { return failure } })
	b.start()
	failure = errors.New("the hook is gone")
	s := b.reconcile()
	b.wantDevices(s, count{unhealthy: 4})
	if s.Ready() == nil || reasons(s)[b.uuids()[0]] != "the hook is gone" {
		t.Errorf("ready: %v; reasons: %v", s.Ready(), reasons(s))
	}
	failure = nil
	b.wantDevices(b.reconcile(), count{healthy: 4})
}

// Another program may write our file between the reading of all specs and the writing of ours.
func TestAChangeOfTheSpecDuringAReconciliationIsNoticed(t *testing.T) {
	for name, change := range map[string]func(path string) error{
		"another spec": func(path string) error {
			return os.WriteFile(path, []byte(`{"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": []}`), 0o644)
		},
		"no spec": os.Remove,
	} {
		t.Run(name, func(t *testing.T) {
			b := newFixture(t, "pcie-quad")
			b.start()
			if b.rec.changed() {
				t.Fatal("something has changed after the start")
			}
			p := b.rec.newPlan(b.rec.plan.desired, b.rec.loadSpecs())
			testenv.Must(t, change(b.path))
			b.rec.writeSpecs(p)
			if !b.rec.changed() && len(cdi.Load(b.dirs...).Names()) == 0 {
				t.Error("the change is not noticed")
			}
		})
	}
}

// A GPU that suspends must not be woken: by no call of the driver, for as long as nothing changes.
func TestARestingDriverIsCalledOnlyForAChange(t *testing.T) {
	rests := 0
	b := newFixture(t, "pcie-quad", func(o *Options) {
		o.Rest = func(context.Context) bool { rests++; return true }
	})
	b.start()
	reads := 0
	b.source.asked = func() { reads++ }
	poll := func(want bool) {
		t.Helper()
		b.rec.reconciled = b.rec.reconciled.Add(-PollInterval) // as if that time had passed
		if b.rec.poll(t.Context()) != want {
			t.Errorf("a poll says %v, want %v", !want, want)
		}
	}
	poll(false)
	for range time.Hour / PollInterval {
		poll(false)
	}
	if b.prober.asked != 1 || reads > 0 || rests != 1 {
		t.Errorf("within an hour %d probes, %d snapshots and %d rests, want 1, none and 1", b.prober.asked, reads, rests)
	}
	testenv.Must(t, b.node.Unplug(3))
	poll(true)
	b.wantDevices(b.reconcile(), count{healthy: 3})
	poll(false)
	if b.prober.asked != 2 || reads != 1 || rests != 2 {
		t.Errorf("after a change %d probes, %d snapshots and %d rests, want 2, 1 and 2", b.prober.asked, reads, rests)
	}
}

// Probes decide whether such a GPU becomes healthy.
func TestTheDriverDoesNotRestWhileADeviceIsNotHealthy(t *testing.T) {
	rests := 0
	b := newFixture(t, "pcie-quad", func(o *Options) {
		o.Rest = func(context.Context) bool { rests++; return true }
	})
	b.start()
	b.rec.Receive(xid(b.uuids()[0], 95))
	b.rec.poll(t.Context())
	if rests > 0 {
		t.Error("the driver rests")
	}
}
