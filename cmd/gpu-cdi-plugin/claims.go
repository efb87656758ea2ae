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
		Long: `Lists who holds the GPUs and MIG devices: containers that got them from the device plugin (DOOR is plugin), and
ResourceClaims that are prepared (dra). Unless a device is shared, nobody else gets it meanwhile. The serve of this host
answers, through the socket control.sock in its --runtime-dir, which only root and the user of serve may use.

CONTAINERS have the device, by the plugin or by the CLAIM, and are named POD/CONTAINER. The kubelet does not list a
container yet while it is starting, and no longer while it is ending. A claim without containers belongs to a pod that
is starting or has ended. SINCE is when the claim was prepared; the kubelet does not say it of containers.

With -o wide, RESOURCE is the resource that the container requested, and REPLICAS is how many replicas of the device it
has. Claims with admin access hold nothing, and are not listed.`,
		Example: `  gpu-cdi-plugin claims
  gpu-cdi-plugin claims -o json | jq -r '.holders[] | select(.index == "3") | .namespace'`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Partial, cli.Unreachable,
			cli.Interrupted),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.claims(cmd.Context(), out) },
	}
	out.AddFlags(cmd, "table", "wide", "json", "yaml")
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
			since, cli.OrDash(h.Resource), replicas, cli.OrDash(h.ClaimUID),
		})
	}
	return v
}

func containersCell(h ledger.Holding) string {
	var names []string
	for _, c := range h.Containers {
		names = append(names, c.Pod+"/"+c.Container)
	}
	text := strings.Join(names, ",")
	if h.State != "" {
		text = strings.TrimSpace(text + " (" + string(h.State) + ")")
	}
	return cli.OrDash(text)
}
