package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/internal/cli"
)

func (a *app) claimsCommand() *cobra.Command {
	var out cli.Output
	cmd := &cobra.Command{
		Use:   "claims",
		Short: "List which containers and ResourceClaims hold GPUs",
		Long: `Lists who holds the GPUs and MIG devices: containers that got them from the device plugin (DOOR is
plugin), and ResourceClaims that are prepared (dra). Unless a device is shared, nobody else gets it meanwhile. The
serve of this host answers, through the socket control.sock in its --runtime-dir, which only root and the user of
serve may use.

CONTAINERS have the device, by the plugin or by the CLAIM, and are named POD/CONTAINER. Init containers keep their
devices until the pod ends. The name of a pod is unknown while the kubelet does not list it. A holder is
"starting" when it has just been given the device. It is "ending" when the kubelet has no active pod that has the
device any more: its pod still has processes, or is about to be unprepared. It is "forgotten" after claims forget,
and "observes" with admin access; both keep the device from nobody. SINCE is when the claim was prepared; the
kubelet does not say it of containers.

With -o wide, RESOURCE is the resource that the container requested, and REPLICAS is how many replicas of the
device it has. KNOWN FROM is what names the holder: the kubelet's files kubelet_internal_checkpoint and
dra_manager_state, its service PodResources, the record of this driver, or the answer to Allocate. HOLDER is what
claims forget takes.`,
		Example: `  gpu-cdi-plugin claims
  gpu-cdi-plugin claims -o json | jq -r '.holders[] | select(.index == "3") | .namespace'`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Partial, cli.Unreachable,
			cli.Interrupted),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.claims(cmd.Context(), out) },
	}
	out.AddFlags(cmd, "table", "wide", "json", "yaml")
	cmd.Flags().AddFlag(a.ServiceFlags.Lookup("runtime-dir"))
	cmd.AddCommand(a.claimsForgetCommand())
	return cmd
}

func (a *app) claimsForgetCommand() *cobra.Command {
	r := control.Request{Act: control.Forget}
	cmd := &cobra.Command{
		Use:   "forget POD-UID/CONTAINER/DEVICE | CLAIM-UID/DEVICE",
		Short: "Let others have a device of a holder that is gone",
		Long: `Makes serve ignore what a container or a ResourceClaim holds by the kubelet's files, until the kubelet
has dropped it. Use it if claims shows a holder of which you know that it has no GPU of this host, such as a claim
of another DRA driver with the same name, or an entry that a damaged kubelet does not drop. HOLDER in claims -o
wide is the argument.

While a pod that has the device has processes, or if that is unknown, it is refused. With --force it is done all
the same: another container may then get the device beside it.`,
		Example: `  gpu-cdi-plugin claims -o wide
  gpu-cdi-plugin claims forget 3f8a0c1e-8a4f-4b8e-9d6b-1f2a3b4c5d6e/main/GPU-5b566d07-58e6-81f4-8724-ca7995982491`,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Unreachable, cli.Interrupted),
		Args:              cli.Arguments("one holder, as claims -o wide lists it", 1, 1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			r.Holder = args[0]
			return a.ask(cmd.Context(), r)
		},
	}
	cmd.Flags().BoolVar(&r.Force, "force", false, "also while a pod that has the device has processes")
	cmd.Flags().AddFlag(a.ServiceFlags.Lookup("runtime-dir"))
	return cmd
}

func (a *app) claims(ctx context.Context, out cli.Output) error {
	answer, err := a.send(ctx, control.Request{Act: control.Claims})
	if err != nil {
		return err
	}
	var claims agent.Claims
	if err := json.Unmarshal([]byte(answer), &claims); err != nil {
		return fmt.Errorf("read the answer of serve: %w", err)
	}
	if len(claims.Holders) == 0 && claims.Unknown == "" && (out.Format == "table" || out.Format == "wide") {
		fmt.Fprintln(a.Stderr, "no container and no ResourceClaim holds a device")
		return nil
	}
	if err := out.Print(a.Stdout, claimsView(claims)); err != nil {
		return err
	}
	if claims.Unknown != "" {
		return partly("the log of serve says when the kubelet answers again",
			"it is unknown which containers hold devices: %s", claims.Unknown)
	}
	return nil
}

func claimsView(claims agent.Claims) cli.View {
	v := cli.View{Data: claims, Table: cli.Table{
		Header: []string{
			"INDEX", "UUID", "DOOR", "NAMESPACE", "CLAIM", "CONTAINERS", "SINCE", "RESOURCE", "REPLICAS", "CLAIM UID",
			"KNOWN FROM", "HOLDER",
		},
		Wide: 7,
	}}
	for _, h := range claims.Holders {
		since, replicas := "-", "-"
		if !h.Since.IsZero() {
			since = h.Since.UTC().Format(time.RFC3339)
		}
		if h.Replicas > 0 {
			replicas = strconv.Itoa(h.Replicas)
		}
		v.Table.Rows = append(v.Table.Rows, []string{
			cli.OrDash(h.Index), h.UUID, string(h.Door), cli.OrDash(h.Namespace), cli.OrDash(h.Claim), containersCell(h.Holding),
			since, cli.OrDash(h.Resource), replicas, cli.OrDash(h.ClaimUID), string(h.Book), cli.OrDash(h.Forget),
		})
	}
	return v
}

func containersCell(h ledger.Holding) string {
	var names []string
	for _, c := range h.Containers {
		names = append(names, cli.OrDash(c.Pod)+"/"+c.Container)
	}
	text, state := strings.Join(names, ","), string(h.State)
	if h.AdminAccess {
		state = "observes"
	}
	if state != "" {
		text = strings.TrimSpace(text + " (" + state + ")")
	}
	return cli.OrDash(text)
}
