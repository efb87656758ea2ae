package proc

import (
	"errors"
	"slices"
	"strings"
)

// podPrefix is how the kubelet begins the name of a pod's cgroup, before the pod's UID.
const podPrefix = "pod"

// PodUID returns the UID of the pod to which the process belongs, or "". The kubelet names a pod's cgroup by the UID,
// in the forms of the drivers cgroupfs and systemd. A cgroup that a user's own systemd manages does not count: any
// user can choose its name. Containers can make cgroups too, but only below the cgroup of their pod, which is the one
// that counts.
func (c Cgroups) PodUID() string {
	for _, one := range c {
		if uid := one.podUID(); uid != "" {
			return uid
		}
	}
	return ""
}

func (c Cgroup) podUID() string {
	for name := range strings.SplitSeq(c.Path, "/") {
		if name == "user.slice" {
			return ""
		}
		// containerd names a cgroup "SLICE:PREFIX:ID" if its driver is not that of the kubelet.
		name, _, _ = strings.Cut(name, ":")
		name = strings.TrimSuffix(name, ".slice")
		if last := name[strings.LastIndexByte(name, '-')+1:]; strings.HasPrefix(last, podPrefix) {
			name = last // systemd's names of slices repeat those of their parents: kubepods-burstable-podUID.slice
		}
		if uid, found := strings.CutPrefix(name, podPrefix); found {
			if uid = strings.ReplaceAll(uid, "_", "-"); isPodUID(uid) { // systemd separates slices by hyphens
				return uid
			}
		}
	}
	return ""
}

// isPodUID reports whether a text is the UID of a pod: a UUID, or of a static pod the MD5 of its manifest.
func isPodUID(text string) bool {
	for i, c := range []byte(text) {
		hyphen := len(text) == 36 && (i == 8 || i == 13 || i == 18 || i == 23)
		if hyphen != (c == '-') || !hyphen && !strings.Contains("0123456789abcdef", string(c)) {
			return false
		}
	}
	return len(text) == 32 || len(text) == 36
}

// Pods are the pods that have running processes.
type Pods struct {
	UIDs map[string]bool
	// Partial means that the pod of some process could not be found out.
	Partial bool
}

// RunningPods returns the pods that have processes in /proc. Processes that have ended do not count, even if their
// parents have not waited for them yet.
func RunningPods(procfs string) (Pods, error) {
	pids, err := PIDs(procfs)
	if err != nil {
		return Pods{}, err
	}
	pods := Pods{UIDs: map[string]bool{}}
	for _, pid := range pids {
		uid, err := podOf(procfs, pid, pods.UIDs)
		switch {
		case errors.Is(err, ErrEnded):
		case err != nil:
			pods.Partial = true
		case uid != "":
			pods.UIDs[uid] = true
		}
	}
	return pods, nil
}

// podOf returns the UID of a process's pod, or "" if it has none, has ended or belongs to a known pod.
func podOf(procfs string, pid int, known map[string]bool) (string, error) {
	p, err := Open(procfs, pid)
	if err != nil {
		return "", err
	}
	defer p.Close()
	cgroups, err := p.Cgroups()
	if err != nil {
		return "", err
	}
	uid := cgroups.PodUID()
	if uid == "" || known[uid] {
		return "", nil
	}
	return uid, p.CheckRunning()
}

// SeesPods reports whether this process sees the processes of the host's pods: it sees all processes, or a kubelet.
func SeesPods(procfs string) bool {
	if SeesAll(procfs) == nil {
		return true
	}
	_, found := FindKubelet(procfs)
	return found
}

// FindKubelet returns the command line of a running kubelet. Only a process of root counts, in the mount namespace of
// the first process or of this one: any user, and any container, can have a process of this name.
func FindKubelet(procfs string) (arguments []string, found bool) {
	trusted := append(mountsOf(Open(procfs, 1)), mountsOf(Self(procfs))...)
	pids, err := PIDs(procfs)
	if err != nil {
		return nil, false
	}
	for _, pid := range pids {
		if args := kubeletArguments(procfs, pid, trusted); args != nil {
			return args, true
		}
	}
	return nil, false
}

// mountsOf returns the name of a process's mount namespace, or nothing if it cannot be read.
func mountsOf(p *Process, err error) []string {
	if err != nil {
		return nil
	}
	defer p.Close()
	name, err := p.Namespace("mnt")
	if err != nil {
		return nil
	}
	return []string{name}
}

// kubeletArguments returns the command line of a process that is a kubelet in one of the mount namespaces, or nil.
func kubeletArguments(procfs string, pid int, trusted []string) []string {
	p, err := Open(procfs, pid)
	if err != nil {
		return nil
	}
	defer p.Close()
	if p.Command() != "kubelet" {
		return nil
	}
	if own, err := p.Namespace("mnt"); err != nil || !slices.Contains(trusted, own) {
		return nil
	}
	if s, err := p.Status(); err != nil || s.UIDs[0] != "0" {
		return nil
	}
	args, err := p.Arguments()
	if err != nil {
		return nil
	}
	return args
}
