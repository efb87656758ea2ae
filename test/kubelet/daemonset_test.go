package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// pluginImage has the programs, and what deploy/daemonset.yaml runs besides them.
const pluginImage = "localhost/gpu-cdi-plugin:test"

// TestTheDaemonSetServesTheNode runs the pod of deploy/daemonset.yaml as a static pod. Only the image is another, and
// the driver's root: the machine's GPUs are simulated.
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
		// The kubelet forgets a pod before its containers have ended, and the next test starts a plugin too.
		err := wait(context.Background(), time.Minute, "the pod's plugin has ended", func() error {
			l, err := fileio.AcquireLock(f.Host("/var/run/cdi/.nvidia.com-gpu.json.lock"))
			if err != nil {
				return err
			}
			return l.Release()
		})
		if err != nil {
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
	all, err := f.Allocatable(t.Context())
	if diff := cmp.Diff(len(f.uuids(t)), len(all[gpuName])); err != nil || diff != "" {
		t.Fatalf("the kubelet's GPUs (-want +got): %v\n%s", err, diff)
	}
	p := newPod("gpu", gpuName, 2)
	f.check(t, p, f.launch(t, p))
	if spec, err := cdi.ReadFile(f.Host("/var/run/cdi/nvidia.com-gpu.json")); err != nil {
		t.Error(err)
	} else if got, want := spec.ContainerEdits.Hooks[0].Path, "/var/lib/gpu-cdi-plugin/bin/prestart-hook"; got != want {
		t.Errorf("the spec's hook is %s, want %s", got, want)
	}
	f.checkHostPID(t, s)
	// It reads the credentials through the node's root.
	if got := f.inPod(t, s, "sh", "-c", `chroot /host cat "$GPU_CDI_SERVICE_ACCOUNT_DIR/token"`); got != "gpu-cdi-plugin" {
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
	want, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", f.ns.first.Pid()))
	testenv.Must(t, err)
	got := strings.TrimSpace(f.inPod(t, s, "chroot", "/host", "readlink", "/proc/self/ns/pid"))
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
	root := shared.Images.Copy(t, image.Glibc)
	for _, name := range []string{"gpu-cdi-plugin", "prestart-hook"} {
		testenv.Must(t, image.AddProgram(root, shared.Program(t, name), "/usr/local/bin/"+name))
	}
	for _, name := range []string{"sh", "mkdir", "cp", "chmod", "mv", "chroot"} {
		file, err := filepath.EvalSymlinks(testenv.Command(t, name))
		testenv.Must(t, err)
		_ = os.Remove(filepath.Join(root, "usr/bin", name))
		testenv.Must(t, image.AddProgram(root, file, "/usr/bin/"+name))
	}
	testenv.Must(t, f.load(t.Context(), Image{pluginImage, root, []string{"true"}}))
}

// daemonSetPod returns the pod of the DaemonSet as JSON, with pluginImage and with variables for its containers.
func (f *fixture) daemonSetPod(t *testing.T, variables map[string]string) []byte {
	t.Helper()
	data, err := os.ReadFile("../../deploy/daemonset.yaml")
	testenv.Must(t, err)
	var set struct {
		Spec struct{ Template map[string]any }
	}
	testenv.Must(t, yaml.Unmarshal(data, &set))
	var env []any
	for name, value := range variables {
		env = append(env, map[string]any{"name": name, "value": value})
	}
	pod := set.Spec.Template
	spec := pod["spec"].(map[string]any)
	delete(spec, "nodeSelector") // the kubelet has no API server, and so no label
	patched := f.reportHealth(t, spec)
	for _, list := range []string{"initContainers", "containers"} {
		for _, c := range spec[list].([]any) {
			container := c.(map[string]any)
			container["image"], container["imagePullPolicy"], container["env"] = pluginImage, "Never", env
			if container["name"] == "serve" {
				container["env"] = slices.Concat(env, patched)
			}
		}
	}
	pod["apiVersion"], pod["kind"] = "v1", "Pod"
	meta := pod["metadata"].(map[string]any)
	meta["name"], meta["namespace"] = "gpu-cdi-plugin", "kube-system"
	meta["annotations"] = map[string]any{"gpu-test/number": fmt.Sprint(numbers.Add(1))}
	data, err = json.Marshal(pod)
	testenv.Must(t, err)
	return data
}

// reportHealth applies deploy/report-health-patch.yaml to a pod without its variables, which it returns. The kubelet
// has no API server, and so no projected volume: it is a downwardAPI volume with a label of the pod as the token.
func (f *fixture) reportHealth(t *testing.T, pod map[string]any) []any {
	t.Helper()
	data, err := os.ReadFile("../../deploy/report-health-patch.yaml")
	testenv.Must(t, err)
	type spec struct {
		Containers []struct {
			Env          []any
			VolumeMounts []any `yaml:"volumeMounts"`
		}
		Volumes []struct{ Name string }
	}
	var patch struct {
		Spec struct{ Template struct{ Spec spec } }
	}
	text := strings.ReplaceAll(string(data), "kubernetes.io~projected", "kubernetes.io~downward-api")
	testenv.Must(t, yaml.Unmarshal([]byte(text), &patch))
	from := patch.Spec.Template.Spec
	label := map[string]any{"fieldPath": "metadata.labels['app.kubernetes.io/name']"}
	pod["volumes"] = append(pod["volumes"].([]any), map[string]any{
		"name":        from.Volumes[0].Name,
		"downwardAPI": map[string]any{"items": []any{map[string]any{"path": "token", "fieldRef": label}}},
	})
	serve := pod["containers"].([]any)[0].(map[string]any)
	serve["volumeMounts"] = append(serve["volumeMounts"].([]any), from.Containers[0].VolumeMounts...)
	return from.Containers[0].Env
}
