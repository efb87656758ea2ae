package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/manager/api"
)

// releaseOptions are the options of release.
type releaseOptions struct {
	container     string
	withheld, all bool
}

func (a *app) releaseCommand() *cobra.Command {
	var o releaseOptions
	cmd := a.asksServe(&cobra.Command{
		Use:   "release POD [--container NAME] | release --withheld {--all | RESOURCE=ID...}",
		Short: "Take the devices of a pod back",
		Long: `Releases the devices of a pod, so that device-manager serve can give them to other pods. POD is a name,
NAMESPACE/NAME or a UID. The containers are not stopped, so stop them first. With --container only that container is
marked as ended for good, like an init container that has succeeded: its devices become free unless another container
of the pod has them.

If the placements were lost because their file was damaged, all devices are withheld, since unknown pods may use them.
--withheld makes the devices RESOURCE=ID, which a connected plugin lists, or with --all all devices available to pods
again: make sure that no container uses them.`,
		Example: `  device-manager release training
  device-manager release default/training --container prepare
  device-manager release --withheld nvidia.com/gpu=GPU-8f6c3a1e-0000-4000-8000-000000000001`,
		Args: func(cmd *cobra.Command, args []string) error {
			if o.all && !o.withheld {
				return cli.With(cli.Usage, "release pods one by one; device-manager pods lists them",
					errors.New("--all needs --withheld, since it means withheld devices"))
			}
			if o.withheld {
				return nil
			}
			return cli.Arguments("one pod", 1, 1)(cmd, args)
		},
		ValidArgsFunction: a.completePod,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case !o.withheld:
				return a.releasePod(cmd.Context(), args[0], o.container)
			case o.container != "":
				return cli.With(cli.Usage, "", errors.New("--withheld and --container exclude each other"))
			}
			return a.releaseWithheld(cmd.Context(), args, o.all)
		},
	})
	f := cmd.Flags()
	f.StringVar(&o.container, "container", "", "`name` of the only container that has ended")
	f.BoolVar(&o.withheld, "withheld", false, "release devices that are withheld")
	f.BoolVar(&o.all, "all", false, "release all withheld devices")
	return cmd
}

func (a *app) releasePod(ctx context.Context, name, container string) error {
	client := a.client()
	pods, err := client.Pods(ctx)
	if err != nil {
		return err
	}
	pod, err := findPod(pods, name)
	if err != nil {
		return err
	}
	if container != "" {
		if err := client.Ended(ctx, pod.Metadata.UID, container); err != nil {
			return err
		}
		_, err = fmt.Fprintf(a.Stdout, "container %s of pod %s has ended\n", container, podName(pod.Metadata))
		return err
	}
	if err := client.Release(ctx, pod.Metadata.UID); err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.Stdout, "pod %s is released\n", podName(pod.Metadata))
	return err
}

func (a *app) releaseWithheld(ctx context.Context, devices []string, all bool) error {
	client := a.client()
	if all == (len(devices) > 0) {
		return cli.With(cli.Usage, "device-manager node --devices lists them", errors.New("want either --all or RESOURCE=ID"))
	}
	if all {
		if err := client.Free(ctx, api.FreeRequest{All: true}); err != nil {
			return err
		}
		_, err := fmt.Fprintln(a.Stdout, "no device is withheld any more")
		return err
	}
	byResource := map[string][]string{}
	for _, d := range devices {
		resource, id, ok := strings.Cut(d, "=")
		if !ok || resource == "" || id == "" {
			return cli.With(cli.Usage, "device-manager node --devices -o name lists them", fmt.Errorf("%q: want RESOURCE=ID", d))
		}
		byResource[resource] = append(byResource[resource], id)
	}
	for _, resource := range slices.Sorted(maps.Keys(byResource)) {
		ids := byResource[resource]
		if err := client.Free(ctx, api.FreeRequest{ResourceName: resource, DeviceIDs: ids}); err != nil {
			return err
		}
		if _, err := fmt.Fprintf(a.Stdout, "not withheld any more: %s=%s\n", resource, strings.Join(ids, ",")); err != nil {
			return err
		}
	}
	return nil
}
