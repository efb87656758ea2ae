package main

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpu-cdi-plugin/config"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/nvml"
)

// app is what all verbs share: the options for all of them, and where input comes from and output goes.
type app struct {
	globals
	plugin         config.Plugin
	pluginFlags    *pflag.FlagSet
	timeout        time.Duration     // of the verbs that ask the driver
	sources        map[string]string // where the value of a key comes from, unless from the defaults
	env            []string
	stdin          io.Reader
	stdout, stderr io.Writer
	log            *slog.Logger
	hangups        hangups   // of the verb that reads its configuration again
	ending         *ending   // what signals do
	warned         *sync.Map // the paths that --insecure-paths allowed, each of which is logged once
	started        bool      // the command line was understood: from here on an error is not one of use
}

// newApp has the defaults for everything that can be configured.
func newApp() *app {
	a := &app{
		globals: defaultGlobals, plugin: config.Default().Plugin, timeout: nvml.DefaultTimeout, sources: map[string]string{},
		warned: new(sync.Map),
	}
	a.pluginFlags = newPluginFlags(&a.plugin)
	return a
}

// options are the flags whose values can come from the environment and the file too.
func (a *app) options(cmd *cobra.Command) *pflag.FlagSet {
	f := pflag.NewFlagSet("options", pflag.ContinueOnError)
	f.AddFlagSet(cmd.Root().PersistentFlags())
	f.AddFlagSet(a.pluginFlags)
	return f
}

// run is the whole program, which a signal ends too. It returns the exit status.
func run(ctx context.Context, args, env []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := newApp()
	a.env, a.stdin, a.stdout, a.stderr = env, stdin, stdout, stderr
	ctx, a.ending = untilSignal(ctx)
	defer a.ending.close()
	root := a.rootCommand() //nolint:contextcheck // the verbs get ctx from cobra
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	err = classify(err)
	switch {
	case err == nil:
		return int(exit.OK)
	case ctx.Err() != nil:
		err = exit.With(exit.Interrupted, "", errors.New("interrupted"))
	case !a.started && exit.CodeOf(err) == exit.Failure:
		err = exit.With(exit.Usage, cli.UsageHint(cmd), err)
	}
	err = a.withOptions(cmd, err)
	cli.Report(a.stderr, err, wantsJSON(cmd, args) || a.LogFormat == "json")
	return int(exit.CodeOf(err))
}

// placeFlags are the options that say where things are, what they are called, and whether they are trusted. A command
// that a hint names needs those that were given, or it works on another node.
var placeFlags = []string{
	"config", "root", "driver-root", "dev-root", "nvml-library", "cdi-dir", "cdi-kind", "hook-path", "insecure-paths",
	"capabilities", "extras",
}

// withOptions adds the options that cmd was given as flags to the commands in the hint of err. Those that only generate
// has follow its name. A command that explains this program itself needs none.
func (a *app) withOptions(cmd *cobra.Command, err error) error {
	const program, generate = "gpu-cdi-plugin ", "cdi generate "
	hint := exit.HintOf(err)
	if strings.Contains(hint, "--help") || strings.Contains(hint, "config default") {
		return err
	}
	for _, name := range slices.Backward(placeFlags) {
		f := cmd.Flags().Lookup(name)
		given := f != nil && f.Changed && cmp.Or(a.sources[name], fromFlag) == fromFlag
		if !given || f.Value.String() == "" {
			continue
		}
		option := "--" + name + " " + shellWord(f.Value.String()) + " "
		if f.Value.Type() == "bool" {
			option = "--" + name + "=" + f.Value.String() + " "
		}
		if cmd.InheritedFlags().Lookup(name) != nil {
			hint = strings.ReplaceAll(hint, program, program+option)
		} else {
			hint = strings.ReplaceAll(hint, generate, generate+option)
		}
	}
	if hint == exit.HintOf(err) {
		return err
	}
	return exit.With(exit.CodeOf(err), hint, err)
}

// shellWord is text as a shell takes it for one word.
func shellWord(text string) string {
	if strings.Trim(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-,:=+@%") == "" {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

func (a *app) rootCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gpu-cdi-plugin",
		Short: "Gives containers their GPUs through CDI",
		Long: strings.TrimSpace(`
Tells what GPUs a node has, writes a CDI spec for them, checks whether that spec is still true, and gives the GPUs to
containers.

Options come from flags, then from the environment (GPU_CDI_ and the flag's name in capitals, such as GPU_CDI_CDI_DIR),
then from the file of --config, whose keys are the flags' names; gpu-cdi-plugin config default prints one.
`),
		Annotations:       cli.Statuses(exit.OK, exit.Failure, exit.Usage, exit.Interrupted),
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
		Args:              cli.UnknownVerb,
		RunE:              showHelp,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return a.start(cmd) },
	}
	cmd.CompletionOptions.DisableDefaultCmd = true
	cmd.SetHelpFunc(cli.Help(meanings))
	cmd.SetHelpCommand(cli.HelpCommand(cli.UnknownVerb, completeVerbs))
	cmd.SetFlagErrorFunc(cli.FlagError)
	cli.AddVersion(cmd, thisBuild().Version)
	a.addFlags(cmd)
	cmd.AddCommand(
		a.devicesCommand(),
		a.topologyCommand(),
		a.cdiCommand(),
		a.serveCommand(),
		mpsExecCommand(),
		a.configCommand(),
		a.versionCommand(),
		a.completionCommand(),
	)
	return cmd
}

// start runs before each verb, when its arguments are known to be well formed.
func (a *app) start(cmd *cobra.Command) error {
	if err := a.resolve(a.options(cmd)); err != nil {
		return err
	}
	if err := cmd.ValidateRequiredFlags(); err != nil { // cobra itself would do so later
		return err
	}
	format := a.LogFormat
	if !cmd.Flags().Changed("log-format") && wantsJSON(cmd, nil) {
		format = "json" // who reads stderr as JSON finds nothing else there
	}
	a.log = newLogger(a.stderr, a.LogLevel, format)
	a.warnUnknownEnv(a.options(cmd))
	a.started = true
	return nil
}

func newLogger(w io.Writer, level, format string) *slog.Logger {
	opts := &slog.HandlerOptions{Level: logLevels[level]}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// wantsJSON tells whether JSON was asked for. Where the flags could not be read, the arguments are looked at as they
// are: a program that asked for JSON wants to read the error too.
func wantsJSON(cmd *cobra.Command, args []string) bool {
	if f := cmd.Flags().Lookup("output"); f != nil && f.Changed {
		return f.Value.String() == "json"
	}
	for i, arg := range args {
		switch arg {
		case "-ojson", "-o=json", "--output=json":
			return true
		case "-o", "--output":
			return slices.Equal(args[i+1:min(i+2, len(args))], []string{"json"})
		}
	}
	return false
}
