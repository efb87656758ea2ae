package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/regular"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/checkpoint"
	"gpu-cdi-plugin/manager/endpoint"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
)

func (a *app) checkpointCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "checkpoint",
		Short: "Exchange placements with a kubelet",
		Long: `Reads and writes the file in which a kubelet records the devices of its pods, ` + checkpoint.Name + `, in its
device plugin directory. Neither the kubelet nor the manager may be running: each reads its record when it starts.`,
		Annotations: cli.Statuses(cli.OK, cli.Usage),
		Args:        cli.UnknownVerb,
		RunE:        help,
	}
	cmd.PersistentFlags().AddFlag(a.pluginFlags.Lookup("state-dir"))
	cmd.AddCommand(a.importCommand(), a.exportCommand())
	return cmd
}

// checkpointFile is the argument check of the verbs below checkpoint.
func checkpointFile(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s: want one file, got %q", cmd.CommandPath(), args)
	}
	return nil
}

func (a *app) importCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "import FILE",
		Short: "Take the placements of a kubelet over",
		Long: `Adds the placements of a kubelet's file to those of the manager, all of them or none. The file has the UIDs of pods
but no names. None is added if a pod or a device is placed already, but a pod that has the same devices is left as it
is, so the same file can be imported again. - is standard input.`,
		Example:           `  gpu-cdi-plugin manager checkpoint import /var/lib/kubelet/device-plugins/` + checkpoint.Name,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Locked, cli.Interrupted),
		Args:              checkpointFile,
		ValidArgsFunction: completeFile(),
		RunE:              func(cmd *cobra.Command, args []string) error { return a.importCheckpoint(cmd.Context(), args[0]) },
	}
}

func (a *app) exportCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "export FILE",
		Short: "Write the manager's placements as a kubelet would",
		Long: `Writes the placements of the manager to a file that a kubelet reads when it starts, with its checksum. - is
standard output. The kubelet knows a pod by its UID, so the pods keep their devices if the kubelet runs them under
the same UIDs.`,
		Example:           `  gpu-cdi-plugin manager checkpoint export /var/lib/kubelet/device-plugins/` + checkpoint.Name,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Locked, cli.Interrupted),
		Args:              checkpointFile,
		ValidArgsFunction: completeFile(),
		RunE:              func(_ *cobra.Command, args []string) error { return a.exportCheckpoint(args[0]) },
	}
}

// maxCheckpoint is more than the bytes of a checkpoint with 10,000 devices.
const maxCheckpoint = 64 << 20

func (a *app) importCheckpoint(ctx context.Context, path string) error {
	data, err := a.readNamed(path, maxCheckpoint, fmt.Errorf("it is larger than %d MiB", maxCheckpoint>>20))
	if err != nil {
		return fmt.Errorf("import the checkpoint: %w", err)
	}
	c, err := checkpoint.Parse(data)
	if err != nil {
		return fmt.Errorf("import the checkpoint %s: %w", path, err)
	}
	store, loaded, err := a.openPlacements()
	if err != nil {
		return err
	}
	names := slices.AppendSeq(slices.Clone(loaded.Resources), maps.Keys(c.RegisteredDevices))
	slices.Sort(names)
	names = slices.Compact(names)
	imported, err := importable(loaded.Placements, c.Placements(), names)
	if err == nil {
		caller, now := model.Caller{UID: os.Getuid(), GID: os.Getgid(), PID: os.Getpid()}, time.Now().UTC()
		for i := range imported {
			imported[i].Admitted, imported[i].Caller = now, caller
		}
		// Pods that ask for the named resources are rejected until the plugins register, not started without devices.
		err = store.Import(ctx, imported, names)
	}
	if err := errors.Join(err, store.Close()); err != nil {
		return fmt.Errorf("import the checkpoint %s: %w", path, err)
	}
	_, err = fmt.Fprintf(a.stdout, "%s imported into %s\n", plural(len(imported), "pod"), a.placementsFile())
	return err
}

// importable returns the pods to add. Those that an import before this one has added are left out.
func importable(placed, pods []model.Placement, resources []string) ([]model.Placement, error) {
	if len(resources) > endpoint.MaxResources {
		return nil, fmt.Errorf("there are %d resources, and the manager takes %d", len(resources), endpoint.MaxResources)
	}
	for _, p := range pods {
		if err := manager.Validate(p.Pod); err != nil {
			return nil, fmt.Errorf("pod %q: %w", p.Pod.UID, err)
		}
	}
	added := slices.DeleteFunc(pods, func(p model.Placement) bool {
		return slices.ContainsFunc(placed, func(have model.Placement) bool { return samePlacement(have, p) })
	})
	return added, checkUnplaced(placed, added)
}

