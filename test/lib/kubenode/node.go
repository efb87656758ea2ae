package kubenode

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/proc"
)

// Programs are the paths of a node's programs.
type Programs struct {
	// The runc shim must be in containerd's directory.
	Kubelet, Containerd, Ctr string
	Runc                     string
	// CNI has the directories of the network plugins.
	CNI []string
}

// Find finds the programs: those of the machine, and others in a directory of peers (scripts/peers).
func Find(peers string) (Programs, error) {
	p := Programs{
		Kubelet: filepath.Join(peers, "kubelet"), Containerd: filepath.Join(peers, "containerd"),
		Ctr: filepath.Join(peers, "ctr"),
	}
	var errs []error
	for _, name := range []string{"ip", "iptables"} {
		_, err := proc.Look(name)
		errs = append(errs, err)
	}
	runc, err := proc.Look("runc")
	p.Runc = runc
	plugins, err2 := networkPlugins()
	p.CNI = []string{plugins}
	if err := errors.Join(append(errs, err, err2)...); err != nil {
		return p, fmt.Errorf("%w; scripts/setup installs what a node needs", err)
	}
	return p, nil
}

// networkPlugins returns the directory where the machine has its CNI plugins.
func networkPlugins() (string, error) {
	for _, dir := range []string{"/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni"} {
		if _, err := os.Stat(filepath.Join(dir, "bandwidth")); err == nil {
			return dir, nil
		}
	}
	return "", errors.New("find CNI plugins (Debian's package containernetworking-plugins)")
}

// Options are what differs between nodes.
type Options struct {
	Programs Programs
	// Name is the node's name. The kubelet appends it to the names of static pods.
	Name string
	// Address is the address of the node's interface eth0, which the script Network sets up, with its arguments.
	Address string
	Network []string
	// Pods are the addresses of the node's pods, such as 10.88.7.0/24.
	Pods string
	// Kubelet has settings of the kubelet that replace the ones that all nodes have, Flags its flags besides those.
	Kubelet map[string]any
	Flags   []string
	// Files are the contents of files of the node below /var/lib, by path.
	Files map[string]string
	// Images has PauseImage and those of the node's pods.
	Images []Image
}

// Node is a running node. Its methods are not for concurrent use.
type Node struct {
	*Namespaces
	Programs Programs

	Containerd, Kubelet *Daemon

	name, dir string // the path of dir is short, since the paths of sockets are limited
}

// prefix is the prefix of the names of directories and cgroups. It is followed by the ID of the test's process and a
// random number.
const prefix = "gpu-node-"

// MakeDir makes a directory for namespaces. If the process is killed, the next call removes it.
func MakeDir() (string, error) {
	if err := removeLeftovers(); err != nil {
		return "", err
	}
	return os.MkdirTemp("", fmt.Sprintf("%s%d-", prefix, os.Getpid()))
}

// New starts a node and waits until it is ready.
func New(ctx context.Context, o Options) (*Node, error) {
	dir, err := MakeDir()
	if err != nil {
		return nil, err
	}
	n := &Node{Programs: o.Programs, name: o.Name, dir: dir}
	if err := errors.Join(n.write(o), engine.MakeCgroups(n.cgroup()), n.start(ctx, o)); err != nil {
		return nil, errors.Join(fmt.Errorf("start the node %s: %w", o.Name, err), n.Close())
	}
	return n, nil
}

// cgroup returns the parent cgroup of the node's pods.
func (n *Node) cgroup() string { return "/" + filepath.Base(n.dir) }

// write makes the files that the node's programs read.
func (n *Node) write(o Options) error {
	config, err := kubeletConfig(n.cgroup(), o.Kubelet)
	errs := []error{err}
	files := map[string]string{
		containerdFile:               containerdConfig(o.Programs),
		kubeletFile:                  string(config),
		cniConfig + "/pods.conflist": fmt.Sprintf(network, o.Pods),
	}
	maps.Copy(files, o.Files)
	for path, content := range files {
		file := (&Namespaces{dir: n.dir}).Host(path)
		errs = append(errs, os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(content), 0o644))
	}
	return errors.Join(errs...)
}

