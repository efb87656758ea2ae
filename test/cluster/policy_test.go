package cluster

import (
	"fmt"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/kubenode"
	"gpu-cdi-plugin/test/lib/testenv"
)

// slicePolicy checks which ResourceSlices the plugin's token on a node may make. Its role allows it to make any.
func (c *Cluster) slicePolicy(t *testing.T, node, other string) {
	t.Helper()
	const driver = "gpu.nvidia.com"
	for name, s := range map[string]struct{ name, driver, node, pool, refusal string }{
		"of its own node":          {node, driver, node, node, ""},
		"of another node":          {node, driver, other, node, "the token is that of a pod on node " + node},
		"with another node's name": {other, driver, node, node, "the name must begin with that of the node"},
		"of another driver":        {node, "nic.example.com", node, node, "the driver must be gpu.nvidia.com"},
		"in another node's pool":   {node, driver, node, other, "the pool must have the name of the node"},
	} {
		t.Run(name, func(t *testing.T) {
			manifest := c.file(t, fmt.Sprintf(`apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: %s-gpu.nvidia.com-99}
spec:
  driver: %s
  nodeName: %s
  pool: {name: %s, generation: 1000, resourceSliceCount: 1}
  devices: [{name: gpu-0}]
`, s.name, s.driver, s.node, s.pool))
			_, err := c.Run(t.Context(), "kubectl", "create", "--dry-run=server", "-f", manifest,
				"--as=system:serviceaccount:"+plugin.namespace+":"+release,
				"--as-user-extra=authentication.kubernetes.io/node-name="+node)
			if (err == nil) != (s.refusal == "") || err != nil && !strings.Contains(err.Error(), s.refusal) {
				t.Errorf("error %v, want %q", err, s.refusal)
			}
		})
	}
}

// claimPolicy checks what a kubelet gets that asks for a claim before the API server knows a pod with it on the node,
// and that the value of the chart that docs/dra.md names cures it.
func (c *Cluster) claimPolicy(t *testing.T) {
	claim := c.file(t, `apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: early}
spec:
  devices:
    requests: [{name: gpu, exactly: {deviceClassName: gpu.nvidia.com}}]
`)
	c.kubectl(t, "create", "-f", claim)
	defer c.kubectl(t, "delete", "-f", claim)
	read := func() error {
		_, err := c.Run(t.Context(), "kubectl", "get", "resourceclaim", "early",
			"--as=system:node:node2", "--as-group=system:nodes")
		return err
	}
	const refusal = "no relationship found between node 'node2' and this object"
	if err := read(); err == nil || !strings.Contains(err.Error(), refusal) {
		t.Errorf("error %v, want %q", err, refusal)
	}
	c.helm(t, "upgrade", release, chart, "--reuse-values", "--set", "dra.nodesReadClaims=true")
	testenv.Must(t, kubenode.Wait(t.Context(), patience, "the kubelet may not read the claim", read))
}
