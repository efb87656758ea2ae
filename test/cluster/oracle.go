package cluster

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/proc"
)

// Oracle knows which GPUs the running containers of a node have, from their start to their end, and finds GPUs that two
// pods have. It reads neither the API server nor the kubelet nor the plugin: containerd reports the start and the exit
// of each container, the container's OCI spec has its devices, and the mount namespace of its first process has the
// nodes that it can open. It leaves out sandboxes, the namespace kube-system, and privileged containers, which have all
// devices of the node.
type Oracle struct {
	node   *Node
	events *proc.Process
	done   chan struct{}
	// migMinors has the capabilities of compute instances: the minor of the GPU, by that in /dev/nvidia-caps.
	migMinors map[int]int

	mu      sync.Mutex
	seen    int // events
	started int // containers with a GPU
	missed  int // containers that were gone before their spec was read
	unseen  int // containers with a GPU that had ended before their mount namespace was read
	layouts map[int]string
	// admitted has what layouts was when the sandbox of a pod was created, by the pod's UID: the pod has been given its
	// MIG devices by then, and starts containers with them later.
	admitted map[string]map[int]string
	running  map[string]*holder
	found    []string
	err      error
}

// holder is a container that has GPUs.
type holder struct {
	pod, container string // the pod with its namespace
	uid            string // of the pod
	since          time.Time
	// shares means that the pod asked for shares of GPUs.
	shares bool
	gpus   map[int]part // by the GPU's minor
}

// part is what a container has of a GPU: all of it, or the MIG devices whose compute instances are listed by the minors
// of their capabilities, in the layout that the GPU had when the container was created.
type part struct {
	mig    []int
	layout string
}

// sharesVariable is set in the containers of pods that ask for shares of GPUs. Other pods may have such a GPU too.
const sharesVariable = "TEST_SHARES_GPUS"

// StartOracle follows the containers of a node that start from now on.
func StartOracle(ctx context.Context, n *Node) (*Oracle, error) {
	o := &Oracle{
		node: n, done: make(chan struct{}), running: map[string]*holder{}, layouts: map[int]string{},
		admitted:  map[string]map[int]string{},
		migMinors: map[int]int{},
	}
	if err := o.readMIGMinors(filepath.Join(n.GPUs.Root(), "proc/driver/nvidia-caps/mig-minors")); err != nil {
		return nil, err
	}
	output, input, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	err = n.Within(func() (err error) {
		o.events, err = proc.Start(proc.Cmd{Args: []string{n.Programs.Ctr, "--namespace", "k8s.io", "events"}}, input)
		return err
	})
	input.Close()
	if err != nil {
		output.Close()
		return nil, err
	}
	go func() {
		defer close(o.done)
		defer output.Close()
		for lines := bufio.NewScanner(output); lines.Scan(); {
			o.receive(lines.Text())
		}
	}()
	// A change of an image is an event too: when one is received, no later one is missed.
	err = kubenode.Wait(ctx, patience, "containerd's events are received", func() error {
		if err := n.Ctr(ctx, "images", "label", ToolImage, fmt.Sprint("oracle=", time.Now().UnixNano())); err != nil {
			return err
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.seen == 0 {
			return errors.New("none has been")
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, o.Close())
	}
	return o, nil
}

// Close ends the oracle.
func (o *Oracle) Close() error {
	err := o.events.Kill()
	<-o.done
	return err
}

// Err returns an error if a GPU had two holders, or if what a container had is unknown.
func (o *Oracle) Err() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.found) > 0 {
		return fmt.Errorf("GPUs were given twice:\n%s", strings.Join(o.found, "\n"))
	}
	return o.err
}

// Reset forgets what Err returns.
func (o *Oracle) Reset() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.found, o.err = nil, nil
}