func (n *Node) start(ctx context.Context, o Options) (err error) {
	if n.Namespaces, err = NewNamespaces(n.dir, o.Network[0], o.Network[1:]...); err != nil {
		return err
	}
	n.Containerd = n.NewDaemon("containerd", o.Programs.Containerd, "--config", containerdFile)
	n.Kubelet = n.NewDaemon("kubelet", append([]string{
		o.Programs.Kubelet, "--config=" + kubeletFile, "--hostname-override=" + o.Name, "--node-ip=" + o.Address, "--v=2",
	}, o.Flags...)...)
	if err := os.MkdirAll(n.Host(StaticPods), 0o755); err != nil {
		return err
	}
	if err := n.StartContainerd(ctx); err != nil {
		return err
	}
	for _, image := range o.Images {
		if err := n.Load(ctx, image); err != nil {
			return err
		}
	}
	return n.StartKubelet(ctx)
}

// StartContainerd starts containerd and waits until it serves the kubelet's API, which is the last one that it serves.
func (n *Node) StartContainerd(ctx context.Context) error {
	if err := n.Containerd.Start(); err != nil {
		return err
	}
	return n.Containerd.WithLog(Wait(ctx, startTime, "containerd serves", func() error { return n.callRuntime(ctx) }))
}

// callRuntime gets the version of containerd's runtime service, like the first call of a kubelet. The version is
// ignored; an empty message is a valid request.
func (n *Node) callRuntime(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+n.Host(containerdSocket),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	return conn.Invoke(ctx, "/runtime.v1.RuntimeService/Version", new(emptypb.Empty), new(emptypb.Empty))
}

// StartKubelet starts the kubelet and waits until it serves device plugins and the status of its pods.
func (n *Node) StartKubelet(ctx context.Context) error {
	if err := n.Kubelet.Start(); err != nil {
		return err
	}
	return n.Kubelet.WithLog(Wait(ctx, startTime, "the kubelet serves", func() error {
		_, err := n.KubeletPods(ctx)
		return err
	}))
}

// KubeletPods returns the list of the kubelet's pods as JSON.
func (n *Node) KubeletPods(ctx context.Context) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	url := fmt.Sprintf("http://%s/pods", net.JoinHostPort(Loopback, strconv.Itoa(readOnlyPort)))
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := n.HTTPClient().Do(req)
	if err != nil {
		return nil, fmt.Errorf("get the kubelet's pods: %w", err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("get the kubelet's pods: %s: %s", resp.Status, data)
	}
	return data, err
}

// HTTPClient returns an HTTP client in the namespaces' network.
func (ns *Namespaces) HTTPClient() *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: ns.Dial, DisableKeepAlives: true}}
}

// Ctr runs containerd's client. An exit status other than 0 is an error.
func (n *Node) Ctr(ctx context.Context, args ...string) error {
	res, err := n.Run(ctx, append([]string{n.Programs.Ctr, "--namespace", "k8s.io"}, args...)...)
	if err == nil && res.Code != 0 {
		err = fmt.Errorf("ctr %s: %v", strings.Join(args, " "), res)
	}
	return err
}

// Close stops the node and removes its files and cgroups.
func (n *Node) Close() error {
	var errs []error
	if n.Namespaces != nil {
		errs = append(errs, n.Namespaces.Close())
	}
	return errors.Join(append(errs, RemoveDir(n.dir))...)
}

// RemoveDir removes the directory of closed namespaces, and its cgroups. It retries, since the kernel may take a moment
// to release them.
func RemoveDir(dir string) error {
	err := Wait(context.Background(), removeTime, "the files and cgroups are removed", func() error {
		return errors.Join(engine.RemoveCgroups("/"+filepath.Base(dir)), os.RemoveAll(dir))
	})
	if err != nil {
		return fmt.Errorf("remove what is left of the namespaces in %s: %w", dir, err)
	}
	return nil
}

// removeLeftovers removes the files and cgroups of namespaces whose process was killed.
func removeLeftovers() error {
	var errs []error
	for _, pattern := range []string{os.TempDir(), "/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		found, err := filepath.Glob(filepath.Join(pattern, prefix+"*"))
		errs = append(errs, err)
		for _, path := range found {
			number, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), prefix), "-")
			pid, err := strconv.Atoi(number)
			if err == nil && errors.Is(unix.Kill(pid, 0), syscall.ESRCH) {
				errs = append(errs, RemoveDir(filepath.Join(os.TempDir(), filepath.Base(path))))
			}
		}
	}
	return errors.Join(errs...)
}

// Timeouts for a busy machine with two processors.
const (
	startTime  = time.Minute
	removeTime = time.Minute
)

// Wait calls f until it returns no error.
func Wait(ctx context.Context, limit time.Duration, what string, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait %v until %s: %w", limit, what, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
