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
	before := recordMachine(t)
	n := start(t)
	p := newPod("short", "", 0)
	err := n.Apply(p)
	if err == nil {
		_, err = n.Await(t.Context(), p.Name, "runs", func(s PodStatus) bool { return s.Running })
	}
	if err := errors.Join(err, n.Close()); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, recordMachine(t)); diff != "" {
		t.Errorf("the machine has changed (-before +after):\n%s", diff)
	}
	if _, err := os.Stat(n.dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the node's directory: %v", err)
	}
}

// recordMachine records what a node could change on the machine: cgroups, mounts, the directories that a kubelet and
// containerd make, and the kernel settings that they change.
func recordMachine(t *testing.T) []string {
	t.Helper()
	var found []string
	for _, pattern := range []string{
		"/sys/fs/cgroup/*/" + prefix + "*", "/sys/fs/cgroup/" + prefix + "*",
		"/sys/fs/cgroup/*/k8s.io", "/sys/fs/cgroup/*/kubepods",
		"/var/lib/kubelet", "/var/lib/cni", "/var/lib/containerd", "/var/log/pods", "/var/log/containers",
		"/run/containerd", "/run/nri", "/run/cdi", "/run/gpu-cdi-plugin", "/etc/cni/*/*",
		"/opt/containerd", "/opt/cni", "/usr/libexec/kubernetes",
	} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			// The node that the other tests share is not this test's.
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
			// The tests of other packages mount in directories of their own at the same time.
			if !strings.Contains(line, " "+os.TempDir()+"/") || strings.Contains(line, prefix) {
				found = append(found, file+": "+line)
			}
		}
	}
	return found
}

// TestLeftoversOfAKilledProcessAreRemoved makes the directory of a node whose process does not exist.
func TestLeftoversOfAKilledProcessAreRemoved(t *testing.T) {
	// No process has this ID, which is above the kernel's maximum.
	left := filepath.Join(os.TempDir(), prefix+"4194304-left")
	if err := os.MkdirAll(filepath.Join(left, "lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	running := filepath.Join(os.TempDir(), fmt.Sprintf("%s%d-running", prefix, os.Getpid()))
	defer os.RemoveAll(running)
	if err := errors.Join(os.Mkdir(running, 0o755), removeLeftovers()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%s is left: %v", left, err)
	}
	if _, err := os.Stat(running); err != nil {
		t.Errorf("the node of a running process was removed: %v", err)
	}
}
