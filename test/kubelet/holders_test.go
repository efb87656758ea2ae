package kubelet

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	sharedName = gpuName + ".shared"
	replicas   = "sharing: {time-slicing: {rename-by-default: true, resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
)

// replicasOf returns the IDs of the two replicas of each GPU.
func replicasOf(gpus ...string) []string {
	var ids []string
	for _, gpu := range gpus {
		ids = append(ids, gpu+"::0", gpu+"::1")
	}
	return ids
}

// sameIDs reports whether two lists have the same IDs.
func sameIDs(a, b []string) bool {
	return slices.Equal(slices.Sorted(slices.Values(a)), slices.Sorted(slices.Values(b)))
}

// without returns the GPUs except some.
func (f *fixture) without(t *testing.T, some ...string) []string {
	t.Helper()
	return slices.DeleteFunc(f.uuids(t), func(gpu string) bool { return slices.Contains(some, gpu) })
}

// metricsAddress is the plugin's address in the node's network.
const metricsAddress = "127.0.0.1:9400"

// The kubelet appends the node to the names of static pods.
var heldMetric = regexp.MustCompile(`(?m)^gpu_cdi_plugin_device_held\{container="main",dra_claim_name="",` +
	`namespace="default",pod="([^"]*)-node",resource="nvidia.com/[^"]*",uuid="([^"]*)"\} 1$`)

// awaitHolders waits until the metrics name these pods, with their GPUs, and no others.
func (f *fixture) awaitHolders(t *testing.T, want map[string]string) {
	t.Helper()
	got := map[string]string{}
	defer func() {
		if t.Failed() {
			t.Logf("want the pods %v, the metrics had %v", want, got)
		}
	}()
	testenv.Eventually(t, "the pods in the metrics", func() bool {
		_, page, err := f.httpGet(t.Context(), "http://"+metricsAddress+"/metrics")
		clear(got)
		for _, m := range heldMetric.FindAllStringSubmatch(page, -1) {
			got[m[1]] = m[2]
		}
		return err == nil && maps.Equal(got, want) && strings.Count(page, "\ngpu_cdi_plugin_device_held{") == len(want)
	})
}

// TestAGPUHasOneHolderWhateverItsName makes whole GPUs into replicas, and replicas into whole GPUs, while pods hold
// them. No other pod gets a GPU that is held, until it is free.
func TestAGPUHasOneHolderWhateverItsName(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.yaml")
	f := setUp(t, "pcie-quad", verbose, writeConfigTo(t, file, ""), "--pod-metrics", "--listen="+metricsAddress)
	f.awaitDevices(t, gpuName, f.uuids(t))
	whole := newPod("whole", gpuName, 1)
	held := f.check(t, whole, f.launch(t, whole))[0]
	f.awaitHolders(t, map[string]string{whole.Name: held})

	writeConfigTo(t, file, replicas)
	f.reconcile(t)
	f.awaitDevices(t, sharedName, replicasOf(f.without(t, held)...))
	shares := map[string]string{} // the pod of each replica
	for i := range 6 {
		p := newPod(fmt.Sprint("share-", i), sharedName, 1)
		shares[f.check(t, p, f.launch(t, p))[0]] = p.Name
	}
	if got, want := slices.Sorted(maps.Keys(shares)), replicasOf(f.without(t, held)...); !sameIDs(got, want) {
		t.Errorf("pod whole has %s, and the replicas that were given are %v", held, got)
	}
	f.expectRefusal(t, newPod("too-many", sharedName, 1))
	if want := " holds it as " + held + " of " + gpuName; !strings.Contains(f.plugin.Log(), want) {
		t.Errorf("the log does not say %q:\n%s", want, f.plugin.Log())
	}

	// The GPUs are whole again, and shares are held. A GPU is free when both shares are.
	writeConfigTo(t, file, "")
	f.reconcile(t)
	f.awaitDevices(t, gpuName, []string{held})
	f.expectRefusal(t, newPod("none-left", gpuName, 1))
	freed := f.without(t, held)[0]
	holders := map[string]string{whole.Name: held}
	for id, pod := range shares {
		holders[pod] = resource.UUIDOf(id)
	}
	f.awaitHolders(t, holders)
	for _, id := range replicasOf(freed) {
		testenv.Must(t, f.Remove(t.Context(), shares[id]))
		delete(holders, shares[id])
	}
	f.awaitHolders(t, holders)
	f.awaitDevices(t, gpuName, []string{held, freed})
	last := newPod("last", gpuName, 1)
	if got := f.check(t, last, f.launch(t, last)); got[0] != freed {
		t.Errorf("the last pod has %v, want %s", got, freed)
	}
}

