package cli

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wording"
)

// fromFlag marks a value that comes from a flag, not from the configuration file or the environment.
const fromFlag = "flag"

// addOptions adds a flag for each option in a part of the configuration.
func (p *Program) addOptions(f *pflag.FlagSet, part any) {
	for _, option := range p.Keys.Options(part) {
		flag := f.VarPF(option, option.Name(), "", option.Usage())
		if option.Type() == "bool" {
			flag.NoOptDefVal = "true"
		}
	}
}

// option returns the value of a common option in the effective configuration.
func (p *Program) option(name string) string { return p.CommonFlags.Lookup(name).Value.String() }

// flags returns the flags whose values can also come from the environment and the file.
func (p *Program) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("options", pflag.ContinueOnError)
	f.AddFlagSet(p.CommonFlags)
	f.AddFlagSet(p.ServiceFlags)
	return f
}

// Resolve sets the options that have no flag on the command line from the environment, then from the file, and returns
// all problems at once.
func (p *Program) Resolve() error {
	errs := p.goneVariables()
	given := map[*pflag.Flag]string{} // these override the file
	env := p.environment()
	p.flags().VisitAll(func(f *pflag.Flag) {
		name := p.envName(f.Name)
		value, set := env[name]
		switch {
		case f.Changed:
			p.sources[f.Name] = fromFlag
		case !set:
			return
		default:
			if err := f.Value.Set(value); err != nil {
				errs = append(errs, fmt.Errorf("%s=%s: %w", name, value, err))
				return
			}
			p.sources[f.Name] = name
		}
		given[f] = f.Value.String()
	})
	if p.configFile != "" {
		if err := p.readConfig(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		for f, value := range given {
			errs = append(errs, f.Value.Set(value))
		}
	}
	return errors.Join(append(errs, p.Config.Validate())...)
}

// Reread sets the options of this new program again: flags and environment are those of the earlier program, and the
// file is read anew.
func (p *Program) Reread(earlier *Program) error {
	p.Env, p.Stdin, p.Stdout, p.Stderr = earlier.Env, earlier.Stdin, earlier.Stdout, earlier.Stderr
	p.Log, p.warned = earlier.Log, earlier.warned
	flags := p.flags()
	var errs []error
	earlier.flags().VisitAll(func(f *pflag.Flag) {
		if earlier.sources[f.Name] == fromFlag {
			errs = append(errs, flags.Set(f.Name, f.Value.String()))
		}
	})
	return errors.Join(append(errs, p.Resolve())...)
}

// configTime is how long to wait for a configuration that is read from a pipe.
const configTime = 10 * time.Second

// readConfig reads the file of --config into the configuration.
func (p *Program) readConfig() error {
	data, err := fileio.ReadInput(p.configFile, configfile.MaxFile+1, configTime)
	switch {
	case errors.Is(err, fs.ErrNotExist) && p.sources["config"] == "": // the default file is optional
		p.configFile = ""
		return nil
	case err != nil:
		return With(Usage, "set --config or "+p.envName("config")+" to a readable file",
			fmt.Errorf("read the configuration: %w", err))
	}
	keys, err := p.Keys.Parse(data, p.Config)
	if err != nil {
		return With(Usage, "see "+p.Name+" config default for all keys",
			fmt.Errorf("configuration %s: %w", p.configFile, err))
	}
	for _, key := range keys {
		if p.sources[key] == "" {
			p.sources[key] = p.configFile
		}
	}
	return nil
}

// envName returns the environment variable of a flag, like GPU_CDI_CDI_DIR for cdi-dir.
func (p *Program) envName(flag string) string {
	return p.EnvPrefix + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// environment returns the variables that begin with EnvPrefix. If a variable occurs several times, the last one
// counts.
func (p *Program) environment() map[string]string {
	ours := map[string]string{}
	for _, kv := range p.Env {
		if name, value, ok := strings.Cut(kv, "="); ok && strings.HasPrefix(name, p.EnvPrefix) {
			ours[name] = value
		}
	}
	return ours
}

// goneVariables returns an error for each variable of a removed option.
func (p *Program) goneVariables() []error {
	var errs []error
	env := p.environment()
	for _, key := range slices.Sorted(maps.Keys(p.Keys.Gone)) {
		name := p.envName(key)
		if _, set := env[name]; set {
			errs = append(errs, fmt.Errorf("%s: %s", name, p.Keys.Gone[key]))
		}
	}
	return errs
}

// warnUnknownEnv logs the variables that begin with EnvPrefix but set no option. Most often they are misspelt.
func (p *Program) warnUnknownEnv() {
	unknown := p.environment()
	var known []string
	p.flags().VisitAll(func(f *pflag.Flag) {
		delete(unknown, p.envName(f.Name))
		known = append(known, p.envName(f.Name))
	})
	for _, name := range slices.Sorted(maps.Keys(unknown)) {
		p.Log.Warn("the environment variable " + name + " is ignored, since no option has this name" +
			wording.Question(name, known))
	}
	if p.OldEnvPrefix == "" {
		return
	}
	for _, variable := range p.Env {
		old, _, _ := strings.Cut(variable, "=")
		now := p.EnvPrefix + strings.TrimPrefix(old, p.OldEnvPrefix)
		if strings.HasPrefix(old, p.OldEnvPrefix) && slices.Contains(known, now) {
			p.Log.Warn("the environment variable " + old + " is ignored by this program: the option's name is " + now + " here")
		}
	}
}

// flagError does what FlagError does, and also knows the removed options and flags.
func (p *Program) flagError(cmd *cobra.Command, err error) error {
	if e, ok := errors.AsType[*pflag.NotExistError](err); ok {
		if text := cmp.Or(p.Keys.Gone[e.GetSpecifiedName()], p.GoneFlags[e.GetSpecifiedName()]); text != "" {
			return fmt.Errorf("--%s: %s", e.GetSpecifiedName(), text)
		}
	}
	return FlagError(cmd, err)
}
