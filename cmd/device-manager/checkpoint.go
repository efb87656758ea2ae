package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/manager/state"
)

func (a *app) checkpointCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "checkpoint",
		Short: "Exchange placements with a kubelet",
		Long: `Reads and writes the file in which a kubelet records the devices of its pods, ` +
			kubelet.CheckpointName + `, in its
device plugin directory. Neither the kubelet nor the manager may be running: each reads its record when it starts.`,
		Example: `  device-manager checkpoint export /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint
  device-manager checkpoint import /var/lib/kubelet/device-plugins/kubelet_internal_checkpoint`,
		Annotations: cli.Statuses(cli.OK, cli.Usage),
		Args:        cli.UnknownVerb,
		RunE:        cli.ShowHelp,
	}
	cmd.PersistentFlags().AddFlag(a.ServiceFlags.Lookup("state-dir"))
	cmd.AddCommand(a.importCommand(), a.exportCommand())
	return cmd
}

// checkpointFile is the argument check of the verbs below checkpoint.
var checkpointFile = cli.Arguments("one file", 1, 1)

func (a *app) importCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "import FILE",
		Short: "Import the placements of a kubelet",
		Long: `Adds the placements in a kubelet's file to those of the manager, all of them or none. The file has the
UIDs of pods, but no names. If a pod or a device is already placed, the import fails, but a pod with the same devices
is left as it is, so a file can be imported twice. If devices are withheld because the manager's own file was damaged,
the import frees those that no imported pod has. - is standard input.`,
		Example:           `  device-manager checkpoint import /var/lib/kubelet/device-plugins/` + kubelet.CheckpointName,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Locked, cli.Interrupted),
		Args:              checkpointFile,
		ValidArgsFunction: cli.CompleteFile(),
		RunE:              func(_ *cobra.Command, args []string) error { return a.importCheckpoint(args[0]) },
	}
}

func (a *app) exportCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "export FILE",
		Short: "Export the manager's placements for a kubelet",
		Long: `Writes the placements of the manager to a file that a kubelet reads when it starts, with its checksum. - is
standard output. The kubelet knows a pod by its UID, so the pods keep their devices if the kubelet runs them under
the same UIDs.`,
		Example:           `  device-manager checkpoint export /var/lib/kubelet/device-plugins/` + kubelet.CheckpointName,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Locked, cli.Interrupted),
		Args:              checkpointFile,
		ValidArgsFunction: cli.CompleteFile(),
		RunE:              func(_ *cobra.Command, args []string) error { return a.exportCheckpoint(args[0]) },
	}
}

// maxCheckpoint is the largest size of a checkpoint, in bytes. A checkpoint with 10,000 devices is smaller.
const maxCheckpoint = 64 << 20

func (a *app) importCheckpoint(path string) error {
	data, err := a.readNamed(path, maxCheckpoint, fmt.Errorf("it is larger than %d MiB", maxCheckpoint>>20))
	if err != nil {
		return fmt.Errorf("import the checkpoint: %w", err)
	}
	c, err := kubelet.ParseCheckpoint(data)
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
	imported, err := manager.Importable(loaded.Placements, manager.PlacementsOf(c), names)
	if err != nil {
		return fmt.Errorf("import the checkpoint %s: %w", path, errors.Join(err, store.Close()))
	}
	caller, now := model.Caller{UID: os.Getuid(), GID: os.Getgid(), PID: os.Getpid()}, time.Now().UTC()
	for i := range imported {
		imported[i].Admitted, imported[i].Caller = now, caller
	}
	// With the names stored, pods that request these resources are rejected until the plugins register. Otherwise such
	// pods would start without devices.
	if err := errors.Join(store.Import(imported, names), store.Close()); err != nil {
		return fmt.Errorf("import the checkpoint %s: %w", path, err)
	}
	if loaded.Loss != nil {
		a.Log.Warn("no device is withheld any more: the import says which pods have devices", "lost", loaded.Loss.File)
	}
	_, err = fmt.Fprintf(a.Stdout, "%s imported into %s\n", wording.Count(len(imported), "pod"), a.placementsFile())
	return err
}

func (a *app) exportCheckpoint(path string) error {
	store, loaded, err := a.openPlacements()
	if err != nil {
		return err
	}
	if err := store.Close(); err != nil {
		return err
	}
	if loaded.Loss != nil {
		return cli.With(cli.Failure,
			"import a checkpoint that says which pods have devices, or free the devices that no pod has with the verb "+
				"release --withheld while serve runs",
			fmt.Errorf("export the checkpoint: placements are lost: %s", loaded.Loss.Reason))
	}
	for i := range loaded.Placements {
		loaded.Placements[i].Allocations = loaded.Placements[i].Held()
	}
	registered := map[string][]string{}
	for _, name := range loaded.Resources {
		registered[name] = []string{}
	}
	data, err := manager.NewCheckpoint(loaded.Placements, registered).Marshal()
	if err != nil {
		return fmt.Errorf("export the checkpoint: %w", err)
	}
	if path == "-" {
		_, err = a.Stdout.Write(data)
		return err
	}
	if err := fileio.Replace(path, data, 0o600); err != nil {
		return fmt.Errorf("export the checkpoint: %w", err)
	}
	_, err = fmt.Fprintf(a.Stdout, "%s exported to %s\n", wording.Count(len(loaded.Placements), "pod"), path)
	return err
}

// openPlacements opens the file with the manager's placements. The manager must not run meanwhile.
func (a *app) openPlacements() (*state.Store, state.Loaded, error) {
	if err := fileio.MakeDirs(a.StateDir); err != nil {
		return nil, state.Loaded{}, fmt.Errorf("state-dir: %w", err)
	}
	store, loaded, err := state.Open(a.placementsFile(), a.Log, earlierPlacements)
	if err != nil {
		return nil, state.Loaded{}, fmt.Errorf("open the placements of the device manager: %w", err)
	}
	return store, loaded, nil
}
