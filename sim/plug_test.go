package sim

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestDetachedGPUs checks the files, the library and the events of GPUs that go and come back.
func TestDetachedGPUs(t *testing.T) {
	n := makeNode(t, "dgx-h100", Options{})
	before := tree(t, n.Root())
	g := n.Machine().GPUs[3]
	for name, c := range map[string]struct {
		leave, comeBack, clear func() error
		inSysfs                bool
	}{
		"unbound": {func() error { return n.Unbind(3) }, func() error { return n.Bind(3) }, n.Clear, true},
		"unplugged": {
			func() error { return n.Unplug(3) },
			func() error { return n.Plug(3) },
			func() error { return n.ClearGPU(3) },
			false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, comeBack := range []func() error{c.comeBack, c.clear} {
				if err := c.leave(); err != nil {
					t.Fatal(err)
				}
				checkList(t, n)
				files := tree(t, n.Root())
				if _, ok := files[g.sysDir()+"/vendor"]; ok != c.inSysfs {
					t.Errorf("sysfs has the PCI device: %v, want %v", ok, c.inSysfs)
				}
				if _, ok := files[g.sysDir()+"/driver"]; ok {
					t.Error("sysfs has the driver of the PCI device")
				}
				if _, ok := files["dev/nvidia3"]; !ok {
					t.Error("the device node is gone")
				}
				if err := c.leave(); !isInvalid(err) {
					t.Errorf("twice: the error is %v, want an InvalidError", err)
				}
				if err := n.Lose(3); !isInvalid(err) {
					t.Errorf("a GPU that is %s is lost: the error is %v, want an InvalidError", name, err)
				}
				if err := comeBack(); err != nil {
					t.Fatal(err)
				}
				if err := c.comeBack(); !isInvalid(err) {
					t.Errorf("back twice: the error is %v, want an InvalidError", err)
				}
				after := tree(t, n.Root())
				for _, own := range []string{"lock", "state"} {
					delete(after, ownDir+"/"+own)
					delete(before, ownDir+"/"+own)
				}
				if diff := cmp.Diff(before, after); diff != "" {
					t.Errorf("after it came back (-before +after):\n%s", diff)
				}
			}
			if got := state(t, n); !strings.Contains(got, "type=1 system=1") &&
				!strings.Contains(got, "type=2 system=1") {
				t.Errorf("no system events in the state %q", got)
			}
			if err := n.Clear(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestResetFaults(t *testing.T) {
	n := makeNode(t, "dgx-h100", Options{PlainNodes: true})
	file := filepath.Join(n.Root(), "sys/bus/pci/devices", n.Machine().GPUs[2].Bus, "reset")
	for name, c := range map[string]struct {
		fault ResetFault
		want  string
		mode  os.FileMode
	}{
		"works":      {ResetFault{Result: ResetWorks}, "", 0o200},
		"takes long": {ResetFault{Result: ResetWorks, Delay: 20 * time.Second}, "set gpu=2 reset-delay=20000\n", 0o200},
		"busy":       {ResetFault{Result: ResetBusy}, "set gpu=2 reset-result=1\n", 0o200},
		"busy at first": {
			ResetFault{Result: ResetBusy, Tries: 3}, "set gpu=2 reset-result=1\nset gpu=2 reset-tries=3\n", 0o200,
		},
		"not supported":  {ResetFault{Result: ResetNotSupported}, "set gpu=2 reset-result=2\n", 0},
		"needs peers":    {ResetFault{Result: ResetNeedsPeers}, "set gpu=2 reset-result=3\n", 0o200},
		"never returns":  {ResetFault{Result: ResetHangs}, "set gpu=2 reset-result=4\n", os.ModeNamedPipe | 0o200},
		"no more faults": {ResetFault{Result: ResetWorks}, "", 0o200},
	} {
		t.Run(name, func(t *testing.T) {
			if err := n.SetReset(2, c.fault); err != nil {
				t.Fatal(err)
			}
			if got := state(t, n); got != c.want {
				t.Errorf("state is %q, want %q", got, c.want)
			}
			info, err := os.Lstat(file)
			if (err == nil) != (c.mode != 0) || err == nil && info.Mode() != c.mode {
				t.Errorf("the reset file is %v, error %v; want mode %v", info, err, c.mode)
			}
			if err := n.Clear(); err != nil {
				t.Fatal(err)
			}
			if info, err := os.Lstat(file); err != nil || info.Mode() != 0o200 {
				t.Errorf("after Clear the reset file is %v, error %v", info, err)
			}
		})
	}
	// A GPU that comes back has the reset file that its fault asks for.
	if err := first(n.SetReset(2, ResetFault{Result: ResetHangs}), n.Unplug(2), n.Plug(2)); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(file); err != nil || info.Mode() != os.ModeNamedPipe|0o200 {
		t.Errorf("after Plug the reset file is %v, error %v", info, err)
	}
	for name, err := range map[string]error{
		"a GPU behind the last":   n.SetReset(8, ResetFault{Result: ResetBusy}),
		"an unknown result":       n.SetReset(0, ResetFault{Result: "burns"}),
		"tries that work":         n.SetReset(0, ResetFault{Result: ResetWorks, Tries: 1}),
		"a negative number":       n.SetReset(0, ResetFault{Result: ResetBusy, Tries: -1}),
		"a reset of over an hour": n.SetReset(0, ResetFault{Result: ResetWorks, Delay: 2 * time.Hour}),
	} {
		if !isInvalid(err) {
			t.Errorf("%s: the error is %v, want an InvalidError", name, err)
		}
	}
}

// TestResetOfMIG checks that a reset by nvidia-smi removes the MIG devices of a GPU everywhere, and Clear restores
// them.
func TestResetOfMIG(t *testing.T) {
	n := makeNode(t, "mig-h100", Options{PlainNodes: true})
	before := tree(t, n.Root())
	for _, args := range [][]string{{"-pm", "0", "-i", "0"}, {"--gpu-reset", "-i", "0"}} {
		cmd := exec.Command(n.SMI(), args...)
		cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(n.Library()))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	checkList(t, n)
	s := must(n.Snapshot())
	if !s.Devices[0].MIGEnabled || len(s.Devices[0].MIG) != 0 {
		t.Errorf("GPU 0 has MIG mode %v and %d MIG devices, want none", s.Devices[0].MIGEnabled, len(s.Devices[0].MIG))
	}
	files := tree(t, n.Root())
	checkCaps(t, s, files)
	for file := range files {
		if strings.HasPrefix(file, "proc/driver/nvidia/capabilities/gpu0/mig/gi") {
			t.Errorf("%s is left", file)
		}
	}
	if err := n.Clear(); err != nil {
		t.Fatal(err)
	}
	after := tree(t, n.Root())
	delete(after, ownDir+"/lock")
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("after Clear (-before +after):\n%s", diff)
	}
}
