package doctor

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/host"
	managerconfig "gpu-cdi-plugin/manager/config"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// testHost is a simulated host on which nothing is wrong, until a test makes a fault.
type testHost struct {
	t       *testing.T
	node    *sim.Node
	kubelet *kubelettest.Kubelet // nil on a workstation
	options Options
}

// newHost makes a simulated machine with what every host has.
func newHost(t *testing.T, machine string) *testHost {
	t.Helper()
	n := simtest.Node(t, machine)
	h := &testHost{t: t, node: n}
	paths, err := host.New(n.Root(), "", "")
	testenv.Must(t, err)
	h.options = Options{
		Host: paths, CDIDir: h.at("run/cdi"), CDIKind: cdi.DefaultKind, Hook: h.at("usr/libexec/prestart-hook"),
		Systemd: filepath.Join(t.TempDir(), "none"), Capabilities: driver.All, StateDir: h.at("var/lib/gpu-cdi-plugin"),
		PluginDir: h.at("var/lib/kubelet/device-plugins"), RegistryDir: h.at("var/lib/kubelet/plugins_registry"),
		Devices:     func(context.Context) (*gpu.Snapshot, error) { return n.Snapshot() },
		Advice:      func(error) string { return "" },
		TrustedFile: func(string) error { return nil },
		TrustedHook: func(string) error { return nil },
		TrustedDir:  func(string) error { return nil },
		CheckConfig: func(data []byte) error {
			c := config.Default()
			_, err := config.Keys.Parse(data, &c)
			return err
		},
		CheckManagerConfig: func(data []byte) error {
			c := managerconfig.Default()
			_, err := managerconfig.Keys.Parse(data, &c)
			return errors.Join(err, c.Validate())
		},
	}
	h.write("sys/fs/cgroup/cgroup.controllers", "cpu memory pids\n")
	h.write("proc/sys/fs/inotify/max_user_instances", "128\n")
	h.link("proc/thread-self/ns/pid", "pid:[4026531836]")
	h.link("proc/thread-self/ns/mnt", "mnt:[1]")
	h.link("proc/1/ns/mnt", "mnt:[1]")
	h.program("usr/libexec/prestart-hook")
	h.write("usr/bin/nvidia-modprobe", modprobe)
	testenv.Must(t, os.Chmod(h.at("usr/bin/nvidia-modprobe"), 0o755))
	h.writeSpec()
	return h
}

// workstation is a Debian 12 with podman.
func workstation(t *testing.T) *testHost {
	t.Helper()
	h := newHost(t, "workstation")
	h.program("usr/bin/podman")
	h.program("usr/bin/crun")
	h.packages("podman", "4.3.1+ds1-8+deb12u1")
	h.write("usr/share/containers/containers.conf", "[containers]\n[engine]\n#hooks_dir = []\n")
	h.write("etc/containers/registries.conf", "")
	return h
}

// kubeNode is a node of a cluster, with containerd 2 and a kubelet that runs.
func kubeNode(t *testing.T) *testHost {
	t.Helper()
	return withKubelet(newHost(t, "workstation"))
}

// dgxNode is a DGX in a cluster.
func dgxNode(t *testing.T) *testHost {
	t.Helper()
	return withKubelet(newHost(t, "dgx-h100"))
}

func withKubelet(h *testHost) *testHost {
	t := h.t
	t.Helper()
	h.kubelet = kubelettest.New(t)
	h.kubelet.Pods.Allocatable = map[string][]string{}
	h.kubelet.Start()
	h.options.PluginDir = h.kubelet.Dir
	h.program("usr/bin/kubelet")
	h.program("usr/bin/containerd")
	h.program("usr/bin/runc")
	h.packages("kubelet", "1.36.3-1.1", "containerd.io", "2.1.4-1~debian.12~bookworm")
	h.write("etc/containerd/config.toml", "version = 3\n")
	h.write("var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\ncgroupDriver: systemd\n"+
		"containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\npodPidsLimit: -1\n")
	h.runKubelet("/usr/bin/kubelet", "--config=/var/lib/kubelet/config.yaml")
	h.linkNodes()
	return h
}

