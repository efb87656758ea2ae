package agent

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

func mixed(c *config.Config) { c.MIGStrategy = resource.MIGMixed }

func TestAdministratorFindsDevices(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "mig-h100", mixed)
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 2, 0)
	gpus := f.driver.snapshot.Devices
	mig := gpus[0].MIG[1]
	for name, c := range map[string]struct{ device, want, wrong string }{
		"a GPU by its index":            {"6", "GPU 6 (" + gpus[6].UUID + ") is cordoned", ""},
		"a GPU by its UUID":             {gpus[7].UUID, "GPU 7 (" + gpus[7].UUID + ") is cordoned", ""},
		"a MIG device by its index":     {"0:1", "MIG device 0:1 (" + mig.UUID + ") is cordoned", ""},
		"a MIG device by its UUID":      {mig.UUID, "MIG device 0:1 (" + mig.UUID + ") is cordoned", ""},
		"an index that no GPU has":      {"8", "", `the driver of this host has no device "8"`},
		"an index that no device has":   {"6:0", "", `the driver of this host has no device "6:0"`},
		"a UUID that no device has":     {"GPU-unknown", "", `the driver of this host has no device "GPU-unknown"`},
		"the beginning of a GPU's UUID": {gpus[6].UUID[:12], "", `the driver of this host has no device`},
	} {
		t.Run(name, func(t *testing.T) {
			for act, reason := range map[control.Act]string{control.Cordon: "a fan is loud", control.Uncordon: ""} {
				got, err := f.send(control.Request{Act: act, Device: c.device, Reason: reason})
				wantError(t, err, c.wrong)
				if !strings.HasPrefix(strings.Replace(got, "uncordoned", "cordoned", 1), c.want) {
					t.Errorf("%s %s: %q, want %q", act, c.device, got, c.want)
				}
			}
		})
	}
	f.refuses("MIG device 0:1 is a part of a GPU: reset the GPU "+gpus[0].UUID,
		control.Request{Act: control.Reset, Device: "0:1"})
	f.refuses("has no device", control.Request{Act: control.Reset, Device: "8"})
}

// A device on record can be cordoned while it is absent, also before the driver has come.
func TestAdministratorCordonsAbsentDevices(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", func(c *config.Config) { c.FailOnInitError = false })
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 4, 0)
	f.does("is cordoned", control.Request{Act: control.Cordon, Device: "1", Reason: "it is old"})
	f.driver.set(func() { f.driver.snapshot.Devices = f.driver.snapshot.Devices[:3] })
	f.reconfigure(func(*config.Config) {}) // has the GPUs read again
	f.kubelet.WaitListed(gpuResource, 2, 1)
	all := newFakeDriver(t, f.node).snapshot.Devices
	f.does("the absent device ("+all[3].UUID+") is cordoned",
		control.Request{Act: control.Cordon, Device: all[3].UUID, Reason: "x"})
	f.stop()
	testenv.Must(t, f.result())

	f.driver.set(func() {
		f.driver.snapshot.Devices = all
		f.driver.err = fmt.Errorf("%w: the module is not loaded", gpu.ErrNoDriver)
	})
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 0, 0)
	f.does("the absent device ("+all[2].UUID+") is cordoned",
		control.Request{Act: control.Cordon, Device: all[2].UUID, Reason: "a fan is loud"})
	f.does("the absent device ("+all[1].UUID+") is uncordoned",
		control.Request{Act: control.Uncordon, Device: all[1].UUID})
	f.refuses("no device", control.Request{Act: control.Cordon, Device: "GPU-unknown", Reason: "x"})
	f.refuses("no device", control.Request{Act: control.Reset, Device: all[2].UUID})
	f.driver.set(func() { f.driver.err = nil })
	f.kubelet.WaitListed(gpuResource, 2, 2)
	f.does("GPU 2 ("+all[2].UUID+") is uncordoned", control.Request{Act: control.Uncordon, Device: "2"})
	f.kubelet.WaitListed(gpuResource, 3, 1)
}

