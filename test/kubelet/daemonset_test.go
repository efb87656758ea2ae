package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// pluginImage has the programs of the release's image, and busybox for the test.
const pluginImage = "localhost/gpu-cdi-plugin:test"

// TestTheDaemonSetServesTheNode runs the pod of the chart as a static pod. Only the driver's root is another: the
// machine's GPUs are simulated.
func TestTheDaemonSetServesTheNode(t *testing.T) {
	gpus := simtest.Node(t, "pcie-quad")
	if node == nil {
		node = start(t)
	}
	f := &fixture{Node: node, gpus: gpus}
	f.loadPluginImage(t)
	t.Cleanup(func() {
		if err := f.RemovePods(context.Background()); err != nil {
			t.Error(err)
		}
	})
	file := strings.TrimPrefix(writeConfig(t, clean), "--config=")
	pod := f.daemonSetPod(t, map[string]string{"GPU_CDI_ROOT": gpus.Root(), "GPU_CDI_CONFIG": file})
	testenv.Must(t, f.applyManifest("gpu-cdi-plugin", pod))
	ready := func(s PodStatus) bool { return s.Ready }
	s, err := f.Await(t.Context(), "gpu-cdi-plugin", "is ready", ready)
	testenv.Must(t, err)
	if s.Restarts > 0 {
		t.Errorf("the plugin was restarted %d times: %s", s.Restarts, s.Trouble)
	}
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := newPod("gpu", gpuName, 2)
	f.check(t, p, f.launch(t, p))
	if spec, err := cdi.ReadFile(f.Host("/var/run/cdi/nvidia.com-gpu.json")); err != nil {
		t.Error(err)
	} else if got, want := spec.ContainerEdits.Hooks[0].Path, "/var/lib/gpu-cdi-plugin/bin/prestart-hook"; got != want {
		t.Errorf("the spec's hook is %s, want %s", got, want)
	}
	f.checkHostPID(t, s)
	// It reads the credentials through the node's root.
	const token = `cat "/host/var/lib/kubelet/pods/$POD_UID/volumes/kubernetes.io~downward-api/api-access/token"`
	if got := f.inPod(t, s, "sh", "-c", token); got != "gpu-cdi-plugin" {
		t.Errorf("the token is %q", got)
	}
	dirty := f.freeGPUs(t)[0]
	f.set(t, dirty, map[string]string{"memory-used": "2GiB"})
	waiting := newPod("waiting", gpuName, 2)
	testenv.Must(t, f.Apply(waiting))
	f.awaitNotPrepared(t, waiting, dirty, "2048 MiB are in use")
}

// checkHostPID checks that the plugin's pod is in the PID namespace of the kubelet: in another it would see neither the
// processes that are left over on a GPU nor the clients of MPS.
func (f *fixture) checkHostPID(t *testing.T, s PodStatus) {
	t.Helper()
	want, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", f.Pid()))
	testenv.Must(t, err)
	got := strings.TrimSpace(f.inPod(t, s, "busybox", "readlink", "/proc/self/ns/pid"))
	if got != want {
		t.Errorf("the plugin's PID namespace is %s, and the kubelet's is %s", got, want)
	}
}

// freeGPUs returns the UUIDs of the GPUs that no pod has.
func (f *fixture) freeGPUs(t *testing.T) []string {
	t.Helper()
	pods, err := f.Assigned(t.Context())
	testenv.Must(t, err)
	return slices.DeleteFunc(f.uuids(t), func(uuid string) bool {
		for _, devices := range pods {
			if slices.Contains(devices[gpuName], uuid) {
				return true
			}
		}
		return false
	})
}

// loadPluginImage loads pluginImage into the node.
func (f *fixture) loadPluginImage(t *testing.T) {
	t.Helper()
	root := shared.Images.Copy(t, image.Static)
	for _, name := range []string{"gpu-cdi-plugin", "prestart-hook", "launcher"} {
		testenv.Must(t, image.AddProgram(root, shared.Program(t, name), "/"+name))
	}
	testenv.Must(t, f.Load(t.Context(), Image{
		Name: pluginImage, Root: root, Config: image.Config{Cmd: []string{"/launcher"}},
	}))
}

// daemonSetPod returns the pod of the chart's DaemonSet as JSON, with pluginImage and with variables for its container.
// The kubelet has no API server, and so no labels of the node, no service account and no projected volume: instead of
// the token there is a downwardAPI volume with a label of the pod.
func (f *fixture) daemonSetPod(t *testing.T, variables map[string]string) []byte {
	t.Helper()
	repository, tag, _ := strings.Cut(pluginImage, ":")
	r := proc.Must(t, 0, proc.Cmd{Args: []string{
		shared.NodePeer(t, "helm"), "template", "gpu-cdi-plugin", "../../deploy/chart", "--namespace", "kube-system",
		"--set", "image.repository=" + repository + ",image.tag=" + tag + ",image.pullPolicy=Never",
		"--set", "reportHealth={events,node-condition}", "--show-only", "templates/daemonset.yaml",
	}})
	var set struct {
		Spec struct{ Template map[string]any }
	}
	text := strings.ReplaceAll(r.Stdout, "kubernetes.io~projected", "kubernetes.io~downward-api")
	testenv.Must(t, yaml.Unmarshal([]byte(text), &set))
	pod := set.Spec.Template
	spec := pod["spec"].(map[string]any)
	delete(spec, "affinity")
	delete(spec, "serviceAccountName")
	for _, v := range spec["volumes"].([]any) {
		if volume := v.(map[string]any); volume["name"] == "api-access" {
			delete(volume, "projected")
			label := map[string]any{"fieldPath": "metadata.labels['app.kubernetes.io/name']"}
			volume["downwardAPI"] = map[string]any{"items": []any{map[string]any{"path": "token", "fieldRef": label}}}
		}
	}
	serve := spec["containers"].([]any)[0].(map[string]any)
	serve["command"] = []any{"/launcher"} // the entry point of the release's image
	for name, value := range variables {
		serve["env"] = append(serve["env"].([]any), map[string]any{"name": name, "value": value})
	}
	pod["apiVersion"], pod["kind"] = "v1", "Pod"
	meta := pod["metadata"].(map[string]any)
	meta["name"], meta["namespace"] = "gpu-cdi-plugin", "kube-system"
	meta["annotations"] = map[string]any{"gpu-test/number": fmt.Sprint(numbers.Add(1))}
	data, err := json.Marshal(pod)
	testenv.Must(t, err)
	return data
}
