package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/hook/inject"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// A container that was restored from a checkpoint may have any annotations (CVE-2026-53492). With "allocated: true" it
// gets what the kubelet gave it, as the plugin reads from the kubelet, and nothing else.
func TestServeSaysWhatTheKubeletGave(t *testing.T) {
	t.Parallel()
	testenv.Root(t)
	s := newServed(t, "pcie-quad", "")
	pods := s.kubelet.Pods
	s.start()
	s.kubelet.WaitListed(gpuResource, 4, 0)
	s.awaitControl()
	uuids := s.uuids()
	pods.Set(kubelettest.Pod("team-a", "job", "main", gpuResource, uuids[1]+"::0", uuids[2]),
		kubelettest.Pod("team-b", "train", "main", gpuResource, uuids[3]))

	const uid = "5a3c1f0e-0c1d-4b52-9b6e-2f1a5f0a7b11"
	in := inject.Injector{
		PolicyFile: filepath.Join(s.dir, "hook.yaml"), CDIDirs: []string{filepath.Dir(s.spec)},
		RuntimeDir: filepath.Join(s.dir, "run"), PodLogs: filepath.Join(s.dir, "pods"),
	}
	testenv.Must(t, os.WriteFile(in.PolicyFile, []byte("allocated: true\n"), 0o600))
	for _, pod := range []string{"team-a_job_", "team-b_train_", "team-b_gone_"} {
		testenv.Must(t, os.MkdirAll(filepath.Join(in.PodLogs, pod+uid), 0o755))
	}
	for name, c := range map[string]struct{ pod, devices, want string }{
		"by UUID":  {"team-a/job", "nvidia.com/gpu=" + uuids[1], ""},
		"by index": {"team-a/job", "nvidia.com/gpu=1,nvidia.com/gpu=2", ""},
		"a smuggled GPU": {
			"team-a/job", "nvidia.com/gpu=1,nvidia.com/gpu=3", "device nvidia.com/gpu=3 is not given: the kubelet gave",
		},
		"all": {"team-a/job", "nvidia.com/gpu=all", "device nvidia.com/gpu=all is not given"},
		"a free GPU": {
			"team-b/train", "nvidia.com/gpu=0", "container main of pod team-b/train only nvidia.com/gpu=" + uuids[3],
		},
		"an unknown pod": {"team-b/gone", "nvidia.com/gpu=3", "the kubelet gave the container no device of this plugin"},
	} {
		t.Run(name, func(t *testing.T) {
			namespace, pod, _ := strings.Cut(c.pod, "/")
			config := `{"process": {"cwd": "/"}, "linux": {"cgroupsPath": "/kubepods/pod` + uid + `/x"}, "annotations": {
				"io.kubernetes.cri.sandbox-namespace": "` + namespace + `", "io.kubernetes.cri.sandbox-name": "` + pod + `",
				"io.kubernetes.cri.sandbox-uid": "` + uid + `", "io.kubernetes.cri.container-name": "main",
				"cdi.k8s.io/checkpoint": "` + c.devices + `"}}`
			_, _, err := in.Allowed([]byte(config), nil)
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}
