package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"gpu-cdi-plugin/cmd/device-manager/launch"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// TestLaunchedPodmanOpensOnlyTheLeasedGPUs runs `podman run` as it is planned for two leased GPUs of eight: with many
// options before and behind the subcommand, and with a placeholder. The container can open the nodes of these two.
func TestLaunchedPodmanOpensOnlyTheLeasedGPUs(t *testing.T) {
	t.Parallel()
	n := shared.Node(t, "dgx-h100")
	snapshot, err := n.Snapshot()
	testenv.Must(t, err)
	var nodes []node
	var list []listed
	var ids []string
	for _, d := range snapshot.Devices {
		given := d.Index == 2 || d.Index == 5
		nodes = append(nodes, hostNode(t, n, fmt.Sprintf("nvidia%d", d.Minor), given))
		if given {
			list = append(list, listedAs(len(ids), d)...)
			ids = append(ids, d.UUID)
		}
	}
	options := model.RunOptions{CDIDevices: names(ids...), Envs: map[string]string{"LEASE": "a b"}}
	open, answers := opening(nodes)
	script := fmt.Sprintf("test \"$LEASE\" = 'a b' || exit\n%s -L && echo %s\n%s", containerSMI, endOfList, open)
	for name, own := range map[string][]string{
		"options behind the subcommand": nil, "a placeholder": {"{podman}"},
	} {
		for _, runtime := range []string{"runc", "crun"} {
			t.Run(name+" with "+runtime, func(t *testing.T) {
				t.Parallel()
				podman := engine.Podman{Runtime: runtime, Cgroup: engine.V1, Images: shared.Images}
				podman.Edit = func(args []string) []string {
					plan, err := launch.For(args, launch.Lease{RunOptions: options, IDs: ids})
					testenv.Must(t, err)
					if len(plan.Env)+len(plan.Notes) > 0 {
						t.Errorf("the plan is %+v", plan)
					}
					if extra := len(plan.Args) - len(args); extra < 2 || slices.Contains(plan.Args, "{podman}") {
						t.Errorf("the command line is %q", plan.Args)
					}
					return plan.Args
				}
				res := podman.Run(t, engine.Container{
					Image: image.Glibc, Mknod: true, Args: []string{"sh", "-c", script}, CDIDir: n.CDIDir,
					Options: own,
				})
				printed, opened, _ := strings.Cut(res.Stdout, endOfList+"\n")
				checkList(t, proc.Result{Code: res.Code, Stdout: printed, Stderr: res.Stderr}, list)
				checkAnswers(t, opened, answers)
			})
		}
	}
}
