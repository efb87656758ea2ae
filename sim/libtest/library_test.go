package libtest

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// TestLibrary runs the cases of the C program on the whole test machine.
func TestLibrary(t *testing.T) {
	for _, name := range []string{
		"lifecycle", "reload", "strings", "identity", "lookup", "numbers", "arguments_checked", "mig_devices",
		"mig_instances", "mig_off", "topology", "nvlink", "no_nvlink", "telemetry", "field_values", "events",
		"events_waiting", "faults", "lost", "hang", "event_data", "lost_in_a_set", "system_events",
		"health_values", "processes", "settings", "reset",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, newTestNode(t).probe(t, name))
		})
	}
}

func TestConsumerCard(t *testing.T) {
	t.Parallel()
	n := newNode(t, consumerMachine)
	n.addNodes(t, "nvidia0")
	run(t, n.probe(t, "consumer_card"))
}

// TestOlderMemory has a GPU that retires pages of memory, as before Ampere.
func TestOlderMemory(t *testing.T) {
	t.Parallel()
	n := newNode(t, strings.Replace(testMachine, "arch=9", "arch=5", 1))
	n.addNodes(t, testMachineNodes...)
	run(t, n.probe(t, "older_memory"))
}

// TestResetFile checks that a write to the PCI device's reset file in sysfs resets the GPU.
func TestResetFile(t *testing.T) {
	t.Parallel()
	n := newTestNode(t)
	file := n.path("sys/bus/pci/devices/0000:1b:00.0/reset")
	if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, nil, 0o200)); err != nil {
		t.Fatal(err)
	}
	run(t, n.probe(t, "reset_file", file))
}

// TestInit checks the result of nvmlInit, a number of nvmlReturn_t.
func TestInit(t *testing.T) {
	const driverNotLoaded, noPermission, mismatch = "9", "4", "18"
	whole := func(t *testing.T, n *node) {}
	for name, test := range map[string]struct {
		description string
		change      func(t *testing.T, n *node)
		want        string
	}{
		"a node with a driver":                          {testMachine, whole, "0"},
		"a library without a description has no driver": {"", whole, driverNotLoaded},
		"an unknown version of the description": {
			strings.Replace(testMachine, "gpusim 1", "gpusim 2", 1),
			whole, driverNotLoaded,
		},
		"a description without a driver": {"gpusim 1\n" + gpuLine(0, 0, "0000:1b:00.0", 0, "disabled") +
			"\n", whole, driverNotLoaded},
		"without the control node the driver is not loaded": {
			testMachine, func(t *testing.T, n *node) { n.removeNodes(t, "nvidiactl") }, driverNotLoaded,
		},
		"a control node without permission": {
			testMachine, func(t *testing.T, n *node) {
				if err := os.Chmod(n.path("dev/nvidiactl"), 0); err != nil {
					t.Fatal(err)
				}
			}, noPermission,
		},
		"a kernel module of another version": {
			testMachine, func(t *testing.T, n *node) { n.setState(t, "machine kernel=575.57.08\n") }, mismatch,
		},
		"a kernel module of the same version": {
			testMachine, func(t *testing.T, n *node) { n.setState(t, "machine kernel=580.126.09\n") }, "0",
		},
		"no device nodes of GPUs": {
			testMachine, func(t *testing.T, n *node) { n.removeNodes(t, testMachineNodes...) }, "0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, test.description)
			n.addNodes(t, testMachineNodes...)
			test.change(t, n)
			run(t, asNobody(n.probe(t, "init_answers", test.want)))
		})
	}
}

// asNobody makes a command run as an unprivileged user.
func asNobody(cmd *exec.Cmd) *exec.Cmd {
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	return cmd
}

// TestEnumeration checks the minors of the GPUs that a process sees, in the order of their indices.
func TestEnumeration(t *testing.T) {
	for name, test := range map[string]struct {
		change func(t *testing.T, n *node)
		want   string
	}{
		"all nodes": {func(t *testing.T, n *node) {}, "0 5 2 3"},
		"missing nodes are not counted": {
			func(t *testing.T, n *node) { n.removeNodes(t, "nvidia0", "nvidia2") }, "5 3",
		},
		"none": {func(t *testing.T, n *node) { n.removeNodes(t, "nvidia0", "nvidia2", "nvidia3", "nvidia5") }, ""},
		"nodes without permission are not counted": {
			func(t *testing.T, n *node) {
				if err := os.Chmod(n.path("dev/nvidia5"), 0); err != nil {
					t.Fatal(err)
				}
			}, "0 2 3",
		},
		"directories are not counted": {
			func(t *testing.T, n *node) {
				n.removeNodes(t, "nvidia5")
				if err := os.Mkdir(n.path("dev/nvidia5"), 0o755); err != nil {
					t.Fatal(err)
				}
			}, "0 2 3",
		},
		"GPUs that are gone are not counted": {
			func(t *testing.T, n *node) { n.setState(t, "fault gpu=0 kind=gone\n") }, "5 2 3",
		},
		"GPUs without a driver and GPUs that are unplugged are not counted": {
			func(t *testing.T, n *node) {
				n.setState(t, "fault gpu=0 kind=unbound\nfault gpu=2 kind=unplugged\n")
			}, "5 3",
		},
		"a minor that changed": {
			func(t *testing.T, n *node) { n.setState(t, "gpu index=1 minor=2\ngpu index=2 minor=77\n") }, "0 2 3",
		},
		"the state file adds no GPUs": {
			func(t *testing.T, n *node) { n.setState(t, "gpu index=9 minor=0 uuid=GPU-new\n") }, "0 5 2 3",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTestNode(t)
			test.change(t, n)
			run(t, asNobody(n.probe(t, "enumerates", strings.Fields(test.want)...)))
		})
	}
}

