package kubelet

import (
	"context"
	"errors"
	"fmt"
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

// Node is a running node. Its methods are not for concurrent use.
type Node struct {
	programs Programs
	dir      string // short, since the paths of sockets are limited
	ns       *namespaces

	Containerd, Kubelet *Daemon
}

// prefix is the prefix of the names of nodes' directories and cgroups. It is followed by the ID of the test's process
// and a random number.
const prefix = "gpu-node-"

// New starts a node with these images and waits until it is ready.
func New(ctx context.Context, p Programs, images ...Image) (*Node, error) {
	if err := removeLeftovers(); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", fmt.Sprintf("%s%d-", prefix, os.Getpid()))
	if err != nil {
		return nil, err
	}
	n := &Node{programs: p, dir: dir}
	if err := errors.Join(n.write(), engine.MakeCgroups(n.cgroup()), n.start(ctx, images)); err != nil {
		return nil, errors.Join(fmt.Errorf("start a node: %w", err), n.Close())
	}
	return n, nil
}

// cgroup returns the parent cgroup of the node's pods.
func (n *Node) cgroup() string { return "/" + filepath.Base(n.dir) }

// Host returns the path on the machine of a file in the node's /run, /var/lib or /var/log.
func (n *Node) Host(path string) string {
	dirs := map[string]string{"/run/": "run", "/var/run/": "run", "/var/lib/": "lib", "/var/log/": "log"}
	for inside, outside := range dirs {
		if rest, ok := strings.CutPrefix(path, inside); ok {
			return filepath.Join(n.dir, outside, rest)
		}
	}
	return path
}

// write makes the node's directory.
func (n *Node) write() error {
	config, err := kubeletConfig(n.cgroup())
	errs := []error{err}
	for _, d := range []string{n.dir + "/log", n.dir + "/run", n.dir + "/sysctl", n.Host(staticPods)} {
		errs = append(errs, os.MkdirAll(d, 0o755))
	}
	for path, content := range map[string]string{
		"/var/lib/containerd.toml":   containerdConfig(n.programs.Runc, n.programs.CNI),
		"/var/lib/kubelet.yaml":      string(config),
		cniConfig + "/pods.conflist": network,
	} {
		file := n.Host(path)
		errs = append(errs, os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(content), 0o644))
	}
	return errors.Join(errs...)
}

func (n *Node) start(ctx context.Context, images []Image) (err error) {
	if n.ns, err = newNamespaces(n.dir); err != nil {
		return err
	}
	n.Containerd = n.NewDaemon("containerd", n.programs.Containerd, "--config", "/var/lib/containerd.toml")
	n.Kubelet = n.NewDaemon("kubelet", n.programs.Kubelet, "--config=/var/lib/kubelet.yaml",
		"--hostname-override="+nodeName, "--node-ip="+nodeIP, "--v=2")
	if err := n.StartContainerd(ctx); err != nil {
		return err
	}
	for _, image := range images {
		if err := n.load(ctx, image); err != nil {
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
	return n.Containerd.withLog(wait(ctx, startTime, "containerd serves", func() error { return n.callRuntime(ctx) }))
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
	err := wait(ctx, startTime, "the kubelet serves", func() error {
		_, err := n.pods(ctx)
		return err
	})
	return n.Kubelet.withLog(err)
}

// Run runs a program in the node's namespaces.
func (n *Node) Run(ctx context.Context, args ...string) (res proc.Result, err error) {
	err = n.ns.within(func() error {
		res, err = proc.Run(ctx, proc.Cmd{Args: args, Env: n.env()})
		return err
	})
	return res, err
}

// ctr runs containerd's client. An exit status other than 0 is an error.
func (n *Node) ctr(ctx context.Context, args ...string) error {
	res, err := n.Run(ctx, append([]string{n.programs.Ctr, "--namespace", "k8s.io"}, args...)...)
	if err == nil && res.Code != 0 {
		err = fmt.Errorf("ctr %s: %v", strings.Join(args, " "), res)
	}
	return err
}

// env returns the environment of programs. containerd searches PATH for its shim.
func (n *Node) env() []string {
	return []string{"PATH=" + filepath.Dir(n.programs.Containerd) + ":" + searchPath, "HOME=/root", "TMPDIR=/tmp"}
}

// RemovePods removes all pods and waits for their end.
func (n *Node) RemovePods(ctx context.Context) error {
	manifests, err := os.ReadDir(n.Host(staticPods))
	errs := []error{err}
	for _, m := range manifests {
		errs = append(errs, os.Remove(filepath.Join(n.Host(staticPods), m.Name())))
	}
	return errors.Join(append(errs, n.awaitNoPods(ctx))...)
}

// Close stops the node and removes its files and cgroups.
func (n *Node) Close() error {
	var errs []error
	if n.ns != nil {
		errs = append(errs, n.ns.Close())
	}
	return errors.Join(append(errs, remove(n.dir))...)
}

// remove removes a node's directory and its cgroups. It retries, since the kernel may take a moment to release them.
func remove(dir string) error {
	err := wait(context.Background(), removeTime, "the node's files and cgroups are removed", func() error {
		return errors.Join(engine.RemoveCgroups("/"+filepath.Base(dir)), os.RemoveAll(dir))
	})
	if err != nil {
		return fmt.Errorf("remove the node in %s: %w", dir, err)
	}
	return nil
}

// removeLeftovers removes the files and cgroups of nodes whose process was killed.
func removeLeftovers() error {
	var errs []error
	for _, pattern := range []string{os.TempDir(), "/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		found, err := filepath.Glob(filepath.Join(pattern, prefix+"*"))
		errs = append(errs, err)
		for _, path := range found {
			number, _, _ := strings.Cut(strings.TrimPrefix(filepath.Base(path), prefix), "-")
			pid, err := strconv.Atoi(number)
			if err == nil && errors.Is(unix.Kill(pid, 0), syscall.ESRCH) {
				errs = append(errs, remove(filepath.Join(os.TempDir(), filepath.Base(path))))
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

// wait calls f until it returns no error.
func wait(ctx context.Context, limit time.Duration, what string, f func() error) error {
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
