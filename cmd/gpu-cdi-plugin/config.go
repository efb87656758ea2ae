package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/near"
	"gpu-cdi-plugin/internal/regular"
)

// fromFlag is the source of a value besides the configuration file and environment variables.
const fromFlag = "flag"

// addOptions adds a flag for each option of a part of the configuration.
func addOptions(f *pflag.FlagSet, part any) {
	for _, option := range config.Options(part) {
		flag := f.VarPF(option, option.Name(), "", option.Usage())
		if option.Type() == "bool" {
			flag.NoOptDefVal = "true"
		}
	}
}

// options returns the flags whose values can also come from the environment and the file.
func (a *app) options() *pflag.FlagSet {
	f := pflag.NewFlagSet("options", pflag.ContinueOnError)
	f.AddFlagSet(a.commonFlags)
	f.AddFlagSet(a.pluginFlags)
	f.AddFlagSet(a.managerFlags)
	return f
}

// resolve sets the options that were not given as flags, from the environment and then from the file, and returns all
// problems at once.
func (a *app) resolve(flags *pflag.FlagSet) error {
	var errs []error
	given := map[*pflag.Flag]string{} // what overrides the file
	env := environment(a.env)
	flags.VisitAll(func(f *pflag.Flag) {
		name := envName(f.Name)
		value, set := env[name]
		switch {
		case f.Changed:
			a.sources[f.Name] = fromFlag
		case !set:
			return
		default:
			if err := f.Value.Set(value); err != nil {
				errs = append(errs, fmt.Errorf("%s=%s: %w", name, value, err))
				return
			}
			a.sources[f.Name] = name
		}
		given[f] = f.Value.String()
	})
	if a.configFile != "" {
		file, err := readConfig(a.configFile)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		a.Common, a.plugin, a.manager = file.Config.Common, file.Config.Plugin, file.Config.Manager
		for _, key := range file.Keys {
			if a.sources[key] == "" {
				a.sources[key] = a.configFile
			}
		}
		for f, value := range given {
			errs = append(errs, f.Value.Set(value))
		}
	}
	full := a.configuration()
	return errors.Join(append(errs, full.Validate())...)
}

// configuration returns the effective configuration.
func (a *app) configuration() config.Config {
	return config.Config{Common: a.Common, Plugin: a.plugin, Manager: a.manager}
}

// configTime is how long a pipe as configuration is waited for.
const configTime = 10 * time.Second

// readConfig reads the file of --config.
func readConfig(path string) (*config.File, error) {
	data, err := regular.ReadInput(path, config.MaxFile+1, configTime)
	if err != nil {
		return nil, cli.With(cli.Usage, "set --config or "+envName("config")+" to a readable file",
			fmt.Errorf("read the configuration: %w", err))
	}
	file, err := config.Parse(data)
	if err != nil {
		return nil, cli.With(cli.Usage, "see gpu-cdi-plugin config default for all keys",
			fmt.Errorf("configuration %s: %w", path, err))
	}
	return file, nil
}

const envPrefix = "GPU_CDI_"

// envName returns the environment variable of a flag: GPU_CDI_CDI_DIR for cdi-dir.
func envName(flag string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// environment returns the variables that begin with envPrefix. The last one wins if there are several, as in exec.
func environment(env []string) map[string]string {
	ours := map[string]string{}
	for _, kv := range env {
		if name, value, ok := strings.Cut(kv, "="); ok && strings.HasPrefix(name, envPrefix) {
			ours[name] = value
		}
	}
	return ours
}

// warnUnknownEnv logs the variables that begin with envPrefix but are no option: most often a misspelt one.
func (a *app) warnUnknownEnv(flags *pflag.FlagSet) {
	unknown := environment(a.env)
	var known []string
	flags.VisitAll(func(f *pflag.Flag) {
		delete(unknown, envName(f.Name))
		known = append(known, envName(f.Name))
	})
	for _, name := range slices.Sorted(maps.Keys(unknown)) {
		a.log.Warn("the environment variable " + name + " is ignored, since no option has this name" +
			near.Question(name, known))
	}
}
