package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/sim"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// managed is a simulated node without a kubelet: device-manager and gpu-cdi-plugin as processes, as they are shipped.
type managed struct {
	*testing.T
	node     *sim.Node
	dir, cdi string
}

func startManaged(t *testing.T, n *sim.Node, flags ...string) *managed {
	t.Helper()
	m := &managed{T: t, node: n, dir: t.TempDir()}
	m.cdi = filepath.Join(m.dir, "cdi")
	config := fmt.Sprintf(`
root: %[2]s
cdi-dir: %[3]s
socket-dir: %[1]s/sockets
plugins-registry-dir: %[1]s/registry
pod-resources-socket: %[1]s/pod-resources.sock
api-socket: %[1]s/manager.sock
state-dir: %[1]s/manager
`, m.dir, m.node.Root(), m.cdi)
	testenv.Must(t, os.WriteFile(filepath.Join(m.dir, "config.yaml"), []byte(config), 0o644))
	testenv.Must(t, os.Mkdir(m.cdi, 0o755))
	m.start("device-manager", m.args("serve")[1:]...)
	testenv.Eventually(m, "the manager", func() bool { return m.run("node").Code == 0 })
	m.start("gpu-cdi-plugin", append([]string{
		"serve", "--root", m.node.Root(), "--cdi-dir", m.cdi,
		"--hook-path", shared.Program(t, "prestart-hook"), "--device-plugin-dir", filepath.Join(m.dir, "sockets"),
		"--state-dir", filepath.Join(m.dir, "serve"), "--runtime-dir", filepath.Join(m.dir, "run"),
	}, flags...)...)
	testenv.Eventually(m, "the devices", func() bool {
		out := m.run("node", "--devices").Stdout
		return strings.Contains(out, "Healthy") && !strings.Contains(out, "Unknown")
	})
	return m
}

// args is the command line of a verb of device-manager.
func (m *managed) args(args ...string) []string {
	return append([]string{shared.Program(m.T, "device-manager"), "--config", filepath.Join(m.dir, "config.yaml")},
		args...)
}

// start starts a program that runs until the test ends.
func (m *managed) start(program string, args ...string) {
	m.Helper()
	log, err := os.Create(filepath.Join(m.dir, program+".log"))
	testenv.Must(m, err)
	m.Cleanup(func() {
		if text, _ := os.ReadFile(log.Name()); m.Failed() {
			m.Logf("%s", text)
		}
		_ = log.Close()
	})
	p, err := proc.Start(proc.Cmd{Args: append([]string{shared.Program(m.T, program)}, args...)}, log)
	testenv.Must(m, err)
	m.Cleanup(func() { _ = p.Kill() })
}

func (m *managed) run(args ...string) proc.Result {
	m.Helper()
	r, err := proc.Run(m.Context(), proc.Cmd{Args: m.args(args...)})
	testenv.Must(m, err)
	return r
}

// manifest writes the manifest of a pod with a container main that asks for GPUs.
func (m *managed) manifest(name string, gpus int) string {
	m.Helper()
	path := filepath.Join(m.dir, name+".yaml")
	text := fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  containers:
    - name: main
      image: docker.io/library/debian
      resources: {limits: {nvidia.com/gpu: %d}}
`, name, gpus)
	testenv.Must(m, os.WriteFile(path, []byte(text), 0o644))
	return path
}

// devices are the devices that pods hold, by the pod's name.
func (m *managed) devices() map[string][]string {
	m.Helper()
	var list api.PodList
	testenv.Must(m, json.Unmarshal([]byte(m.run("pods", "-o", "json").Stdout), &list))
	held := map[string][]string{}
	for _, p := range list.Items {
		for _, d := range p.Containers[0].Devices {
			held[p.Metadata.Name] = append(held[p.Metadata.Name], d.DeviceIDs...)
		}
	}
	return held
}

// TestAdmittedContainersHaveTheirGPUs gives pods GPUs without a kubelet: podman gets them by the arguments that admit
// prints, and runc by the bundle that admit changes. In each container nvidia-smi lists only those of its pod.
func TestAdmittedContainersHaveTheirGPUs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct { // the names are short because they are in the paths of sockets
		libraries string // the driver's directory
		strategy  resource.Strategy
	}{
		"CDI": {"", resource.CDICRI},
		// Without a hook, the image's loader must find the libraries wherever the host has them.
		"mounts":        {"", resource.DeviceSpecs},
		"mounts Fedora": {"usr/lib64", resource.DeviceSpecs},
		"mounts GKE":    {"usr/local/nvidia/lib64", resource.DeviceSpecs},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := simtest.Node(t, "dgx-h100", simtest.LibDir(c.libraries))
			checkAdmitted(startManaged(t, n, "--strategy", string(c.strategy)))
		})
	}
}

// checkAdmitted admits a pod for podman and one for runc, and checks the GPUs in their containers.
func checkAdmitted(m *managed) {
	m.Helper()
	snapshot, err := m.node.Snapshot()
	testenv.Must(m, err)
	index := func(uuid string) int {
		return slices.IndexFunc(snapshot.Devices, func(d gpu.Device) bool { return d.UUID == uuid })
	}
	podman := &engine.Podman{Runtime: "runc", Cgroup: engine.V1, Images: shared.Images}
	runc := &engine.Bare{Runtime: "runc", Cgroup: engine.V1, Images: shared.Images}
	list := engine.Container{Image: image.Glibc, CDIDir: m.cdi, Args: []string{"nvidia-smi", "-L"}}
	bundle := runc.Bundle(m, shared.Images.Copy(m, list.Image), list)
	proc.Must(m, 0, proc.Cmd{Args: m.args("admit", "-f", m.manifest("oci", 2), "-o", "oci", "--bundle", bundle.Dir)})
	options := proc.Must(m, 0, proc.Cmd{Args: m.args("admit", "-f", m.manifest("podman", 2), "-o", "podman")})
	list.Options = strings.Fields(options.Stdout)
	results := map[string]proc.Result{"podman": podman.Run(m, list), "oci": runc.Start(m, bundle)}
	held := m.devices()
	for name, r := range results {
		if r.Code != 0 {
			m.Errorf("%s: %v", name, r)
			continue
		}
		var got []string
		for _, l := range parseList(m.T, r.Stdout) {
			got = append(got, l.UUID)
		}
		want := slices.Clone(held[name])
		slices.SortFunc(want, func(a, b string) int { return index(a) - index(b) })
		if !slices.Equal(want, got) || len(got) != 2 {
			m.Errorf("the container of %s has %v, its pod %v", name, got, want)
		}
	}
	if slices.ContainsFunc(held["podman"], func(id string) bool { return slices.Contains(held["oci"], id) }) {
		m.Errorf("two pods have the same device: %v", held)
	}
}
