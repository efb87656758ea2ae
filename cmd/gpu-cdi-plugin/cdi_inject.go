package main

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/wording"
)

func (a *app) injectCommand() *cobra.Command {
	var bundle string
	cmd := &cobra.Command{
		Use:   "inject --bundle DIR NAME...",
		Short: "Put devices into an OCI bundle",
		Long: `Puts CDI devices into the config.json of an OCI bundle, for a runtime without CDI: runc, crun, youki.
The specs are those in /etc/cdi (under --root) and --cdi-dir. A name is VENDOR/CLASS=DEVICE, or DEVICE for one of
--cdi-kind. It puts in all devices or none; devices that the file already has stay as they are. It is an error if the
bundle has files of another driver version than the specs: make a new config.json after an upgrade.`,
		Example: `  gpu-cdi-plugin cdi inject --bundle . nvidia.com/gpu=0 nvidia.com/gpu=1
  gpu-cdi-plugin cdi inject --bundle /run/bundles/a all`,
		Args:              someNames,
		ValidArgsFunction: a.completeDevices,
		RunE:              func(_ *cobra.Command, args []string) error { return a.cdiInject(bundle, args) },
	}
	cmd.Flags().StringVar(&bundle, "bundle", "", "`directory` of the bundle, which holds config.json")
	_ = cmd.MarkFlagRequired("bundle")
	return cmd
}

func someNames(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return nil
	}
	return cli.With(cli.Usage, "gpu-cdi-plugin cdi list -o name lists the devices",
		errors.New("name at least one device"))
}

func (a *app) cdiInject(bundle string, names []string) error {
	if bundle == "" { // most likely an unset variable in a script; the current directory is not meant
		return cli.With(cli.Usage, "see gpu-cdi-plugin cdi inject --help", errors.New("--bundle is empty"))
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	names = a.qualified(names)
	trusted := func(path string) error { return a.CheckPath(trust.File, path) }
	if err := cdi.Load(a.specDirs(h)...).CheckTrust(names, trusted); err != nil {
		return err
	}
	changed, err := cdi.Inject(bundle, names, cdi.Additions{}, a.specDirs(h)...)
	if errors.Is(err, cdi.ErrNoConfig) {
		err = cli.With(cli.Failure, "runc spec --bundle "+wording.Quote(bundle)+" makes one", err)
	}
	if err != nil {
		return err
	}
	a.Log.Debug("the devices are in the bundle "+bundle, "changed", changed)
	return nil
}

// qualified adds the kind to those names that have none.
func (a *app) qualified(names []string) []string {
	names = slices.Clone(names)
	for i, name := range names {
		if !strings.Contains(name, "=") {
			names[i] = a.CDIKind + "=" + name
		}
	}
	return names
}

// completeDevices completes the names of devices that are not on the command line yet.
func (a *app) completeDevices(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	// A completion does not run the verb, so it must read the environment and the configuration file itself.
	if err := a.Resolve(); err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	h, err := a.host()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	given := a.qualified(args)
	var names []string
	for _, name := range cdi.Load(a.specDirs(h)...).Names() {
		if strings.HasPrefix(name, prefix) && !slices.Contains(given, name) {
			names = append(names, name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