// linkNodes makes the links in /dev/char by which systemd finds the device nodes.
func (h *testHost) linkNodes() {
	h.t.Helper()
	for _, name := range h.deviceNodes() {
		var st unix.Stat_t
		testenv.Must(h.t, unix.Lstat(h.at(name), &st))
		h.link(fmt.Sprintf("dev/char/%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev)), "/"+name)
	}
}

// mount mounts a tmpfs on a directory of the host, in a mount namespace of the test's thread.
func (h *testHost) mount(name string, flags uintptr) {
	h.t.Helper()
	testenv.MountNamespace(h.t)
	dir := h.at(name)
	testenv.Must(h.t, os.MkdirAll(dir, 0o755), unix.Mount("none", dir, "tmpfs", flags, ""))
	h.t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

func (h *testHost) at(name string) string { return filepath.Join(h.node.Root(), name) }

// write writes a file of the host, with the directories above it.
func (h *testHost) write(name, text string) {
	h.t.Helper()
	testenv.Must(h.t, os.MkdirAll(filepath.Dir(h.at(name)), 0o755), os.WriteFile(h.at(name), []byte(text), 0o644))
}

func (h *testHost) program(name string) {
	h.t.Helper()
	h.write(name, "#!/bin/sh\n")
	testenv.Must(h.t, os.Chmod(h.at(name), 0o755))
}

func (h *testHost) link(name, target string) {
	h.t.Helper()
	testenv.Must(h.t, os.MkdirAll(filepath.Dir(h.at(name)), 0o755))
	if err := os.Remove(h.at(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		h.t.Fatal(err)
	}
	testenv.Must(h.t, os.Symlink(target, h.at(name)))
}

func (h *testHost) remove(names ...string) {
	h.t.Helper()
	for _, name := range names {
		testenv.Must(h.t, os.RemoveAll(h.at(name)))
	}
}

// number gives a device node another number.
func (h *testHost) number(name string, number uint64) {
	h.t.Helper()
	h.remove(name)
	testenv.Must(h.t, unix.Mknod(h.at(name), unix.S_IFCHR|0o666, int(number)))
}

// unbind takes the second GPU from the driver, and gives it to another one, or none.
func (h *testHost) unbind(driver string) {
	h.t.Helper()
	link := "sys/bus/pci/devices/" + h.node.Machine().GPUs[1].Bus + "/driver"
	h.remove(link)
	if driver != "" {
		h.link(link, "../../../bus/pci/drivers/"+driver)
	}
}

// packages writes dpkg's list of installed packages: names and versions.
func (h *testHost) packages(list ...string) {
	h.t.Helper()
	var text strings.Builder
	for pair := range slices.Chunk(list, 2) {
		fmt.Fprintf(&text, "Package: %s\nStatus: install ok installed\nVersion: %s\n\n", pair[0], pair[1])
	}
	h.write("var/lib/dpkg/status", text.String())
}

// runKubelet makes /proc have a kubelet with a command line.
func (h *testHost) runKubelet(args ...string) {
	h.t.Helper()
	h.write("proc/4711/comm", "kubelet\n")
	h.write("proc/4711/cmdline", strings.Join(args, "\x00")+"\x00")
	h.write("proc/4711/status", "Name:\tkubelet\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n")
	h.link("proc/4711/ns/mnt", "mnt:[1]")
}

// deviceNodes returns the driver's device nodes.
func (h *testHost) deviceNodes() []string {
	h.t.Helper()
	var list []string
	for _, pattern := range []string{"dev/nvidia*", "dev/nvidia-caps/*"} {
		names, err := filepath.Glob(h.at(pattern))
		testenv.Must(h.t, err)
		for _, name := range names {
			if info, err := os.Lstat(name); err == nil && info.Mode()&fs.ModeDevice != 0 {
				list = append(list, strings.TrimPrefix(name, h.node.Root()+"/"))
			}
		}
	}
	return list
}

// writeSpec writes the spec that the host should have.
func (h *testHost) writeSpec() {
	h.t.Helper()
	s, err := h.node.Snapshot()
	testenv.Must(h.t, err)
	d, err := driver.Discover(h.options.Host, s.DriverVersion)
	testenv.Must(h.t, err)
	spec, _, err := cdi.Generate(s, d, cdi.Options{
		Kind: cdi.DefaultKind, HookPath: h.options.Hook, WithoutHooks: h.options.Hook == "",
		Capabilities: h.options.Capabilities,
	})
	testenv.Must(h.t, err, os.MkdirAll(h.options.CDIDir, 0o755),
		cdi.WriteFile(filepath.Join(h.options.CDIDir, cdi.FileName(cdi.DefaultKind)), spec))
}

// enable makes a unit of systemd start at a boot.
func (h *testHost) enable(unit string) {
	h.t.Helper()
	h.link("etc/systemd/system/multi-user.target.wants/"+unit, "/usr/lib/systemd/system/"+unit)
}

// install installs the units of this product, and enables them.
func (h *testHost) install(units ...string) {
	h.t.Helper()
	for _, name := range units {
		text, err := os.ReadFile("../../../deploy/units/" + name)
		testenv.Must(h.t, err)
		h.write("usr/lib/systemd/system/"+name, string(text))
		h.enable(name)
	}
}

// systemd answers like systemd, for units of which it knows the active state, the sub-state and the result.
func (h *testHost) systemd(states map[string][3]string) {
	h.t.Helper()
	h.write("run/systemd/system/x", "")
	h.options.Systemd = filepath.Join(h.t.TempDir(), "systemd")
	l := h.listen(h.options.Systemd)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			answerAsSystemd(conn, states)
		}
	}()
}

// answerAsSystemd answers the calls of one client until it closes the connection.
func answerAsSystemd(conn net.Conn, states map[string][3]string) {
	defer conn.Close()
	if _, err := conn.Read(make([]byte, 4096)); err != nil {
		return
	}
	if _, err := conn.Write([]byte("OK 0123456789abcdef0123456789abcdef\r\nAGREE_UNIX_FD\r\n")); err != nil {
		return
	}
	in, name := bufio.NewReader(conn), ""
	for {
		request, err := dbus.DecodeMessage(in)
		if err != nil {
			return
		}
		var value any = dbus.ObjectPath("/unit")
		switch state := states[name]; request.Body[len(request.Body)-1] {
		case "ActiveState":
			value = dbus.MakeVariant(cmp.Or(state[0], "inactive"))
		case "SubState":
			value = dbus.MakeVariant(cmp.Or(state[1], "dead"))
		case "Result":
			value = dbus.MakeVariant(cmp.Or(state[2], "success"))
		case "NRestarts":
			value = dbus.MakeVariant(uint32(7))
		default: // LoadUnit
			name, _ = request.Body[0].(string)
		}
		reply := &dbus.Message{
			Type: dbus.TypeMethodReply, Body: []any{value}, Headers: map[dbus.HeaderField]dbus.Variant{
				dbus.FieldReplySerial: dbus.MakeVariant(request.Serial()),
				dbus.FieldSignature:   dbus.MakeVariant(dbus.SignatureOf(value)),
			},
		}
		if err := reply.EncodeTo(conn, binary.LittleEndian); err != nil {
			return
		}
	}
}

// refresh installs the units of NVIDIA's toolkit that write a spec.
func (h *testHost) refresh(dir string) {
	h.t.Helper()
	h.write(dir+"/nvidia-cdi-refresh.path", "[Path]\nPathChanged=/lib/modules\n[Install]\nWantedBy=multi-user.target\n")
	h.write(dir+"/nvidia-cdi-refresh.service", "[Service]\nExecStart=/usr/bin/nvidia-ctk cdi generate\n"+
		"[Install]\nWantedBy=multi-user.target\n")
}

// foreignSpec writes a spec of another program with this host's GPUs.
func (h *testHost) foreignSpec(name string) {
	h.t.Helper()
	s, err := h.node.Snapshot()
	testenv.Must(h.t, err)
	edits := specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidia0", HostPath: h.at("dev/nvidia0")}}}
	spec := &specs.Spec{Version: "0.5.0", Kind: cdi.DefaultKind, Devices: []specs.Device{
		{Name: "0", ContainerEdits: edits}, {Name: s.Devices[0].UUID, ContainerEdits: edits},
	}}
	testenv.Must(h.t, os.MkdirAll(filepath.Dir(h.at(name)), 0o755), cdi.WriteFile(h.at(name), spec))
}

// specVersion changes the version of a spec.
func (h *testHost) specVersion(name, version string) {
	h.t.Helper()
	text, err := os.ReadFile(h.at(name))
	testenv.Must(h.t, err)
	h.write(name, strings.Replace(string(text), "0.5.0", version, 1))
}

// listen makes a program answer at a socket of a device plugin. With a nil plugin it only accepts connections.
func (h *testHost) listen(socket string) net.Listener {
	h.t.Helper()
	testenv.Must(h.t, os.MkdirAll(filepath.Dir(socket), 0o755))
	l, err := net.Listen("unix", socket)
	testenv.Must(h.t, err)
	h.t.Cleanup(func() { _ = l.Close() })
	return l
}

// examine examines the host, and checks that this changes none of its files.
func (h *testHost) examine() []Finding {
	h.t.Helper()
	before := h.files()
	list := Examine(h.t.Context(), h.options)
	if after := h.files(); !slices.Equal(before, after) {
		h.t.Error("the examination has changed files of the host")
	}
	return list
}

// files returns the path, size and time of each of the host's files.
func (h *testHost) files() []string {
	h.t.Helper()
	var list []string
	testenv.Must(h.t, filepath.WalkDir(h.node.Root(), func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		list = append(list, fmt.Sprintln(path, info.Size(), info.Mode(), info.ModTime()))
		return nil
	}))
	return list
}