// Holders describes the containers that have GPUs now, and says how many have been started.
func (o *Oracle) Holders() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	lines := []string{fmt.Sprintf("%d containers with GPUs have been started on %s (%d had ended before their mount "+
		"namespace was read; %d of all containers before their spec was); these run:", o.started, o.node.Name, o.unseen,
		o.missed)}
	for _, h := range o.running {
		lines = append(lines, h.String())
	}
	slices.Sort(lines[1:])
	return strings.Join(lines, "\n")
}

// SetLayout says which MIG devices a GPU has from now on: a MIG device of another layout is on GPU memory that this
// layout gives to others.
func (o *Oracle) SetLayout(minor int, profiles []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.layouts[minor] = strings.Join(profiles, ",")
}

func (h *holder) String() string {
	return fmt.Sprintf("%s/%s (%s) since %s: %v", h.pod, h.container, h.uid, h.since.Format("15:04:05.000"), h.gpus)
}

func (p part) String() string {
	if len(p.mig) == 0 {
		return "whole"
	}
	return fmt.Sprintf("MIG %v of %s", p.mig, p.layout)
}

// conflicts returns the minors of the GPUs that two containers must not have at the same time. The containers of a pod
// share its GPUs.
func conflicts(a, b *holder) (minors []int) {
	if a.uid == b.uid || a.shares && b.shares {
		return nil
	}
	for minor, one := range a.gpus {
		other, ok := b.gpus[minor]
		apart := len(one.mig) > 0 && len(other.mig) > 0 && one.layout == other.layout &&
			!slices.ContainsFunc(one.mig, func(ci int) bool { return slices.Contains(other.mig, ci) })
		if ok && !apart {
			minors = append(minors, minor)
		}
	}
	slices.Sort(minors)
	return minors
}

// receive handles an event as ctr prints it: date, time, zone in two words, namespace, topic, content.
func (o *Oracle) receive(line string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.seen++
	fields := strings.SplitN(line, " ", 7)
	if len(fields) < 7 || !strings.HasPrefix(fields[5], "/tasks/") {
		return
	}
	var e struct {
		Container string `json:"container_id"`
		ID        string // of a process, in the event of its exit
		Pid       int
	}
	if err := json.Unmarshal([]byte(fields[6]), &e); err != nil {
		o.err = errors.Join(o.err, fmt.Errorf("read the event %q: %w", line, err))
		return
	}
	switch fields[5] {
	case "/tasks/create": // the container is complete, and does not run yet
		h, err := o.examine(e.Container, e.Pid)
		if err != nil {
			o.err = errors.Join(o.err, fmt.Errorf("find the GPUs of container %s: %w", e.Container, err))
		}
		if h != nil {
			o.running[e.Container] = h
		}
	case "/tasks/start":
		if h := o.running[e.Container]; h != nil {
			o.start(h)
		}
	case "/tasks/exit":
		if e.ID == e.Container {
			delete(o.running, e.Container)
		}
	case "/tasks/delete": // also if it was never started
		if e.ID == "" || e.ID == e.Container {
			delete(o.running, e.Container)
		}
	}
}

// start finds the containers that run and have a GPU of this one.
func (o *Oracle) start(h *holder) {
	h.since = time.Now()
	o.started++
	for _, other := range o.running {
		if other.since.IsZero() { // not started
			continue
		}
		if minors := conflicts(h, other); len(minors) > 0 {
			o.found = append(o.found, fmt.Sprintf("%s: GPUs %v: %v\n  and %v", o.node.Name, minors, other, h))
		}
	}
}

