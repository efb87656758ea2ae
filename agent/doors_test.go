package agent

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/dra"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/test/lib/apiservertest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// claimDoor is the kubelet's side of a service whose door is dra.
type claimDoor struct {
	*fixture

	api    *apiservertest.Server
	client drav1.DRAPluginClient
}

// newClaimDoor starts a service whose door is dra.
func newClaimDoor(t *testing.T, machine string, changes ...func(*config.Config)) *claimDoor {
	t.Helper()
	d := &claimDoor{api: apiservertest.New(t)}
	dir, err := os.MkdirTemp("", "registry") //nolint:usetesting // t.TempDir may be too long for the path of a socket
	testenv.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	d.fixture = newFixture(t, machine, append(changes, func(c *config.Config) {
		c.Door, c.ServiceAccountDir, c.PluginsRegistryDir = config.DRADoor, d.api.Dir, dir
	})...)
	d.opts.Env = d.api.Env()
	d.start(Serve)
	conn, err := grpc.NewClient("unix:"+filepath.Join(dir, dra.DefaultDriver+"-reg.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	d.client = drav1.NewDRAPluginClient(conn)
	testenv.Eventually(t, "ResourceSlices", func() bool {
		var list []any
		d.api.Slices(&list)
		return len(list) > 0
	})
	return d
}

func uidOf(i int) string { return fmt.Sprintf("00000000-0000-0000-0000-%012d", i) }

// prepare has the claim with a number prepared, to which the scheduler gave a GPU, and returns the error. Without an
// amount of memory it gave the whole GPU.
func (d *claimDoor) prepare(i, gpu int, memory string, configs ...any) error {
	d.t.Helper()
	result := map[string]any{
		"request": "gpu", "driver": dra.DefaultDriver, "pool": apiservertest.Node, "device": strings.ToLower(d.uuid(gpu)),
	}
	if memory != "" {
		result["shareID"], result["consumedCapacity"] = uidOf(100+i), map[string]any{"memory": memory}
	}
	name := fmt.Sprint("claim-", i)
	d.api.SetClaim("team", name, map[string]any{
		"metadata": map[string]any{"name": name, "uid": uidOf(i)},
		"status": map[string]any{"allocation": map[string]any{"devices": map[string]any{
			"results": []any{result}, "config": configs,
		}}},
	})
	ctx, cancel := context.WithTimeout(d.t.Context(), time.Minute)
	defer cancel()
	answer, err := d.client.NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{
		Claims: []*drav1.Claim{{Namespace: "team", Name: name, Uid: uidOf(i)}},
	}, grpc.WaitForReady(true))
	testenv.Must(d.t, err)
	if text := answer.GetClaims()[uidOf(i)].GetError(); text != "" {
		return fmt.Errorf("%s", text)
	}
	return nil
}

// policyFrom is the configuration of a claim or DeviceClass.
func policyFrom(source string, p prepare.Policy) any {
	return map[string]any{"source": source, "opaque": map[string]any{
		"driver": dra.DefaultDriver, "parameters": map[string]any{
			"apiVersion": "gpu-cdi-plugin/v1", "kind": "GPUConfig", "prestart": map[string]any{"policy": p},
		},
	}}
}

func TestThePolicyOfAClaim(t *testing.T) {
	t.Parallel()
	ofClass := func(p prepare.Policy) any { return policyFrom("FromClass", p) }
	ofClaim := func(p prepare.Policy) any { return policyFrom("FromClaim", p) }
	// The end of the step of a policy that those before it do not have, in the log.
	steps := map[prepare.Policy]string{
		prepare.None: "of nvidia.com/gpu: ", prepare.Check: "health ok", prepare.Clean: "settings ok",
	}
	for name, c := range map[string]struct {
		node    prepare.Policy
		configs []any
		want    prepare.Policy
	}{
		"without a configuration the node's policy applies": {prepare.Check, nil, prepare.Check},
		"the claim asks for more":                           {prepare.None, []any{ofClaim(prepare.Check)}, prepare.Check},
		"the claim cannot ask for less":                     {prepare.Clean, []any{ofClaim(prepare.None)}, prepare.Clean},
		"the DeviceClass asks for more":                     {prepare.Check, []any{ofClass(prepare.Clean)}, prepare.Clean},
		"the DeviceClass asks for less":                     {prepare.Clean, []any{ofClass(prepare.None)}, prepare.None},
		"the claim asks for more than its DeviceClass": {
			prepare.Check, []any{ofClass(prepare.None), ofClaim(prepare.Clean)}, prepare.Clean,
		},
		"the claim cannot ask for less than its DeviceClass": {
			prepare.None, []any{ofClass(prepare.Clean), ofClaim(prepare.Check)}, prepare.Clean,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newClaimDoor(t, "pcie-quad", policy(c.node))
			testenv.Must(t, d.prepare(1, 1, "", c.configs...))
			d.logs(d.uuid(1)+" was prepared for a container of "+gpuResource, 1)
			for p, step := range steps {
				if done := d.logged(step) > 0; done != c.want.Includes(p) {
					t.Errorf("%q is in the log: %t, want the steps of policy %s", step, done, c.want)
				}
			}
		})
	}
}

// Claims that share a GPU have no more than its memory, which the service knows from the driver. A GPU of which others
// may have shares is not cleaned for another one, even if the configuration has changed meanwhile.
func TestClaimsShareAGPU(t *testing.T) {
	t.Parallel()
	d := newClaimDoor(t, "pcie-quad", inReplicas(2, "1"), policy(prepare.Clean))
	half := fmt.Sprint(d.driver.snapshot.Devices[1].MemoryBytes / 2)
	testenv.Must(t, d.prepare(1, 1, half), d.prepare(2, 1, half), d.prepare(3, 2, ""))
	d.logs("settings skipped (the device is shared: it has 2 replicas)", 2)
	d.logs("settings ok", 1)
	wantError(t, d.prepare(4, 1, "1Mi"), "the claim needs 1.0 MiB of its memory, and 0.0 MiB are left")
	wantError(t, d.prepare(5, 1, ""), d.uuid(1)+": another pod has it")
	testenv.Must(t, d.prepare(6, 3, "1Gi")) // whose replicas were removed meanwhile
	d.logs("settings skipped (the device is shared: ", 3)
}