// TestGPUsThatAnotherPluginGaveAreNotGivenAgain replaces NVIDIA's plugin while pods hold its devices. Whole GPUs have
// the same names, so the kubelet accounts for them; replicas do not.
func TestGPUsThatAnotherPluginGaveAreNotGivenAgain(t *testing.T) {
	for name, c := range map[string]struct {
		config string // of NVIDIA's plugin
		ids    func(gpus []string) []string
		pods   int
		// healthy returns which GPUs this plugin advertises as healthy: held ones too if the kubelet accounts for them.
		healthy func(all, free []string) []string
	}{
		"whole GPUs": {
			"version: v1\n", slices.Clone[[]string], 2, func(all, _ []string) []string { return all },
		},
		"replicas": {
			"version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n",
			func(gpus []string) []string { return replicasOf(gpus...) }, 3, func(_, free []string) []string { return free },
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := setUp(t, "pcie-quad")
			f.awaitDevices(t, gpuName, f.uuids(t))
			f.killPlugin(t)
			f.plugin = f.serveNVIDIA(t, c.config)
			f.awaitDevices(t, gpuName, c.ids(f.uuids(t)))
			var held []string
			for i := range c.pods {
				p := newPod(fmt.Sprint("before-", i), gpuName, 1)
				f.launch(t, p)
				gpu, _, _ := strings.Cut(f.given(t, p)[0], "::")
				held = append(held, gpu)
			}
			f.killPlugin(t)
			f.plugin = f.serve(t)
			free := f.without(t, held...)
			f.awaitDevices(t, gpuName, c.healthy(f.uuids(t), free))
			for i := range free {
				p := newPod(fmt.Sprint("after-", i), gpuName, 1)
				if got := f.check(t, p, f.launch(t, p)); !slices.Contains(free, got[0]) {
					t.Errorf("pod %s has %v, which another pod holds; free were %v", p.Name, got, free)
				}
			}
			f.expectRefusal(t, newPod("none-left", gpuName, 1))
		})
	}
}

// TestAPluginThatIsDisplacedSaysSo starts NVIDIA's plugin beside this one, with the same resource and other devices.
// The kubelet uses the later plugin, and does not notify the earlier one.
func TestAPluginThatIsDisplacedSaysSo(t *testing.T) {
	f := setUp(t, "pcie-quad")
	f.awaitDevices(t, gpuName, f.uuids(t))
	other := f.serveNVIDIA(t,
		"version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
	defer func() { testenv.Must(t, other.Kill()) }()
	f.awaitDevices(t, gpuName, replicasOf(f.uuids(t)...))
	testenv.Eventually(t, "a warning", func() bool {
		return strings.Contains(f.plugin.Log(), "the kubelet has other devices of nvidia.com/gpu")
	})
}

// serveNVIDIA starts NVIDIA's device plugin on the machine's GPUs. Its containers get a variable only, and no devices.
func (f *fixture) serveNVIDIA(t *testing.T, config string) *Daemon {
	t.Helper()
	program := shared.NodePeer(t, "nvidia-device-plugin")
	suite.Install(t, f.gpus.Root(), program)
	testenv.Must(t, os.WriteFile(filepath.Join(f.gpus.Root(), "nvidia.yaml"), []byte(config), 0o644))
	const script = `set -e
cd "$0"
mkdir -p run/proc var/lib/kubelet/device-plugins
mount -t proc proc run/proc
[ -e proc/self ] || ln -s /run/proc/self proc/self
mount --bind /var/lib/kubelet/device-plugins var/lib/kubelet/device-plugins
exec chroot . "$@"`
	d := f.NewDaemon("nvidia", "unshare", "--mount", "sh", "-c", script, f.gpus.Root(),
		"/usr/bin/"+filepath.Base(program), "--config-file", "/nvidia.yaml", "--device-list-strategy", "envvar",
		"--driver-root-ctr-path", "/", "--gdrcopy-enabled=false", "--gds-enabled=false", "--mofed-enabled=false")
	testenv.Must(t, d.Start())
	return d
}
