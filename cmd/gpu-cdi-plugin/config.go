package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpu-cdi-plugin/config"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/resource"
)

// The sources of a value, besides the names of the configuration file and of environment variables.
const (
	fromDefault = "default"
	fromFlag    = "flag"
)

// readConfig reads the file of --config.
func readConfig(path string) (*config.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, noConfig(err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, config.MaxFile+1))
	if err != nil {
		return nil, noConfig(err)
	}
	file, err := config.Parse(data)
	if err != nil {
		return nil, cli.With(cli.Usage, "see gpu-cdi-plugin config default for all keys",
			fmt.Errorf("configuration %s: %w", path, err))
	}
	return file, nil
}

func noConfig(err error) error {
	return cli.With(cli.Usage, "set --config or "+envName("config")+" to a readable file",
		fmt.Errorf("read the configuration: %w", err))
}

// addPluginFlags adds the options of the device plugin to a verb. Every verb resolves and validates them.
func (a *app) addPluginFlags(cmd *cobra.Command) {
	cmd.Flags().AddFlagSet(a.pluginFlags)
	completeDirs(cmd, "device-plugin-dir", "plugins-registry-dir", "runtime-dir", "state-dir")
	completeChoices(cmd, a.pluginFlags, "registration", "mig-strategy", "device-id-strategy")
	for name, values := range map[string][]string{"extras": config.Extras(), "strategy": config.Strategies()} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
}

// newPluginFlags returns the flags of the device plugin: the keys whose value is a scalar or a list of scalars.
func newPluginFlags(p *config.Plugin) *pflag.FlagSet {
	f := pflag.NewFlagSet("plugin", pflag.ContinueOnError)
	text := func(value *string, name string) { f.StringVar(value, name, *value, config.Usage(name)) }
	text(&p.DevicePluginDir, "device-plugin-dir")
	text(&p.PluginsRegistryDir, "plugins-registry-dir")
	f.Var(&choice{(*string)(&p.Registration), config.Registrations()}, "registration", config.Usage("registration"))
	text(&p.RuntimeDir, "runtime-dir")
	text(&p.StateDir, "state-dir")
	f.Var(&names[config.Strategy]{&p.Strategy}, "strategy", config.Usage("strategy"))
	f.Var(&choice{(*string)(&p.DeviceIDStrategy), config.DeviceIDStrategies()}, "device-id-strategy",
		config.Usage("device-id-strategy"))
	text(&p.CDIAnnotationPrefix, "cdi-annotation-prefix")
	f.Var(&p.GPUTimeout, "gpu-timeout", config.Usage("gpu-timeout"))
	f.BoolVar(&p.FailOnInitError, "fail-on-init-error", p.FailOnInitError, config.Usage("fail-on-init-error"))
	text(&p.Listen, "listen")
	f.Var(&names[config.Extra]{&p.Extras}, "extras", config.Usage("extras"))
	text(&p.Resource, "resource")
	f.Var(&choice{(*string)(&p.MIGStrategy), resource.MIGStrategies()}, "mig-strategy", config.Usage("mig-strategy"))
	f.BoolVar(&p.MPS, "mps", p.MPS, config.Usage("mps"))
	return f
}

// names is a flag with a list of names. The last use of the flag replaces the list.
type names[T ~string] struct{ list *[]T }

var _ pflag.Value = (*names[config.Strategy])(nil)

func (n *names[T]) String() string { return config.Join(*n.list) }

// Type implements pflag.Value.
func (n *names[T]) Type() string { return "string" }

// Set parses names separated by commas, or a list as in the file, [a, b]. The whole configuration is validated later.
func (n *names[T]) Set(text string) error {
	*n.list = []T{}
	if list, ok := strings.CutPrefix(strings.TrimSpace(text), "["); ok {
		text = strings.TrimSuffix(list, "]")
	}
	for name := range strings.SplitSeq(text, ",") {
		if name = strings.Trim(strings.TrimSpace(name), `"'`); name != "" {
			*n.list = append(*n.list, T(name))
		}
	}
	return nil
}

// resolve sets the options that were not given as flags, from the environment and then from the file, and returns all
// problems at once.
func (a *app) resolve(flags *pflag.FlagSet) error {
	var errs []error
	set := func(name, value, source, text string) {
		if err := flags.Set(name, value); err != nil {
			err = cli.ValueError(flags.Lookup(name), value, errors.Unwrap(err))
			errs = append(errs, fmt.Errorf("%s: %w", text, err))
			return
		}
		a.sources[name] = source
	}
	env := environment(a.env)
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			a.sources[f.Name] = fromFlag
		} else if value, ok := env[envName(f.Name)]; ok {
			set(f.Name, value, envName(f.Name), envName(f.Name)+"="+value)
		}
	})
	if a.Config != "" {
		file, err := readConfig(a.Config)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		for name, value := range file.Flags() {
			if !flags.Changed(name) {
				set(name, value, a.Config, a.Config+": "+name)
			}
		}
		a.takeRules(file)
	}
	full := a.configuration()
	return errors.Join(append(errs, full.Validate())...)
}

// takeRules sets the options that only a file can have.
func (a *app) takeRules(file *config.File) {
	from := &file.Config.Plugin
	a.plugin.GPUs, a.plugin.Names, a.plugin.Sharing = from.GPUs, from.Names, from.Sharing
	a.plugin.IMEX, a.plugin.Allocation = from.IMEX, from.Allocation
	for _, key := range []string{"imex", "allocation", "gpus", "resources", "sharing"} {
		if file.Sets(key) {
			a.sources[key] = a.Config
		}
	}
}

// configuration returns the effective configuration.
func (a *app) configuration() config.Config {
	return config.Config{Common: a.Common, Plugin: a.plugin}
}
