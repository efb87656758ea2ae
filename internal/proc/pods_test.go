package proc

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	podUID  = "0f9c1c1e-8a4f-4b8e-9d6b-1f2a3b4c5d6e"
	staticU = "6f2b8c0a9d1e4f5a8b7c6d5e4f3a2b1c"
	inSlice = "0f9c1c1e_8a4f_4b8e_9d6b_1f2a3b4c5d6e"
	id      = "4cf5c2b5c1bb2ae1a4e8a1a6f0f77a8f6f6d8f4f1f0b8a7d6c5b4a3f2e1d0c9b"
)

func TestThePodOfAProcess(t *testing.T) {
	for name, c := range map[string]struct{ cgroup, want string }{
		"cgroup v1, cgroupfs": {
			"12:devices:/kubepods/burstable/pod" + podUID + "/" + id + "\n1:name=systemd:/kubepods/burstable/pod" + podUID +
				"/" + id + "\n", podUID,
		},
		"cgroup v2, cgroupfs":         {"0::/kubepods/besteffort/pod" + podUID + "/" + id + "\n", podUID},
		"cgroup v2, a guaranteed pod": {"0::/kubepods/pod" + podUID + "/" + id + "\n", podUID},
		"cgroup v2, systemd, containerd": {
			"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + inSlice + ".slice/cri-containerd-" + id +
				".scope\n", podUID,
		},
		"systemd, CRI-O": {
			"0::/kubepods.slice/kubepods-pod" + inSlice + ".slice/crio-" + id + ".scope/container\n", podUID,
		},
		"CRI-O's monitor": {
			"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + inSlice + ".slice/crio-conmon-" + id +
				".scope\n", podUID,
		},
		"containerd with another driver than the kubelet, as k3s has had": {
			"0::/system.slice/containerd.service/kubepods-besteffort-pod" + inSlice + ".slice:cri-containerd:" + id + "\n",
			podUID,
		},
		"a root of all pods of its own": {
			"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + inSlice + ".slice/cri-containerd-" + id +
				".scope\n", podUID,
		},
		"a node in a container": {
			"0::/docker/" + id + "/kubelet/kubepods/besteffort/pod" + podUID + "/" + id + "\n", podUID,
		},
		"seen from another pod's cgroup namespace": {"0::/../../pod" + podUID + "/" + id + "\n", podUID},
		"seen from there, systemd": {
			"0::/../../../kubepods-burstable.slice/kubepods-burstable-pod" + inSlice + ".slice/x.scope\n", podUID,
		},
		"a static pod":          {"0::/kubepods/burstable/pod" + staticU + "/" + id + "\n", staticU},
		"a static pod, systemd": {"0::/kubepods.slice/kubepods-pod" + staticU + ".slice/x.scope\n", staticU},
		"a zombie":              {"0::/kubepods/pod" + podUID + "/" + id + " (deleted)\n", podUID},
		"only one of the hierarchies": {
			"4:cpu:/\n3:devices:/kubepods/pod" + podUID + "/" + id + "\n", podUID,
		},
		"a container that made a cgroup of another pod's name": {
			"0::/kubepods/pod" + podUID + "/" + id + "/kubepods/pod" + staticU + "\n", podUID,
		},
		"a user that made one": {
			"0::/user.slice/user-1000.slice/user@1000.service/kubepods/pod" + podUID + "/x\n", "",
		},
		"the slice of all pods":    {"0::/kubepods.slice/kubepods-burstable.slice\n", ""},
		"podman":                   {"0::/machine.slice/libpod-" + id + ".scope\n", ""},
		"podman's own pod":         {"0::/machine.slice/machine-libpod_pod_" + id + ".slice/libpod-x.scope\n", ""},
		"a service":                {"0::/system.slice/podman.service\n", ""},
		"a name that is too short": {"0::/kubepods/pod0f9c1c1e/x\n", ""},
		"hyphens elsewhere":        {"0::/kubepods/pod" + "0f9c-1c1e8a4f-4b8e-9d6b-1f2a3b4c5d6" + "/x\n", ""},
		"the root":                 {"0::/\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := parseCgroups(c.cgroup)
			testenv.Must(t, err)
			if got := list.PodUID(); got != c.want {
				t.Errorf("the pod is %q, want %q", got, c.want)
			}
		})
	}
}

// processes makes a /proc with processes: their state, with the number of threads if it is not 1, and the content of
// their file cgroup, or "" if it is unreadable.
func processes(t *testing.T, list map[int][2]string) string {
	t.Helper()
	dir := t.TempDir()
	for pid, p := range list {
		of := filepath.Join(dir, fmt.Sprint(pid))
		state, threads, _ := strings.Cut(p[0], " ")
		stat := fmt.Sprintf("%d (name) %s 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 %s 0 100 0 0\n", pid, state,
			cmp.Or(threads, "1"))
		testenv.Must(t, os.Mkdir(of, 0o755), os.WriteFile(filepath.Join(of, "stat"), []byte(stat), 0o600))
		if p[1] == "" {
			testenv.Must(t, os.Mkdir(filepath.Join(of, "cgroup"), 0o755))
			continue
		}
		testenv.Must(t, os.WriteFile(filepath.Join(of, "cgroup"), []byte("0::"+p[1]+"\n"), 0o600))
	}
	return dir
}

func TestPodsThatHaveProcesses(t *testing.T) {
	for name, c := range map[string]struct {
		processes map[int][2]string
		want      Pods
	}{
		"none": {nil, Pods{UIDs: map[string]bool{}}},
		"several of one pod, and others": {
			map[int][2]string{
				1: {"S", "/init.scope"}, 2: {"S", "/kubepods/pod" + podUID + "/a"}, 3: {"R", "/kubepods/pod" + podUID + "/b"},
				4: {"D", "/kubepods/pod" + staticU + "/c"},
			},
			Pods{UIDs: map[string]bool{podUID: true, staticU: true}},
		},
		"a zombie of which a thread still runs": {
			map[int][2]string{2: {"Z 2", "/kubepods/pod" + podUID + "/a"}}, Pods{UIDs: map[string]bool{podUID: true}},
		},
		"a zombie has no devices": {
			map[int][2]string{2: {"Z", "/kubepods/pod" + podUID + "/a"}}, Pods{UIDs: map[string]bool{}},
		},
		"a zombie beside a process": {
			map[int][2]string{2: {"Z", "/kubepods/pod" + podUID + "/a"}, 3: {"S", "/kubepods/pod" + podUID + "/a"}},
			Pods{UIDs: map[string]bool{podUID: true}},
		},
		"one that cannot be read": {
			map[int][2]string{2: {"S", ""}, 3: {"S", "/kubepods/pod" + podUID + "/a"}},
			Pods{UIDs: map[string]bool{podUID: true}, Partial: true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := RunningPods(processes(t, c.processes))
			testenv.Must(t, err)
			if diff := gocmp.Diff(c.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}
