package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/nvml"
)

// app is what all verbs share: their options, their input and their output.
type app struct {
	config.Common
	configFile     string
	plugin         config.Plugin
	manager        config.Manager
	commonFlags    *pflag.FlagSet
	pluginFlags    *pflag.FlagSet
	managerFlags   *pflag.FlagSet
	timeout        time.Duration     // of calls of the driver
	sources        map[string]string // where the value of a key comes from; a default has no entry
	env            []string
	stdin          io.Reader
	stdout, stderr io.Writer
	log            *slog.Logger
	hangups        chan os.Signal // of serve, which reads its configuration again at each SIGHUP
	releaseSignals func() bool    // see endAtSignal
	warned         *sync.Map      // the paths that --insecure-paths allowed: each is logged once
	started        bool           // the command line is valid: later errors are no usage errors
}

// newApp returns an app with the defaults of everything that can be configured.
func newApp() *app {
	c := config.Default()
	a := &app{
		Common: c.Common, plugin: c.Plugin, manager: c.Manager, timeout: nvml.DefaultTimeout,
		commonFlags:  pflag.NewFlagSet("common", pflag.ContinueOnError),
		pluginFlags:  pflag.NewFlagSet("plugin", pflag.ContinueOnError),
		managerFlags: pflag.NewFlagSet("manager", pflag.ContinueOnError),
		sources:      map[string]string{}, warned: new(sync.Map),
	}
	addOptions(a.commonFlags, &a.Common)
	a.commonFlags.StringVar(&a.configFile, "config", "",
		"YAML `file` with these options, and those of the device plugin and of the device manager")
	addOptions(a.pluginFlags, &a.plugin)
	addOptions(a.managerFlags, &a.manager)
	return a
}

// run is the whole program: main without the process. It returns the exit status.
func run(ctx context.Context, args, env []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := newApp()
	a.env, a.stdin, a.stdout, a.stderr = env, stdin, stdout, stderr
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	a.releaseSignals = endAtSignal(end)
	defer a.releaseSignals()
	root := a.rootCommand() //nolint:contextcheck // the verbs get ctx from cobra
	root.SetArgs(args)
	if len(args) > 0 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd) { // with or without descriptions
		completeFlags(root)
	}
	cmd, err := root.ExecuteContextC(ctx)
	err = classify(err)
	switch {
	case err == nil:
		return int(cli.OK)
	case ctx.Err() != nil:
		err = cli.With(cli.Interrupted, "", errors.New("interrupted"))
	case !a.started && cli.CodeOf(err) == cli.Failure:
		err = cli.With(cli.Usage, cli.UsageHint(cmd), err)
	}
	err = withOptions(cmd, err)
	cli.Report(a.stderr, err, wantsJSON(cmd, args) || a.LogFormat == "json")
	return int(cli.CodeOf(err))
}

func (a *app) rootCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gpu-cdi-plugin",
		Short: "Gives containers their GPUs through CDI",
		Long: `Lists the GPUs of a node, writes a CDI spec for them, keeps it up to date, and gives the GPUs to containers.

Options come from flags, then from the environment (--cdi-dir is GPU_CDI_CDI_DIR), then from the file of --config
(cdi-dir: DIR). gpu-cdi-plugin config default prints a file with all of them.`,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Interrupted),
		SilenceErrors:     true,
		SilenceUsage:      true,
		Args:              cli.UnknownVerb,
		RunE:              help,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return a.start(cmd) },
	}
	cmd.SetIn(a.stdin)
	cmd.SetOut(a.stdout)
	cmd.SetErr(a.stderr)
	cmd.SetHelpFunc(cli.Help(statuses))
	cmd.SetHelpCommand(cli.HelpCommand())
	cmd.SetFlagErrorFunc(cli.FlagError)
	cli.AddVersion(cmd, thisBuild().Version)
	cmd.PersistentFlags().AddFlagSet(a.commonFlags)
	_ = cmd.MarkPersistentFlagFilename("config", "yaml", "yml")
	cmd.AddCommand(
		a.devicesCommand(),
		a.deviceCommand(),
		a.topologyCommand(),
		a.cdiCommand(),
		a.hookCommand(),
		a.serveCommand(),
		a.managerCommand(),
		a.admitCommand(),
		a.releasePodCommand(),
		a.podsCommand(),
		a.nodeCommand(),
		a.conformanceCommand(),
		a.mpsCommand(),
		a.configCommand(),
		a.versionCommand(),
	)
	cmd.InitDefaultCompletionCmd()
	for _, verb := range cmd.Commands() {
		if verb.Name() == "completion" {
			verb.Args, verb.RunE = cli.UnknownVerb, help
		}
	}
	complete(cmd)
	return cmd
}

// help is what a command does that only holds verbs.
func help(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// start prepares each verb: it resolves the options and makes the logger.
func (a *app) start(cmd *cobra.Command) error {
	if err := a.resolve(a.options()); err != nil {
		return err
	}
	if err := cmd.ValidateRequiredFlags(); err != nil { // cobra does it only after start
		return err
	}
	if err := cmd.ValidateFlagGroups(); err != nil {
		return err
	}
	format := a.LogFormat
	if a.sources["log-format"] == "" && wantsJSON(cmd, nil) {
		format = "json" // the error will be JSON: a reader of stderr finds nothing else there
	}
	a.log = newLogger(a.stderr, a.LogLevel, format)
	a.warnUnknownEnv(a.options())
	a.started = true
	return nil
}

func newLogger(w io.Writer, level, format string) *slog.Logger {
	var minimum slog.Level
	_ = minimum.UnmarshalText([]byte(level)) // it was validated
	opts := &slog.HandlerOptions{Level: minimum}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// wantsJSON reports whether --output json was given. If the flags could not be parsed, it searches the arguments, so
// that a program that reads JSON can read that error too.
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

// noArgs is the argument check of a verb without arguments.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	return fmt.Errorf("%s takes no arguments, got %q", cmd.CommandPath(), args)
}

// oneFile is the argument check of a verb with a file that may be left out.
func oneFile(cmd *cobra.Command, args []string) error {
	if len(args) <= 1 {
		return nil
	}
	return fmt.Errorf("%s takes one file, got %q", cmd.CommandPath(), args)
}
