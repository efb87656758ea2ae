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
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/suite"
)

// gpus is the resource that both plugins serve.
const gpus = "nvidia.com/gpu"

// serving is a device plugin in a process of its own, and its kubelet. The plugin has a simulated node as its root, and so
// uses the directories that it would use on a real one: those of NVIDIA's cannot be chosen.
type serving struct {
	t       testing.TB
	program string // on this machine
	cmd     proc.Cmd
	machine *sim.Machine
	log     *os.File
	kubelet *kubelettest.Kubelet
	process *proc.Process
	begun   time.Time
	list    []*v1beta1.Device
	client  v1beta1.DevicePluginClient
	// endpoint is the name of the plugin's socket in the kubelet's directory.
	endpoint string
}

// plugins are this project's device plugin and NVIDIA's, unmodified, on the same simulated machine: each is told to answer
// with CDI names, and to give nothing besides GPUs.
func plugins(t testing.TB, machine string) (our, their *serving) {
	t.Helper()
	node := simtest.Node(t, machine)
	our = newServing(t, node.Root(), shared.Program(t, "gpu-cdi-plugin"),
		"serve", "--strategy", "cdi-cri", "--hook-path", "/usr/bin/prestart-hook")
	their = newServing(t, node.Root(), shared.NodePeer(t, "nvidia-device-plugin"),
		"--device-list-strategy", "cdi-cri", "--driver-root-ctr-path", "/",
		"--gdrcopy-enabled=false", "--gds-enabled=false", "--mofed-enabled=false")
	suite.Install(t, node.Root(), our.program, their.program, shared.Program(t, "prestart-hook"))
	// In the node's /proc are the driver's files; a process finds itself there too.
	if err := os.Symlink("/run/proc/self", filepath.Join(node.Root(), "proc/self")); err != nil && !errors.Is(err, fs.ErrExist) {
		t.Fatal(err)
	}
	our.machine, their.machine = node.Machine(), node.Machine()
	return our, their
}

func newServing(t testing.TB, root, program string, args ...string) *serving {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(t.TempDir(), "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	s := &serving{t: t, program: program, log: log, kubelet: kubelettest.New(t)}
	s.cmd = proc.Cmd{
		Args:   append([]string{filepath.Join("/usr/bin", filepath.Base(program))}, args...),
		Dir:    "/",
		Env:    []string{"PATH=/usr/sbin:/usr/bin"},
		Chroot: root,
	}
	s.kubelet.Start()
	t.Cleanup(func() {
		s.end()
		_ = log.Close()
	})
	return s
}

// start starts the plugin, and returns how long it took until the kubelet was asked to register it, and until the kubelet
// had its list of all GPUs. What a plugin wrote into /run before is gone, as after a boot.
func (s *serving) start() (registered, listed time.Duration) {
	s.t.Helper()
	s.end()
	err := proc.OnThread(func() error {
		if err := s.mount(); err != nil {
			return err
		}
		var err error
		s.begun = time.Now()
		s.process, err = proc.Start(s.cmd, s.log)
		return err
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return s.registered(s.begun)
}

// registered waits for the kubelet to have the list, and returns how long after begin it was asked, and how long until then.
func (s *serving) registered(begin time.Time) (registered, listed time.Duration) {
	s.t.Helper()
	e := s.kubelet.WaitFor(gpus, func(list []*v1beta1.Device) bool { return len(list) == len(s.machine.GPUs) })
	listed = time.Since(begin)
	s.list, s.client, s.endpoint = s.kubelet.Devices(gpus), e.Client, e.Request.GetEndpoint()
	return s.kubelet.Asked().Sub(begin), listed
}

// mount gives the calling thread mounts of its own. In the node there are the kubelet's directory, and, in memory as on a
// node, what the plugins have in /run. The mounts end with the last process that has them.
func (s *serving) mount() error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("get mounts of one's own: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep one's mounts to oneself: %w", err)
	}
	return errors.Join(
		s.mountOn("/var/lib/kubelet/device-plugins", s.kubelet.Dir, "", unix.MS_BIND, ""),
		s.mountOn("/run/cdi", "tmpfs", "tmpfs", 0, "mode=755"), // root's alone, as on a node
		s.mountOn("/run/gpu-cdi-plugin", "tmpfs", "tmpfs", 0, "mode=755"),
		s.mountOn("/run/proc", "proc", "proc", 0, ""),
	)
}

func (s *serving) mountOn(dir, source, fstype string, flags uintptr, data string) error {
	at := filepath.Join(s.cmd.Chroot, dir)
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(source, at, fstype, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", source, at, err)
	}
	return nil
}

// end ends the plugin, if it runs, and waits until the kubelet knows.
func (s *serving) end() {
	s.t.Helper()
	if s.process == nil {
		return
	}
	if err := s.process.Signal(syscall.SIGTERM); err != nil || s.process.Code() != 0 {
		s.t.Fatalf("%s ends with %d, %v", s.cmd.Args[0], s.process.Code(), err)
	}
	s.process = nil
	s.kubelet.WaitGone(gpus)
}

// allocate allocates GPUs.
func (s *serving) allocate(ids ...string) (*v1beta1.AllocateResponse, error) {
	return s.client.Allocate(s.t.Context(), &v1beta1.AllocateRequest{
		ContainerRequests: []*v1beta1.ContainerAllocateRequest{{DevicesIds: ids}},
	})
}

// prefersTheBest asks for two of GPUs 0, 6 and 7, and expects 6 and 7: on the machines with eight GPUs they are on one NUMA
// node, and GPU 0 is on the other.
func (s *serving) prefersTheBest() {
	s.t.Helper()
	request := &v1beta1.ContainerPreferredAllocationRequest{AllocationSize: 2}
	for _, g := range []int{0, 6, 7} {
		request.AvailableDeviceIDs = append(request.AvailableDeviceIDs, s.machine.GPUs[g].UUID)
	}
	answer, err := s.client.GetPreferredAllocation(s.t.Context(), &v1beta1.PreferredAllocationRequest{
		ContainerRequests: []*v1beta1.ContainerPreferredAllocationRequest{request},
	})
	if err != nil {
		s.t.Fatal(err)
	}
	got := slices.Sorted(slices.Values(answer.GetContainerResponses()[0].GetDeviceIDs()))
	want := slices.Sorted(slices.Values(request.GetAvailableDeviceIDs()[1:]))
	if !slices.Equal(got, want) {
		s.t.Fatalf("%s prefers %v, want GPUs 6 and 7", s.program, got)
	}
}

// ids are the names of the listed GPUs.
func (s *serving) ids() []string {
	var ids []string
	for _, d := range s.list {
		ids = append(ids, d.GetID())
	}
	return ids
}
