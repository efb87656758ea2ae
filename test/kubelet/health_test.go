package kubelet

import (
	"slices"
	"testing"
)

// TestAPodKeepsAGPUThatBecomesUnhealthy makes a pod's GPU unhealthy and healthy again, without a restart of anything.
// The pod runs on, its status shows the health of its GPU, and no other pod gets the GPU meanwhile.
func TestAPodKeepsAGPUThatBecomesUnhealthy(t *testing.T) {
	f := setUp(t, "pcie-quad")
	all := f.uuids(t)
	f.awaitDevices(t, gpuName, all)
	p := newPod("steady", gpuName, 1)
	s := f.launch(t, p)
	ids := f.check(t, p, s)
	f.awaitHealth(t, p, ids[0]+"=Healthy")

	f.set(t, ids[0], map[string]string{"recovery-action": "reset"})
	others := slices.DeleteFunc(slices.Clone(all), func(uuid string) bool { return uuid == ids[0] })
	f.awaitDevices(t, gpuName, others)
	f.awaitHealth(t, p, ids[0]+"=Unhealthy")
	f.checkUnchanged(t, p, s, ids)
	rest := newPod("rest", gpuName, len(others))
	checkDisjoint(t, ids, f.check(t, rest, f.launch(t, rest)))
	if err := f.Remove(t.Context(), rest.Name); err != nil {
		t.Fatal(err)
	}

	f.set(t, ids[0], map[string]string{"recovery-action": "none"})
	f.awaitDevices(t, gpuName, all)
	f.awaitHealth(t, p, ids[0]+"=Healthy")
	f.checkUnchanged(t, p, s, ids)
}

// TestNoNewPodGetsAnUnhealthyGPU requests all GPUs while one is unhealthy, and again when it is healthy.
func TestNoNewPodGetsAnUnhealthyGPU(t *testing.T) {
	f := setUp(t, "pcie-quad")
	all := f.uuids(t)
	f.awaitDevices(t, gpuName, all)
	f.set(t, all[1], map[string]string{"remap-pending": "1"})
	f.awaitDevices(t, gpuName, append(all[:1:1], all[2:]...))
	f.expectRefusal(t, newPod("early", gpuName, len(all)))
	f.set(t, all[1], map[string]string{"remap-pending": "default"})
	f.awaitDevices(t, gpuName, all)
	p := newPod("late", gpuName, len(all))
	f.check(t, p, f.launch(t, p))
}

// set changes values of a GPU.
func (f *fixture) set(t *testing.T, uuid string, values map[string]string) {
	t.Helper()
	if err := f.gpus.Set(slices.Index(f.uuids(t), uuid), values); err != nil {
		t.Fatal(err)
	}
}

// awaitHealth waits until the status of a pod shows the health of its devices, as in PodStatus.
func (f *fixture) awaitHealth(t *testing.T, p Pod, want string) {
	t.Helper()
	_, err := f.Await(t.Context(), p.Name, "shows "+want, func(s PodStatus) bool { return s.Health == want })
	if err != nil {
		t.Error(err)
	}
}

// TestReplicasFollowTheirGPU makes a GPU unhealthy that pods share.
func TestReplicasFollowTheirGPU(t *testing.T) {
	f := setUp(t, "pcie-quad", writeConfig(t, `
sharing: {time-slicing: {resources: [{name: nvidia.com/gpu, devices: [0], replicas: 2}]}}
`))
	all := f.uuids(t)
	replicas := []string{all[0] + "::0", all[0] + "::1"}
	f.awaitDevices(t, gpuName, append(replicas, all[1:]...))
	f.set(t, all[0], map[string]string{"recovery-action": "reboot"})
	f.awaitDevices(t, gpuName, all[1:])
	f.set(t, all[0], map[string]string{"recovery-action": "none"})
	f.awaitDevices(t, gpuName, append(replicas, all[1:]...))
}