// samePlacement is whether two placements have the same devices, in containers that have not ended.
func samePlacement(a, b model.Placement) bool {
	return a.Pod.UID == b.Pod.UID && len(a.Ended) == len(b.Ended) &&
		slices.EqualFunc(a.Allocations, b.Allocations, func(a, b model.Allocation) bool {
			return a.Container == b.Container && a.Resource == b.Resource && slices.Equal(a.IDs, b.IDs) &&
				bytes.Equal(a.Response, b.Response) && maps.EqualFunc(a.NUMA, b.NUMA, slices.Equal)
		})
}

// errPlaced is that a pod or a device is placed already.
var errPlaced = errors.New("is placed already")

// checkUnplaced returns an error if one of the pods, or of their devices, is placed already.
func checkUnplaced(placed, imported []model.Placement) error {
	type device struct{ resource, id string }
	pods, holders := map[string]bool{}, map[device]string{}
	hold := func(p model.Placement) error {
		for _, allocation := range held(p) {
			for _, id := range allocation.IDs {
				d := device{allocation.Resource, id}
				if holder, ok := holders[d]; ok && holder != p.Pod.UID {
					return fmt.Errorf("%s=%s of pod %s %w: pod %s has it", d.resource, id, p.Pod.UID, errPlaced, holder)
				}
				holders[d] = p.Pod.UID
			}
		}
		return nil
	}
	for _, p := range placed {
		pods[p.Pod.UID] = true
		if err := hold(p); err != nil {
			return err
		}
	}
	for _, p := range imported {
		if pods[p.Pod.UID] {
			return fmt.Errorf("pod %s %w", p.Pod.UID, errPlaced)
		}
		if err := hold(p); err != nil {
			return err
		}
	}
	return nil
}

// held are the allocations of the containers that have not ended for good: the devices of others may be another pod's.
func held(p model.Placement) []model.Allocation {
	return slices.DeleteFunc(slices.Clone(p.Allocations), func(a model.Allocation) bool {
		return slices.Contains(p.Ended, a.Container)
	})
}

func (a *app) exportCheckpoint(path string) error {
	store, loaded, err := a.openPlacements()
	if err != nil {
		return err
	}
	if err := store.Close(); err != nil {
		return err
	}
	for i := range loaded.Placements {
		loaded.Placements[i].Allocations = held(loaded.Placements[i])
	}
	registered := map[string][]string{}
	for _, name := range loaded.Resources {
		registered[name] = []string{}
	}
	data, err := checkpoint.New(loaded.Placements, registered).Marshal()
	if err != nil {
		return fmt.Errorf("export the checkpoint: %w", err)
	}
	if path == "-" {
		_, err = a.stdout.Write(data)
		return err
	}
	if err := atomicfile.Write(path, data, 0o600); err != nil {
		return fmt.Errorf("export the checkpoint: %w", err)
	}
	_, err = fmt.Fprintf(a.stdout, "%s exported to %s\n", plural(len(loaded.Placements), "pod"), path)
	return err
}

// openPlacements opens the placements of the manager, which does not run meanwhile.
func (a *app) openPlacements() (*state.Store, state.Loaded, error) {
	if err := atomicfile.MakeDirs(a.plugin.StateDir); err != nil {
		return nil, state.Loaded{}, fmt.Errorf("state-dir: %w", err)
	}
	store, loaded, err := state.Open(a.placementsFile(), state.Options{Log: a.log})
	if err != nil {
		return nil, state.Loaded{}, fmt.Errorf("open the placements of the device manager: %w", err)
	}
	return store, loaded, nil
}

// inputTime is how long a pipe is waited for.
const inputTime = 10 * time.Second

// readNamed reads a file that the user named, or standard input for -. It is an error if there is nothing in it, and
// wraps tooLarge if there are more than limit bytes.
func (a *app) readNamed(path string, limit int64, tooLarge error) ([]byte, error) {
	var data []byte
	var err error
	if path == "-" {
		path = "standard input"
		data, err = io.ReadAll(io.LimitReader(a.stdin, limit+1))
	} else {
		data, err = regular.ReadInput(path, limit+1, inputTime)
	}
	switch {
	case err != nil:
		return nil, err
	case int64(len(data)) > limit:
		return nil, fmt.Errorf("%s: %w", path, tooLarge)
	case len(bytes.TrimSpace(data)) == 0:
		return nil, fmt.Errorf("%s is empty", path)
	}
	return data, nil
}