// examine returns the GPUs of a container that is created, or nil if it has none or is left out.
func (o *Oracle) examine(id string, pid int) (*holder, error) {
	data, err := os.ReadFile(o.node.Host("/run/containerd/io.containerd.runtime.v2.task/k8s.io/" + id + "/config.json"))
	if errors.Is(err, fs.ErrNotExist) { // it is gone already
		o.missed++
		return nil, nil //nolint:nilnil // it has no GPU any more
	}
	if err != nil {
		return nil, err
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, err
	}
	const cri = "io.kubernetes.cri."
	of := func(key string) string { return spec.Annotations[cri+key] }
	if of("container-type") == "sandbox" {
		o.admitted[of("sandbox-uid")] = maps.Clone(o.layouts)
	}
	if of("container-type") != "container" || of("sandbox-namespace") == "kube-system" || privileged(&spec) {
		return nil, nil //nolint:nilnil // it is left out
	}
	h := &holder{
		pod: of("sandbox-namespace") + "/" + of("sandbox-name"), container: of("container-name"), uid: of("sandbox-uid"),
		shares: slices.Contains(spec.Process.Env, sharesVariable+"=true"),
	}
	var devices []string
	for _, d := range spec.Linux.Devices {
		devices = append(devices, d.Path)
	}
	h.gpus = o.parts(devices, h.uid)
	dev := fmt.Sprintf("/proc/%d/root/proc/%d/root/dev", o.node.Pid(), pid)
	nodes, err := deviceNodes(dev)
	if errors.Is(err, fs.ErrNotExist) { // the process has ended
		if len(h.gpus) > 0 {
			o.unseen++
		}
		nodes, err = devices, nil
	}
	if err != nil {
		return nil, err
	}
	if is := o.parts(nodes, h.uid); fmt.Sprint(is) != fmt.Sprint(h.gpus) {
		err = fmt.Errorf("%v has %v in its spec, and %v in its mount namespace", h, h.gpus, is)
		maps.Copy(h.gpus, is)
	}
	if len(h.gpus) == 0 {
		return nil, err
	}
	return h, err
}

// privileged reports whether a container may use all devices.
func privileged(s *specs.Spec) bool {
	return slices.ContainsFunc(s.Linux.Resources.Devices, func(d specs.LinuxDeviceCgroup) bool {
		return d.Allow && d.Type != "c" && d.Type != "b" && d.Major == nil && d.Minor == nil
	})
}

// deviceNodes returns the paths of NVIDIA's nodes in a container's /dev.
func deviceNodes(dev string) (paths []string, err error) {
	for _, dir := range []string{"/dev", "/dev/nvidia-caps"} {
		entries, err := os.ReadDir(dev + strings.TrimPrefix(dir, "/dev"))
		if err != nil && (dir == "/dev" || !errors.Is(err, fs.ErrNotExist)) {
			return nil, err
		}
		for _, e := range entries {
			paths = append(paths, dir+"/"+e.Name())
		}
	}
	return paths, nil
}

var (
	gpuPath  = regexp.MustCompile(`^/dev/nvidia(\d+)$`)
	capPath  = regexp.MustCompile(`^/dev/nvidia-caps/nvidia-cap(\d+)$`)
	migMinor = regexp.MustCompile(`(?m)^gpu(\d+)/gi\d+/ci\d+/access (\d+)$`)
)

// parts returns what device nodes of a pod are of GPUs, by minor. The node of a GPU alone is the whole GPU.
func (o *Oracle) parts(paths []string, uid string) map[int]part {
	gpus, mig := map[int]part{}, map[int][]int{}
	for _, p := range paths {
		if m := capPath.FindStringSubmatch(p); m != nil {
			minor, _ := strconv.Atoi(m[1]) // it has only digits
			if gpu, ok := o.migMinors[minor]; ok && !slices.Contains(mig[gpu], minor) {
				mig[gpu] = append(mig[gpu], minor)
			}
		}
	}
	for _, p := range paths {
		if m := gpuPath.FindStringSubmatch(p); m != nil {
			minor, _ := strconv.Atoi(m[1])
			slices.Sort(mig[minor])
			gpus[minor] = part{mig: mig[minor], layout: cmp.Or(o.admitted[uid][minor], o.layouts[minor])}
		}
	}
	return gpus
}

// readMIGMinors reads the driver's list of capabilities.
func (o *Oracle) readMIGMinors(file string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	for _, m := range migMinor.FindAllStringSubmatch(string(data), -1) {
		gpu, _ := strconv.Atoi(m[1])
		minor, _ := strconv.Atoi(m[2])
		o.migMinors[minor] = gpu
	}
	return nil
}
