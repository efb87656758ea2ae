package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/sim/simtest"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// leasing is a simulated node with the device manager and the plugin.
type leasing struct {
	dir    string
	api    string // the socket
	leases *api.Client
}

// newLeasing starts both programs, and returns when the manager has the plugin's 8 GPUs. The policy is what the plugin
// does with GPUs before it gives them.
func newLeasing(b *testing.B, policy string) *leasing {
	b.Helper()
	dir, err := os.MkdirTemp("", "dm") //nolint:usetesting // b.TempDir may be too long for the paths of sockets
	testenv.Must(b, err)
	log, err := os.Create(filepath.Join(dir, "log"))
	testenv.Must(b, err)
	b.Cleanup(func() {
		_ = log.Close()
		_ = os.RemoveAll(dir)
	})
	node := simtest.Node(b, "dgx-h100")
	for _, name := range []string{"self", "thread-self"} { // a check needs the plugin's own process
		testenv.Must(b, os.Symlink("/proc/"+name, filepath.Join(node.Root(), "proc", name)))
	}
	config := filepath.Join(dir, "config.yaml")
	testenv.Must(b, os.WriteFile(config, []byte("prestart: {policy: "+policy+"}\n"), 0o600))
	socket := func(names ...string) string { return filepath.Join(append([]string{dir}, names...)...) }
	l := &leasing{dir: dir, api: socket("api", "manager.sock")}
	l.leases = api.NewClient(socket("api", "manager-leases.sock"))
	for _, args := range [][]string{
		{
			shared.Program(b, "device-manager"), "serve", "--api-socket", l.api, "--socket-dir", socket("plugins"),
			"--plugins-registry-dir", socket("registry"), "--state-dir", socket("state"),
			"--pod-resources-socket", socket("pods", "kubelet.sock"), "--device-info", socket("gpu", "devices"),
		},
		{
			shared.Program(b, "gpu-cdi-plugin"), "--root", node.Root(), "--cdi-dir", socket("cdi"), "--config", config,
			"--runtime-dir", socket("run"), "--state-dir", socket("gpu"), "serve", "--hook-path", "/bin/true",
			"--device-plugin-dir", socket("plugins"), "--plugins-registry-dir", socket("registry"),
			"--pod-resources-socket", socket("pods", "kubelet.sock"),
		},
	} {
		p, err := proc.Start(proc.Cmd{Args: args}, log)
		testenv.Must(b, err)
		b.Cleanup(func() { _ = p.Kill() })
	}
	client := api.NewClient(l.api)
	testenv.Eventually(b, "the manager has the GPUs", func() bool {
		list, err := client.Devices(b.Context())
		return err == nil && len(list.Items) > 0 && list.Items[0].Allocatable == 8
	})
	return l
}

// BenchmarkRun measures `run --gpus 1 -- true` beside `true`, with a plugin that gives GPUs as they are and with one
// that checks first that they are idle. A Go program that does nothing else shows what of it is the start of a program.
func BenchmarkRun(b *testing.B) {
	const rounds = 200
	program := shared.Program(b, "device-manager")
	all := []*contender{
		{name: "true", prefix: floor, run: commandRun(b, proc.Cmd{Args: []string{"true"}})},
		{name: "version", prefix: "version-", run: commandRun(b, proc.Cmd{Args: []string{program, "version"}})},
	}
	for policy, prefix := range map[string]string{"none": "", "check": "check-"} {
		l := newLeasing(b, policy)
		args := []string{program, "--api-socket", l.api, "run", "--quiet", "--gpus", "1", "--", "true"}
		all = append(all, &contender{
			name: "run, policy " + policy, prefix: prefix, run: commandRun(b, proc.Cmd{Args: args}),
		})
	}
	for b.Loop() {
		compare(b, rounds, []string{"ended"}, all)
	}
	reportTimes(b, 0, "", all)
	for _, c := range all[1:] {
		b.ReportMetric(ms(median(c.times[0])-median(all[0].times[0])), c.prefix+"more-than-floor-ms")
	}
}

// BenchmarkLeases measures leases that begin and end one after the other, by one client and by eight, each of which is
// two changes on the disk. They are as those of bare commands: for containers, the end of a lease takes a second more,
// in which an engine may still start one. The floor writes two files durably.
func BenchmarkLeases(b *testing.B) {
	const rounds = 5
	l := newLeasing(b, "none")
	const each = 80
	cycle := func() error { // the lease ends at once by itself
		_, err := l.leases.Lease(b.Context(), api.LeaseRequest{
			Request: lease.Request{Count: 1}, Timed: true, Seconds: 1e-6, Confine: true,
		}, func(lease.Waiting) {})
		return err
	}
	write := func() error {
		for range 2 {
			if err := fileio.WriteDurably(filepath.Join(l.dir, "floor"), make([]byte, 2048), 0o600); err != nil {
				return err
			}
		}
		return nil
	}
	run := func(clients int, f func() error) func() []time.Duration {
		return func() []time.Duration {
			begin := time.Now()
			var group sync.WaitGroup
			for range clients {
				group.Go(func() {
					for range each / clients {
						if err := f(); err != nil {
							b.Error(err)
						}
					}
				})
			}
			group.Wait()
			return []time.Duration{time.Since(begin)}
		}
	}
	all := []*contender{
		{name: "two writes each", prefix: floor, run: run(1, write)},
		{name: "one client", prefix: "", run: run(1, cycle)},
		{name: "eight clients", prefix: "eight-", run: run(8, cycle)},
	}
	for b.Loop() {
		compare(b, rounds, []string{fmt.Sprint(each, " leases")}, all)
	}
	b.ReportMetric(0, "ns/op")
	for _, c := range all {
		b.ReportMetric(each/median(c.times[0]).Seconds(), c.prefix+"leases/s")
	}
}