// TestRealNodes checks that device nodes without a driver (ENXIO) count as open.
func TestRealNodes(t *testing.T) {
	testenv.Root(t)
	n := newNode(t, testMachine)
	n.removeNodes(t, "nvidiactl")
	for name, minor := range map[string]uint32{"nvidiactl": 255, "nvidia0": 0, "nvidia5": 5} {
		if err := unix.Mknod(n.path("dev", name), unix.S_IFCHR|0o666, int(unix.Mkdev(195, minor))); err != nil {
			t.Fatal(err)
		}
	}
	run(t, n.probe(t, "enumerates", "0", "5"))
}

// TestVisibleMIGs checks the MIG devices of a process that can open only some nodes.
func TestVisibleMIGs(t *testing.T) {
	const first, half = "MIG-00000003-0000-4000-8000-000000000100", "MIG-00000003-0000-4000-8000-000000000101"
	const other, last = "MIG-00000003-0000-4000-8000-000000000102", "MIG-00000003-0000-4000-8000-000000000103"
	for name, test := range map[string]struct {
		gone []string
		want []string
	}{
		"all":                          {nil, []string{first, half, other, last}},
		"one compute instance missing": {[]string{"nvidia-caps/nvidia-cap4"}, []string{first, other, last}},
		"one GPU instance missing":     {[]string{"nvidia-caps/nvidia-cap3"}, []string{first, last}},
		"only the last": {
			[]string{"nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap3"},
			[]string{last},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newTestNode(t)
			n.removeNodes(t, test.gone...)
			run(t, n.probe(t, "visible_migs", test.want...))
		})
	}
}

// TestReadOnlyMIGNodes checks that it suffices to open capability nodes for reading, as the driver makes them.
func TestReadOnlyMIGNodes(t *testing.T) {
	t.Parallel()
	n := newTestNode(t)
	for i := 1; i <= 7; i++ {
		if err := os.Chmod(n.path("dev/nvidia-caps/nvidia-cap"+strconv.Itoa(i)), 0o444); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(n.path("dev/nvidia-caps/nvidia-cap1"), 0); err != nil {
		t.Fatal(err)
	}
	cmd := n.probe(t, "visible_migs", "MIG-00000003-0000-4000-8000-000000000101",
		"MIG-00000003-0000-4000-8000-000000000102", "MIG-00000003-0000-4000-8000-000000000103")
	run(t, asNobody(cmd))
}

// TestMovedRoot checks that the library finds its node after a move, also if it is loaded by a link.
func TestMovedRoot(t *testing.T) {
	t.Parallel()
	n := newTestNode(t)
	n.removeNodes(t, "nvidia0")
	moved := filepath.Join(t.TempDir(), "moved")
	if err := os.Rename(n.root, moved); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link.so")
	if err := os.Symlink(filepath.Join(moved, libDir, "libnvidia-ml.so.1"), link); err != nil {
		t.Fatal(err)
	}
	n.library = link
	run(t, n.probe(t, "enumerates", "5", "2", "3"))
}

func stubs(t *testing.T) []string {
	t.Helper()
	f, err := os.Open("../lib/stub_names.h")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	var names []string
	for s := bufio.NewScanner(f); s.Scan(); {
		line := strings.TrimSuffix(s.Text(), ")")
		if name, ok := strings.CutPrefix(line, "STUB("); ok {
			names = append(names, name)
		}
		if name, ok := strings.CutPrefix(line, "DEVICE_STUB("); ok {
			names = append(names, name+"@")
		}
	}
	if len(names) < 100 {
		t.Fatalf("only %d stubs in stub_names.h", len(names))
	}
	return names
}

// TestStubs checks the functions that are not simulated: they return "uninitialized" before nvmlInit, then "not
// supported", or "invalid argument" for a bad handle.
func TestStubs(t *testing.T) {
	t.Parallel()
	run(t, newTestNode(t).probe(t, "stubs", stubs(t)...))
}
