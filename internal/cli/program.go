package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/internal/wording"
)

// Options are the parts in which programs differ.
type Options struct {
	// Name is the program's name. EnvPrefix is the prefix of its environment variables, like GPU_CDI_.
	Name, EnvPrefix string
	// OldEnvPrefix is the prefix of the program that had these options before, or empty. Its variables cause warnings.
	OldEnvPrefix string
	// Errors gives errors of the libraries an exit status and a hint; the first matching row counts. Statuses explains
	// the exit statuses in the help.
	Errors   []ErrorRow
	Statuses map[Code]string
	// Config points to the configuration, and Default to another configuration that keeps the defaults. Keys documents
	// the keys of both.
	Config, Default configfile.Validator
	Keys            *configfile.Keys
	// GoneFlags are removed flags that were no keys. If one is given, the error is this text, which names the
	// replacement. Keys.Gone has the keys.
	GoneFlags map[string]string
	// Common points to the part of Config with the options of all verbs, Service to the part with the options of the
	// service. The common options include insecure-paths, log-level and log-format.
	Common, Service any
	// Schema is the path of the configuration file's JSON schema in the source tree.
	Schema string
	// ConfigFile is the optional file that is read if --config names none. Empty means none.
	ConfigFile string
	// HintFlags are flags that are repeated in hints if the user set them. Each key is text in a hint, such as "cdi
	// generate "; its flags are inserted after it.
	HintFlags map[string][]string
}

// Program is a command line: its configuration, its input and output, and what its verbs share.
type Program struct {
	Options

	// CommonFlags are the flags of all verbs, ServiceFlags those of the service.
	CommonFlags, ServiceFlags *pflag.FlagSet
	Env                       []string
	Stdin                     io.Reader
	Stdout, Stderr            io.Writer
	Log                       *slog.Logger

	configFile     string
	sources        map[string]string // where the value of a key comes from; defaults have no entry
	releaseSignals func() bool       // see endAtSignal
	warned         *sync.Map         // the paths that --insecure-paths allowed; each is logged once
	started        bool              // the command line is valid: later errors are not usage errors
}

// New returns a program whose flags set the configuration.
func New(o Options) *Program {
	p := &Program{
		Options:      o,
		CommonFlags:  pflag.NewFlagSet("common", pflag.ContinueOnError),
		ServiceFlags: pflag.NewFlagSet("service", pflag.ContinueOnError),
		configFile:   o.ConfigFile,
		sources:      map[string]string{},
		warned:       new(sync.Map),
	}
	p.addOptions(p.CommonFlags, o.Common)
	p.CommonFlags.StringVar(&p.configFile, "config", o.ConfigFile, "YAML `file` with these options, and those of serve")
	p.addOptions(p.ServiceFlags, o.Service)
	return p
}

// Command returns the root command with these verbs and the verbs that every program has.
func (p *Program) Command(root *cobra.Command, verbs ...*cobra.Command) *cobra.Command {
	root.Use = p.Name
	root.Annotations = Statuses(OK, Failure, Usage, Interrupted)
	root.Args, root.RunE = UnknownVerb, ShowHelp
	root.SetHelpCommand(HelpCommand())
	p.prepare(root)
	root.AddCommand(verbs...)
	root.AddCommand(p.configCommand(), p.versionCommand())
	AddCompletion(root)
	complete(root)
	return root
}

// AddCompletion adds cobra's verb completion, which has its errors in our words then.
func AddCompletion(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, verb := range root.Commands() {
		if verb.Name() != "completion" {
			continue
		}
		verb.Args, verb.RunE = UnknownVerb, ShowHelp
		for _, shell := range verb.Commands() {
			shell.Args = noArgs
		}
	}
}

// Alone returns the root command of a program that has no verbs. It has the options of all verbs.
func (p *Program) Alone(root *cobra.Command) *cobra.Command {
	p.prepare(root)
	root.CompletionOptions.DisableDefaultCmd = true
	complete(root)
	return root
}

// prepare gives a root command the common options, and the input and output of the program.
func (p *Program) prepare(root *cobra.Command) {
	root.SilenceErrors, root.SilenceUsage = true, true
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error { return p.Start(cmd) }
	root.SetIn(p.Stdin)
	root.SetOut(p.Stdout)
	root.SetErr(p.Stderr)
	root.SetHelpFunc(Help(p.Statuses))
	root.SetFlagErrorFunc(p.flagError)
	AddVersion(root, ThisBuild().Version)
	root.PersistentFlags().AddFlagSet(p.CommonFlags)
	_ = root.MarkPersistentFlagFilename("config", "yaml", "yml")
}

