package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestADeviceThatThePodWasNotGivenIsRefused has gpu-cdi-runtime in front of containerd's runtime, with a policy that
// demands what the kubelet gave. A pod gets its GPUs by annotation. With the annotation of another GPU, as a checkpoint
// can have it (CVE-2026-53492), the same container is refused.
func TestADeviceThatThePodWasNotGivenIsRefused(t *testing.T) {
	f := setUp(t, "pcie-quad", "--strategy=cdi-annotations")
	program := f.standInFront(t, "allocated: true")
	f.awaitDevices(t, gpuName, f.uuids(t))
	p := newPod("own", gpuName, 2)
	s := f.launch(t, p)
	own := f.check(t, p, s)

	data, err := os.ReadFile(f.Host("/run/containerd/io.containerd.runtime.v2.task/k8s.io/" + s.Container +
		"/config.json"))
	testenv.Must(t, err)
	others := slices.DeleteFunc(f.uuids(t), func(id string) bool { return slices.Contains(own, id) })
	for name, c := range map[string]struct {
		smuggled map[string]string
		want     string
	}{
		"another GPU": {
			map[string]string{"cdi.k8s.io/checkpoint": cdi.DefaultKind + "=" + others[0]},
			fmt.Sprintf("device %s=%s is not given: the kubelet gave container main of pod default/%s-%s only %[1]s=%[5]s",
				cdi.DefaultKind, others[0], p.Name, nodeName, own[0]),
		},
		"the name of another pod": {
			map[string]string{"io.kubernetes.cri.sandbox-name": "other"}, "the kubelet has no pod default/other with the UID",
		},
		"the UID of another pod": {
			map[string]string{"io.kubernetes.cri.sandbox-uid": "other"}, "is not that of the pod with the UID other",
		},
	} {
		t.Run(name, func(t *testing.T) {
			bundle := filepath.Join(t.TempDir(), "bundle")
			testenv.Must(t, writeRestored(bundle, data, c.smuggled))
			res, err := f.Run(t.Context(), program, "--root", filepath.Dir(bundle), "create", "--bundle", bundle, "restored")
			if err != nil || res.Code != 1 || !strings.Contains(res.Stderr, c.want) {
				t.Errorf("%v, %v, want %q", err, res, c.want)
			}
		})
	}
}

// standInFront makes gpu-cdi-runtime the runtime of containerd until the test has ended, and returns its path.
func (f *fixture) standInFront(t *testing.T, policy string) string {
	t.Helper()
	dir := t.TempDir()
	program, etc := filepath.Join(dir, "gpu-cdi-runtime"), filepath.Join(dir, "etc")
	policy = fmt.Sprintf("%s\nruntime: %s\n", policy, f.Programs.Runc)
	file := f.Host("/var/lib/containerd.toml")
	before, err := os.ReadFile(file)
	if err == nil {
		err = os.MkdirAll(filepath.Join(etc, "gpu-cdi-plugin"), 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(etc, "gpu-cdi-plugin/hook.yaml"), []byte(policy), 0o644)
	}
	if err == nil {
		err = os.Symlink(shared.Program(t, "prestart-hook"), program)
	}
	testenv.Must(t, err)
	options := fmt.Sprintf("container_annotations = ['cdi.k8s.io/*']\noptions.BinaryName = %q", program)
	after := strings.Replace(string(before), fmt.Sprintf("options.BinaryName = %q", f.Programs.Runc), options, 1)
	use := func(ctx context.Context, config string, args ...string) {
		t.Helper()
		testenv.Must(t, os.WriteFile(file, []byte(config), 0o644))
		if res, err := f.Run(ctx, args...); err != nil || res.Code != 0 {
			t.Fatalf("%v: %v, %v", args, err, res)
		}
		testenv.Must(t, f.Containerd.Kill())
		testenv.Must(t, f.StartContainerd(ctx))
	}
	use(t.Context(), after, "mount", "-n", "-t", "overlay", "-o", "lowerdir="+etc+":/etc", "overlay", "/etc")
	t.Cleanup(func() {
		ctx := context.Background() // the test's own has ended
		if err := f.RemovePods(ctx); err != nil {
			t.Error(err)
		}
		// A daemon may have a file of /etc open at this moment, so the mount is only detached.
		use(ctx, string(before), "umount", "-n", "--lazy", "/etc")
	})
	return program
}

// writeRestored writes the bundle of a container with more annotations than it had.
func writeRestored(bundle string, config []byte, annotations map[string]string) error {
	var c map[string]any
	if err := json.Unmarshal(config, &c); err != nil {
		return err
	}
	all := c["annotations"].(map[string]any)
	for key, value := range maps.All(annotations) {
		all[key] = value
	}
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	if err := os.Mkdir(bundle, 0o700); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(bundle, "config.json"), data, 0o600)
}
