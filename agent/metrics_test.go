package agent

import (
	"context"
	"os"
	"testing"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestTheNodeIsServedWithoutMetrics(t *testing.T) {
	t.Parallel()
	for role, run := range map[string]func(context.Context, *Options) error{"Serve": Serve, "Watch": Watch} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad", func(c *config.Config) { c.Listen = "192.0.2.1:9400" }) // of no host
			socket, until := testenv.Systemd(t)
			f.opts.Env = []string{"NOTIFY_SOCKET=" + socket}
			f.opts.Hint = func(error) string { return "what to do" }
			f.start(run)
			const problem = "metrics cannot be served: listen tcp 192.0.2.1:9400: "
			until(problem)
			f.logs(problem, 1)
			f.logs("; what to do", 1)
			if role == "Serve" {
				f.kubelet.WaitListed(gpuResource, 4, 0)
			}
			if _, err := os.Stat(ownSpec(&f.opts.Config)); err != nil {
				t.Error(err)
			}
			f.runs()
		})
	}
}
