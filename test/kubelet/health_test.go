package kubelet

import (
	"slices"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
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
	testenv.Must(t, f.Remove(t.Context(), rest.Name))

	f.set(t, ids[0], map[string]string{"recovery-action": "none"})
	f.awaitDevices(t, gpuName, all)
	f.awaitHealth(t, p, ids[0]+"=Healthy")
	f.checkUnchanged(t, p, s, ids)
}

// set changes values of a GPU.
func (f *fixture) set(t *testing.T, uuid string, values map[string]string) {
	t.Helper()
	testenv.Must(t, f.gpus.Set(slices.Index(f.uuids(t), uuid), values))
}

// awaitHealth waits until the status of a pod shows the health of its devices, as in PodStatus.
func (f *fixture) awaitHealth(t *testing.T, p Pod, want string) {
	t.Helper()
	_, err := f.Await(t.Context(), p.Name, "shows "+want, func(s PodStatus) bool { return s.Health == want })
	if err != nil {
		t.Error(err)
	}
}
