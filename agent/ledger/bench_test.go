package ledger

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The time in which a claim takes a device, where 1,000 containers hold devices: PodResources lists them over its
// socket, and the kubelet's checkpoint has not changed. The floor is a list of no container.
func BenchmarkTakeClaim(b *testing.B) {
	for _, containers := range []int{0, 1000} {
		b.Run(fmt.Sprint(containers, " containers"), func(b *testing.B) {
			k := kubelettest.New(b)
			c := kubelet.Checkpoint{RegisteredDevices: map[string][]string{}}
			names := make([]string, 0, containers)
			for i := range containers {
				id := fmt.Sprintf("GPU-%03d::%d", i%100, i/100)
				names = append(names, id)
				k.Pods.Pods = append(k.Pods.Pods, kubelettest.Pod("team", fmt.Sprint("pod-", i), "main", whole, id))
				e := recorded(fmt.Sprint("uid-", i), whole, id)
				c.PodDeviceEntries = append(c.PodDeviceEntries, e)
			}
			k.Start()
			data, err := c.Marshal()
			testenv.Must(b, err)
			testenv.Must(b, os.WriteFile(filepath.Join(k.Dir, kubelet.CheckpointName), data, 0o600))
			h, err := host.New("/", "", "")
			testenv.Must(b, err)
			l := New(Options{
				Kubelet: &podresources.Source{Host: h, PluginDir: k.Dir}, Driver: driver, Changed: wake.New(),
				Log: slog.New(slog.DiscardHandler), Pods: func() (proc.Pods, bool) { return proc.Pods{}, true },
				Resend: func() bool { // as if the kubelet wrote it again
					file := filepath.Join(k.Dir, kubelet.CheckpointName)
					return os.WriteFile(file+".new", data, 0o600) == nil && os.Rename(file+".new", file) == nil
				},
			})
			l.Offer(nil, []resource.Resource{offer(whole, names...)}, offer(whole, "GPU-free"))
			refresh(b, l)
			for b.Loop() {
				testenv.Must(b, l.TakeClaim(b.Context(), claimOf("1", "team/claim", portionsOf("GPU-free")...)))
			}
		})
	}
}
