package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/cmd/gpu-cdi-plugin/doctor"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/systemd"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/wording"
	managerconfig "gpu-cdi-plugin/manager/config"
)

// doctorOptions are the options of the verb doctor.
type doctorOptions struct {
	cli.Output
	Capabilities *driver.Capabilities
	// Try is the engine with which a container is started, or empty.
	Try, Device string
	// configFile is a configuration file that is not used because of the mistake configErr.
	configFile string
	configErr  error
}

func (a *app) doctorCommand() *cobra.Command {
	var opts doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what is wrong on this host, and how to mend it",
		Long: `Examines the host and prints for each finding what is wrong, why it matters and what mends it: the
driver and its device nodes, the configuration of containerd, CRI-O, docker and podman, CDI specs, the kubelet and its
device plugins, OCI hooks, the services and configuration of this product, and what the kernel limits. It changes
nothing. docs/doctor.md, in /usr/share/doc/gpu-cdi-plugin or the source code, has all findings.

An error means that some containers do not start or have no GPU; a warning, that it works only for some or only for
now, or that containers can get more than they should. Both give the exit status 4. A note does not: it says what
could not be checked. Give the options with which the spec was written and with which serve runs.

--try also starts a container with GPUs by an engine. Its only program is prestart-hook, which opens the device nodes
and searches for the driver's libraries ("prestart-hook check" does the same in a container of yours). It is removed
again, with its image, which is made here and needs no registry.`,
		Example: `  gpu-cdi-plugin doctor
  gpu-cdi-plugin doctor -o wide
  gpu-cdi-plugin doctor --try podman --device 0
  gpu-cdi-plugin doctor -o json | jq -r '.findings[] | select(.severity == "error").fix'`,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Differs, cli.Interrupted),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, _ []string) error { return a.doctor(cmd, opts) },
	}
	cmd.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		opts.configFile, opts.configErr = a.mistakeInConfig(cmd)
		if opts.configErr == nil {
			return a.Start(cmd)
		}
		// The host is examined all the same. What mends it is run later, with the corrected file.
		flag := cmd.Flags().Lookup("config")
		given, changed := flag.Value.String(), flag.Changed
		flag.Changed = true
		err := errors.Join(flag.Value.Set(""), a.Start(cmd), flag.Value.Set(given))
		flag.Changed = changed
		return err
	}
	opts.AddFlags(cmd, "table", "wide", "json", "yaml")
	opts.Capabilities = addCapabilitiesFlag(cmd.Flags())
	cmd.Flags().Var(&cli.Choice{Value: &opts.Try, Known: doctor.TryEngines()}, "try",
		"`engine` with which to start a container: "+strings.Join(doctor.TryEngines(), ", "))
	cmd.Flags().StringVar(&opts.Device, "device", "",
		"`name` of the CDI device that the container of --try gets (default: all of --cdi-kind)")
	_ = cmd.RegisterFlagCompletionFunc("device",
		func(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
			return a.completeDevices(cmd, nil, prefix)
		})
	a.addTimeout(cmd)
	for _, name := range []string{
		"device-plugin-dir", "plugins-registry-dir", "pod-resources-socket", "registration", "state-dir",
	} {
		cmd.Flags().AddFlag(a.ServiceFlags.Lookup(name))
	}
	return cmd
}

// mistakeInConfig returns the configuration file that Start would read, and what is wrong with its content.
func (a *app) mistakeInConfig(cmd *cobra.Command) (file string, mistake error) {
	flag := cmd.Flags().Lookup("config")
	file = flag.Value.String()
	for _, variable := range a.Env {
		if value, ok := strings.CutPrefix(variable, "GPU_CDI_CONFIG="); ok && !flag.Changed {
			file = value
		}
	}
	data, err := fileio.ReadFile(file, configfile.MaxFile)
	if err != nil {
		return "", nil //nolint:nilerr // Start says why it cannot be read, if it must
	}
	return file, checkConfig(data)
}

// checkConfig returns what is wrong with the content of a configuration file of this program.
func checkConfig(data []byte) error {
	c := config.Default()
	if _, err := config.Keys.Parse(data, &c); err != nil {
		return err
	}
	return c.Validate()
}

// checkManagerConfig does what checkConfig does, for device-manager.
func checkManagerConfig(data []byte) error {
	c := managerconfig.Default()
	if _, err := managerconfig.Keys.Parse(data, &c); err != nil {
		return err
	}
	return c.Validate()
}