// An allocation is what Allocate answered: the CDI names of the devices that the kubelet says a container has.
func TestAllocation(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 4, 0)
	name := func(index int) string { return "nvidia.com/gpu=" + f.uuid(index) }
	two := kubelettest.Pod("team-a", "job", "main", gpuResource, f.uuid(2), f.uuid(1)+"::0")
	two.Containers = append(two.Containers, kubelettest.Pod("", "", "other", gpuResource, f.uuid(0)).GetContainers()...)
	f.kubelet.Pods.Set(two,
		kubelettest.Pod("team-b", "job", "main", "acme.com/renamed", f.uuid(3)),
		kubelettest.Pod("team-b", "nic", "main", "acme.com/nic", "eth0"),
	)
	const none = "the kubelet gave the container no device of this plugin"
	for title, c := range map[string]struct {
		container string
		want      []string
		wrong     string
	}{
		"a GPU and a replica":              {"team-a/job/main", []string{name(1), name(2)}, ""},
		"another container of the pod":     {"team-a/job/other", []string{name(0)}, ""},
		"a pod of the same name":           {"team-b/job/main", []string{name(3)}, ""},
		"a device of another plugin":       {"team-b/nic/main", nil, none},
		"a container that the pod lacks":   {"team-a/job/init", nil, none},
		"a pod that the kubelet knows not": {"team-b/gone/main", nil, none},
	} {
		t.Run(title, func(t *testing.T) {
			got, err := f.send(allocationOf(c.container))
			wantError(t, err, c.wrong)
			slices.Sort(c.want)
			if want := strings.Join(c.want, ","); got != want {
				t.Errorf("%q, want %q", got, want)
			}
		})
	}
	f.kubelet.StopPods()
	f.refuses("does not exist although", allocationOf("team-a/job/main"))
}

// A reset waits for processes that only have the device node open, which --force does not excuse.
func TestAProcessWithTheNodeOpenUsesTheGPU(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	if err := proc.SeesAll("/proc"); err != nil {
		testenv.Skip(t, "other processes are seen only in the host's PID namespace: "+err.Error())
	}
	dev := t.TempDir()
	h, err := host.New("/", "", dev)
	testenv.Must(t, err)
	testenv.Must(t, os.MkdirAll(h.Dev(), 0o755))
	testenv.Must(t, unix.Mknod(h.Dev("nvidia1"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 7)))) // /dev/full
	node, err := os.Open(h.Dev("nvidia1"))
	if err != nil {
		testenv.Skip(t, "needs to open device nodes: "+err.Error())
	}
	defer node.Close()
	cmd := exec.Command("sleep", "1000")
	cmd.ExtraFiles = []*os.File{node}
	testenv.Must(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()

	f := newFixture(t, "pcie-quad")
	devs := &devices{host: h, config: &current{}}
	devs.config.Store(&f.opts.Config)
	a := &administrator{
		devices: devs, runner: prepare.New(prepare.Options{Host: h, Driver: f.driver, State: devs, Log: f.opts.Log}),
		ledger: ledger.New(ledger.Options{
			Kubelet: &podresources.Source{Host: h, PluginDir: t.TempDir()}, Changed: wake.New(), Log: f.opts.Log,
		}),
	}
	for _, force := range []bool{false, true} {
		users, err := a.usersOf(t.Context(), &gpu.Device{UUID: f.uuid(1), Minor: 1}, force)
		if want := fmt.Sprintf("process %d (sleep", cmd.Process.Pid); err != nil || len(users) != 1 ||
			!strings.HasPrefix(users[0], want) {
			t.Errorf("force %t: the users are %q, error %v; want %q", force, users, err, want)
		}
	}
	if users, err := a.usersOf(t.Context(), &gpu.Device{UUID: f.uuid(2), Minor: gpu.NoMinor}, false); len(users) > 0 {
		t.Errorf("a GPU without nodes is used by %q, error %v", users, err)
	}
}

// A GPU that is in use is not reset, and is back in service when the reset has been refused.
func TestAdministratorDoesNotResetAGPUInUse(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		given func(*fixture)
		want  string
	}{
		"a container has it": {
			func(f *fixture) { f.kubelet.Pods.Set(kubelettest.Pod("ns", "job", "main", gpuResource, f.uuid(1))) },
			"GPU 1 is in use by container main of pod ns/job; use --wait to wait until it is free",
		},
		"a container has it under another name": {
			func(f *fixture) {
				f.kubelet.Pods.Set(kubelettest.Pod("ns", "job", "main", "acme.com/gpu", f.uuid(1)+"::0"))
			},
			"GPU 1 is in use by container main of pod ns/job; use --wait to wait until it is free",
		},
		"a process that may be in a container uses it": {
			func(f *fixture) {
				f.driver.set(func() { f.driver.use.Processes = []gpu.Process{{PID: 999999999, Compute: true}} })
			},
			"GPU 1 is in use by process 999999999 (not in ",
		},
		"the kubelet does not answer": {
			func(f *fixture) { f.kubelet.StopPods() },
			"the users of GPU 1 are unknown: ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad")
			f.start(Serve)
			f.kubelet.WaitListed(gpuResource, 4, 0)
			c.given(f)
			f.refuses(c.want, control.Request{Act: control.Reset, Device: "1"})
			f.refuses(c.want, control.Request{Act: control.Reset, Device: "1", Force: true})
			f.logs("GPU 1 is held for a reset by an administrator", 2)
			f.kubelet.WaitFor(gpuResource, func(list []*v1beta1.Device) bool {
				held := strings.Contains(name, "another name") // also by the container
				return (list[1].GetHealth() == v1beta1.Healthy) != held
			})
		})
	}
}