// ShowHelp prints the help of a command that has only verbs.
func ShowHelp(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// Moved returns a hidden verb whose only effect is an error that names its replacement. The same holds for the given
// verbs below it.
func Moved(name, replacement string, verbs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:                name,
		Hidden:             true,
		DisableFlagParsing: true,
		Long:               "This verb is now: " + replacement,
		Args: func(cmd *cobra.Command, _ []string) error {
			return With(Usage, "", fmt.Errorf("%s is now: %s", cmd.CommandPath(), replacement))
		},
		RunE: ShowHelp,
	}
	cmd.AddCommand(verbs...)
	return cmd
}

// Run executes a root command until it ends or a signal arrives, reports its error, and returns the exit status.
func (p *Program) Run(ctx context.Context, args []string, root *cobra.Command) int {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	p.releaseSignals = endAtSignal(end)
	defer p.releaseSignals()
	root.SetArgs(args)
	if len(args) > 0 && strings.HasPrefix(args[0], cobra.ShellCompRequestCmd) { // with or without descriptions
		completeFlags(root)
	}
	cmd, err := root.ExecuteContextC(ctx)
	err = p.Classify(err)
	switch {
	case err == nil:
		return int(OK)
	case ctx.Err() != nil:
		err = With(Interrupted, "", errors.New("interrupted"))
	case !p.started && CodeOf(err) == Failure:
		err = With(Usage, UsageHint(cmd), err)
	}
	err = p.withOptions(cmd, err)
	if p.started { // the flags are known, and other arguments may be the command line of another program
		args = nil
	}
	Report(p.Stderr, err, wantsJSON(cmd, args) || p.option("log-format") == "json")
	return int(CodeOf(err))
}

// ReleaseSignals restores the default effect of SIGINT and SIGTERM. It reports whether one has arrived already.
func (p *Program) ReleaseSignals() bool { return p.releaseSignals() }

// Start prepares a verb: it resolves the options and creates the logger.
func (p *Program) Start(cmd *cobra.Command) error {
	if err := p.Resolve(); err != nil {
		return err
	}
	if err := CheckFlags(cmd); err != nil { // cobra does it only after Start
		return err
	}
	format := p.option("log-format")
	if p.sources["log-format"] == "" && wantsJSON(cmd, nil) {
		format = "json" // the error will be JSON, so stderr must have nothing else
	}
	p.Log = newLogger(p.Stderr, p.option("log-level"), format)
	p.warnUnknownEnv()
	p.started = true
	return nil
}

func newLogger(w io.Writer, level, format string) *slog.Logger {
	var minimum slog.Level
	_ = minimum.UnmarshalText([]byte(level)) // it was validated
	opts := &slog.HandlerOptions{Level: minimum, ReplaceAttr: limitText}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// maxLogged bounds a message or a value in the log, in bytes. They may quote what others send.
const maxLogged = 16 << 10

// limitText shortens a message or value.
func limitText(_ []string, a slog.Attr) slog.Attr {
	switch v := a.Value.Any().(type) {
	case string:
		a.Value = slog.StringValue(wording.Shorten(v, maxLogged))
	case error:
		a.Value = slog.StringValue(wording.Shorten(v.Error(), maxLogged))
	}
	return a
}

// Classify returns err with the exit status and the hint of the program's table. An err that already has a status stays
// as it is.
func (p *Program) Classify(err error) error { return Classify(err, p.Errors) }

// wantsJSON reports whether --output json was given. If the flags could not be parsed, it searches the arguments, so
// that a program which reads JSON can also read that error.
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

// withOptions adds options of cmd's command line to the commands in the hint of err: common options and those of
// HintFlags. Without them these commands could act on another host. The environment and the file apply to them anyway,
// and help needs no options.
func (p *Program) withOptions(cmd *cobra.Command, err error) error {
	hint := HintOf(err)
	if strings.Contains(hint, "--help") || strings.Contains(hint, "config default") {
		return err
	}
	return With(CodeOf(err), p.WithOptions(cmd, hint), err)
}

// WithOptions returns a text with commands of this program, to which it adds options of cmd's command line as
// withOptions does.
func (p *Program) WithOptions(cmd *cobra.Command, text string) string {
	var common string
	local := map[string]string{}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		option := "--" + f.Name + "=" + wording.Quote(f.Value.String()) + " "
		shared := cmd.InheritedFlags().Lookup(f.Name) != nil || p.CommonFlags.Lookup(f.Name) != nil
		if shared && !strings.HasPrefix(f.Name, "log-") {
			common += option
		}
		for words, flags := range p.HintFlags {
			if slices.Contains(flags, f.Name) {
				local[words] += option
			}
		}
	})
	text = strings.ReplaceAll(text, p.Name+" ", p.Name+" "+common)
	for words, options := range local {
		text = strings.ReplaceAll(text, words, words+options)
	}
	return text
}
