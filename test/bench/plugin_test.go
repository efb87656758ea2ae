package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// resource is the resource that all plugins serve.
const resource = "nvidia.com/gpu"

// plugin is a device plugin in a process of its own, with a kubelet of its own. It has a simulated node as its root,
// since the directories of NVIDIA's plugin are not configurable.
type plugin struct {
	t       testing.TB
	prefix  string // of its metrics
	program string // on this machine
	cmd     proc.Cmd
	machine *sim.Machine
	count   int    // of the devices that it serves
	state   string // the node's /var/lib/gpu-cdi-plugin
	cgroup  string // a memory cgroup for the process, or empty
	log     *os.File
	kubelet *kubelettest.Kubelet

	process *proc.Process
	begun   time.Time
	devices []*v1beta1.Device
	client  v1beta1.DevicePluginClient
	socket  string
}

// newPlugins returns the device plugins to compare: this tree's, the one that GPU_CDI_PLUGIN_BINARY names, and, last,
// NVIDIA's. All are on the same node, have the flags, give CDI names, and nothing besides GPUs.
func newPlugins(t testing.TB, node *sim.Node, flags ...string) []*plugin {
	t.Helper()
	// The node's /proc has the driver's files only; processes need themselves there too.
	for _, name := range []string{"self", "thread-self"} {
		err := os.Symlink("/run/proc/"+name, filepath.Join(node.Root(), "proc", name))
		if err != nil && !errors.Is(err, fs.ErrExist) {
			t.Fatal(err)
		}
	}
	theirs := shared.NodePeer(t, "nvidia-device-plugin")
	var all []*plugin
	for _, b := range install(t, node.Root(), theirs) {
		all = append(all, newPlugin(t, node, b.prefix, b.program,
			slices.Concat([]string{
				"/usr/bin/" + b.name, "serve", "--strategy", "cdi-cri", "--hook-path", "/usr/bin/prestart-hook",
			}, flags)...))
	}
	return append(all, newPlugin(t, node, peer, theirs,
		slices.Concat([]string{
			"/usr/bin/" + filepath.Base(theirs), "--device-list-strategy", "cdi-cri", "--driver-root-ctr-path", "/",
			"--gdrcopy-enabled=false", "--gds-enabled=false", "--mofed-enabled=false",
		}, flags)...))
}

