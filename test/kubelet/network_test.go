package kubelet

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/kubenode"
)

// TestNetworks runs pods with GPUs on both kinds of network: a bridge, with a host port and a bandwidth limit, and the
// node's own network.
func TestNetworks(t *testing.T) {
	f := setUp(t, "pcie-quad")
	f.awaitDevices(t, gpuName, f.uuids(t))
	bridge, host := newPod("bridge", gpuName, 1), newPod("host", gpuName, 1)
	bridge.HostPort, bridge.Bandwidth = 8080, "10M"
	const httpServer = "busybox mkdir /www && echo served >/www/file && exec busybox httpd -f -p 8080 -h /www"
	bridge.Command = []string{"sh", "-c", httpServer}
	host.HostNetwork = true
	onBridge, onHost := f.launch(t, bridge), f.launch(t, host)
	checkDisjoint(t, f.check(t, bridge, onBridge), f.check(t, host, onHost))

	for _, address := range []string{onBridge.IP, nodeIP} {
		if got := f.awaitPage(t, fmt.Sprintf("http://%s:8080/file", address)); got != "served\n" {
			t.Errorf("from %s: %q", address, got)
		}
	}
	if qdisc := f.runInNode(t, "tc", "qdisc", "show"); !strings.Contains(qdisc, "rate 10Mbit") {
		t.Errorf("the pod's bandwidth is not limited:\n%s", qdisc)
	}
	for s, want := range map[PodStatus]bool{onBridge: false, onHost: true} {
		if got := f.inPod(t, s, "ls", "/sys/class/net"); strings.Contains(got, "cni0") != want {
			t.Errorf("pod %s has the interfaces %q; on the node's network: want %v", s.Name, strings.Fields(got), want)
		}
	}
}

// httpGet gets a page in the node's network.
func (f *fixture) httpGet(ctx context.Context, url string) (code int, body string, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := f.HTTPClient().Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(data), err
}

// awaitPage gets a page, and waits until it is served.
func (f *fixture) awaitPage(t *testing.T, url string) (body string) {
	t.Helper()
	err := kubenode.Wait(t.Context(), time.Minute, url+" is served", func() (err error) {
		_, body, err = f.httpGet(t.Context(), url)
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return body
}

// runInNode runs a program in the node and returns its output.
func (f *fixture) runInNode(t *testing.T, args ...string) string {
	t.Helper()
	res, err := f.Run(t.Context(), args...)
	if err != nil || res.Code != 0 {
		t.Errorf("%s: %v, %v", strings.Join(args, " "), res, err)
	}
	return res.Stdout
}