func (a *app) doctor(cmd *cobra.Command, opts doctorOptions) error {
	ctx := cmd.Context()
	h, err := a.host()
	if err != nil {
		return err
	}
	if opts.Device != "" && opts.Try == "" {
		return cli.With(cli.Usage, "name the engine with --try", errors.New("--device is for the container of --try"))
	}
	o := a.examination(h, *opts.Capabilities)
	o.ConfigFile, o.ConfigErr = opts.configFile, opts.configErr
	list := doctor.Examine(ctx, o)
	if opts.Try != "" {
		hook, err := a.hook()
		if err != nil {
			return err
		}
		tried, err := doctor.Try(ctx, doctor.TryOptions{
			Engine: opts.Try, Device: a.qualified([]string{cmp.Or(opts.Device, cdi.AllDevices)})[0], Hook: hook,
			CDIDirs: a.specDirs(h),
		})
		if err != nil && ctx.Err() == nil {
			return err
		}
		list = doctor.Sort(append(list, tried...))
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	for i := range list {
		list[i].Fix = a.WithOptions(cmd, list[i].Fix)
	}
	v := findingsView(list)
	if opts.Format == "table" {
		v.Text = findingsText(list)
	}
	if err := opts.Print(a.Stdout, v); err != nil {
		return err
	}
	return findingsError(list)
}

// examination returns which host is examined, and how the driver is asked.
func (a *app) examination(h host.Host, c driver.Capabilities) doctor.Options {
	hook, noHook := a.specHook()
	return doctor.Options{
		Host: h, CDIDir: a.CDIDir, CDIKind: a.CDIKind, Hook: hook, NoHook: noHook, Capabilities: c,
		PluginDir: a.plugin.DevicePluginDir, RegistryDir: a.plugin.PluginsRegistryDir,
		PodResources: a.plugin.PodResourcesSocket, Watcher: a.plugin.Registration == config.RegisterWatcher,
		CheckConfig: checkConfig, CheckManagerConfig: checkManagerConfig,
		StateDir: a.plugin.StateDir, Systemd: filepath.Join(h.Root(), systemd.Socket),
		Devices: func(ctx context.Context) (*gpu.Snapshot, error) {
			s, err := a.readDevices(ctx, h)
			if errors.Is(err, errNoGPU) {
				return &gpu.Snapshot{}, nil
			}
			return s, err
		},
		Advice:      func(err error) string { return cli.HintOf(a.Classify(err)) },
		TrustedFile: func(path string) error { return a.CheckPath(trust.File, path) },
		TrustedHook: func(path string) error { return a.CheckPath(trust.RootFile, path) },
		TrustedDir:  func(path string) error { return a.CheckPath(trust.Dir, path) },
	}
}

// findingsText has three lines for each finding, which are too long for the columns of a table.
func findingsText(list []doctor.Finding) string {
	var text strings.Builder
	for _, f := range list {
		fmt.Fprintf(&text, "%s: %s: %s: %s\n  why:  %s\n  mend: %s\n",
			f.Severity, f.ID, line(f.Subject), line(f.Problem), f.Why, line(f.Fix))
	}
	if !slices.ContainsFunc(list, doctor.Finding.IsFault) {
		text.WriteString("nothing is wrong on this host\n")
	}
	return wording.Visible(text.String())
}

// line returns a text in one line.
func line(text string) string { return strings.Join(strings.Fields(text), " ") }

// findingsView has one row for each finding.
func findingsView(list []doctor.Finding) cli.View {
	t := cli.Table{Header: []string{"SEVERITY", "FINDING", "SUBJECT", "PROBLEM", "WHY", "MEND"}}
	for _, f := range list {
		t.Rows = append(t.Rows, []string{string(f.Severity), f.ID, f.Subject, f.Problem, f.Why, f.Fix})
	}
	return cli.View{Data: map[string][]doctor.Finding{"findings": append([]doctor.Finding{}, list...)}, Table: t}
}

// findingsError returns an error if there are errors or warnings among the findings.
func findingsError(list []doctor.Finding) error {
	count := map[doctor.Severity]int{}
	for _, f := range list {
		count[f.Severity]++
	}
	var what []string
	for _, severity := range []doctor.Severity{doctor.Error, doctor.Warning} {
		if n := count[severity]; n > 0 {
			what = append(what, wording.Count(n, string(severity)))
		}
	}
	if what == nil {
		return nil
	}
	return cli.With(cli.Differs, "do what mend says, then run doctor again",
		errors.New("this host has "+strings.Join(what, " and ")))
}
