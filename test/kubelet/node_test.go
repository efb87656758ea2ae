package kubelet

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestANodeLeavesNothing runs a pod on a node of its own, beside the one that the other tests share, and closes it.
func TestANodeLeavesNothing(t *testing.T) {
	before := machine(t)
	n := start(t)
	p := pod("short", "", 0)
	err := n.Apply(p)
	if err == nil {
		_, err = n.Await(t.Context(), p.Name, "runs", func(s PodStatus) bool { return s.Running })
	}
	if err := errors.Join(err, n.Close()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, machine(t)); diff != "" {
		t.Errorf("the machine has changed (-before +after):\n%s", diff)
	}
	if _, err := os.Stat(n.dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the node's directory: %v", err)
	}
}

// machine is what a node could leave on the machine: cgroups and mounts, directories that a kubelet and containerd make,
// and the kernel's settings that they change.
func machine(t *testing.T) []string {
	t.Helper()
	var found []string
	for _, pattern := range []string{
		"/sys/fs/cgroup/*/" + prefix + "*", "/sys/fs/cgroup/" + prefix + "*", "/sys/fs/cgroup/*/k8s.io", "/sys/fs/cgroup/*/kubepods",
		"/var/lib/kubelet", "/var/lib/cni", "/var/lib/containerd", "/var/log/pods", "/var/log/containers",
		"/run/containerd", "/run/nri", "/run/cdi", "/run/gpu-cdi-plugin", "/etc/cni/*/*", "/opt/containerd", "/opt/cni", "/usr/libexec/kubernetes",
	} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			// The node that the other tests share is none of this one's.
			if node == nil || filepath.Base(path) != filepath.Base(node.dir) {
				found = append(found, path)
			}
		}
	}
	for _, file := range []string{"/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/panic", "/proc/self/mounts"} {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			found = append(found, file+": "+line)
		}
	}
	return found
}

// TestSweepRemovesWhatAKilledProcessLeft pretends that a node was left by a process that is no more.
func TestSweepRemovesWhatAKilledProcessLeft(t *testing.T) {
	// No process has this number: it is the greatest that the kernel allows.
	left := filepath.Join(os.TempDir(), prefix+"4194304-left")
	if err := os.MkdirAll(filepath.Join(left, "lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	lives := filepath.Join(os.TempDir(), fmt.Sprintf("%s%d-lives", prefix, os.Getpid()))
	defer os.RemoveAll(lives)
	if err := errors.Join(os.Mkdir(lives, 0o755), sweep()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is left: %v", left, err)
	}
	if _, err := os.Stat(lives); err != nil {
		t.Errorf("the node of a process that lives was removed: %v", err)
	}
}