func newPlugin(t testing.TB, node *sim.Node, prefix, program string, args ...string) *plugin {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(t.TempDir(), "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	testenv.Must(t, err)
	p := &plugin{
		t: t, prefix: prefix, program: program, machine: node.Machine(), count: len(node.Machine().GPUs),
		state: t.TempDir(), log: log, kubelet: kubelettest.New(t),
		cmd: proc.Cmd{Args: args, Dir: "/", Env: []string{"PATH=/usr/sbin:/usr/bin"}, Chroot: node.Root()},
	}
	testenv.Must(t, os.Chmod(p.state, 0o755))
	p.kubelet.Start()
	t.Cleanup(func() {
		p.stop()
		_ = log.Close()
	})
	return p
}

// removeState stops the plugin and removes its files, as before its first start on a node.
func (p *plugin) removeState() error {
	p.t.Helper()
	p.stop()
	old, err := filepath.Glob(p.state + "/*")
	for _, file := range old {
		err = errors.Join(err, os.RemoveAll(file))
	}
	return err
}

// start restarts the plugin with an empty /run, as after a boot, and waits until the kubelet has the list of all GPUs.
// It returns the time from the start of the process until the plugin called Register.
func (p *plugin) start() (registered time.Duration) {
	p.t.Helper()
	p.stop()
	err := proc.OnThread(func() error {
		if err := p.mount(); err != nil {
			return err
		}
		cmd := p.cmd
		if p.cgroup != "" {
			cmd.Args = append([]string{"/usr/bin/sh", "-c", `echo $$ >/run/cgroup/cgroup.procs && exec "$@"`, "sh"},
				cmd.Args...)
		}
		var err error
		p.begun = time.Now()
		p.process, err = proc.Start(cmd, p.log)
		return err
	})
	testenv.Must(p.t, err)
	return p.awaitRegistration(p.begun)
}

// awaitRegistration waits until the kubelet has the list of all GPUs, and returns the time from begin until the plugin
// called Register.
func (p *plugin) awaitRegistration(begin time.Time) time.Duration {
	p.t.Helper()
	e := p.kubelet.WaitFor(resource, func(list []*v1beta1.Device) bool { return len(list) == p.count })
	p.devices, p.client = p.kubelet.Devices(resource), e.Client
	p.socket = filepath.Join(p.kubelet.Dir, e.Request.GetEndpoint())
	return p.kubelet.LastRegistration().Sub(begin)
}

// mount gives the calling thread mounts of its own, with the plugin's directories in the node. /run is in memory, as on
// a real node. The mounts end with the last process that has them.
func (p *plugin) mount() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	err := errors.Join(
		p.mountOn("/var/lib/kubelet/device-plugins", p.kubelet.Dir, "", unix.MS_BIND, ""),
		p.mountOn("/var/lib/kubelet/pod-resources", filepath.Dir(p.kubelet.PodsSocket), "", unix.MS_BIND, ""),
		p.mountOn("/var/lib/gpu-cdi-plugin", p.state, "", unix.MS_BIND, ""),
		p.mountOn("/run/cdi", "tmpfs", "tmpfs", 0, "mode=755"),
		p.mountOn("/run/gpu-cdi-plugin", "tmpfs", "tmpfs", 0, "mode=755"),
		p.mountOn("/run/proc", "proc", "proc", 0, ""),
	)
	if p.cgroup != "" {
		err = errors.Join(err, p.mountOn("/run/cgroup", p.cgroup, "", unix.MS_BIND, ""))
	}
	return err
}

func (p *plugin) mountOn(dir, source, fstype string, flags uintptr, data string) error {
	at := filepath.Join(p.cmd.Chroot, dir)
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, at, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", source, at, err)
	}
	return nil
}

// stop ends the plugin, if it runs, and waits until its stream to the kubelet has ended.
func (p *plugin) stop() {
	p.t.Helper()
	if p.process == nil {
		return
	}
	if err := p.process.Signal(syscall.SIGTERM); err != nil || p.process.Code() != 0 {
		log, _ := os.ReadFile(p.log.Name())
		p.t.Fatalf("%s ended with exit status %d, %v\n%s", p.program, p.process.Code(), err, log)
	}
	p.process = nil
	p.kubelet.WaitGone(resource)
}

func (p *plugin) allocate(ids ...string) (*v1beta1.AllocateResponse, error) {
	return p.client.Allocate(p.t.Context(), &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}},
	})
}

// checkPreferred requests the best two of GPUs 0, 6 and 7. They must be 6 and 7: on the machines with eight GPUs these
// are on one NUMA node, and GPU 0 is on another.
func (p *plugin) checkPreferred() {
	p.t.Helper()
	request := &v1beta1.ContainerPreferredAllocationRequest{AllocationSize: 2}
	for _, g := range []int{0, 6, 7} {
		request.AvailableDeviceIDs = append(request.AvailableDeviceIDs, p.machine.GPUs[g].UUID)
	}
	response, err := p.client.GetPreferredAllocation(p.t.Context(), &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{request},
	})
	testenv.Must(p.t, err)
	got := slices.Sorted(slices.Values(response.GetContainerResponses()[0].GetDeviceIDs()))
	want := slices.Sorted(slices.Values(request.GetAvailableDeviceIDs()[1:]))
	if !slices.Equal(got, want) {
		p.t.Fatalf("%s prefers %v, want GPUs 6 and 7", p.program, got)
	}
}

// ids are the device IDs in the plugin's list.
func (p *plugin) ids() []string {
	var ids []string
	for _, d := range p.devices {
		ids = append(ids, d.GetID())
	}
	return ids
}
