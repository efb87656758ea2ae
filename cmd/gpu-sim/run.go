package main

import (
	"context"
	"errors"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
)

// meanings are the meanings of the exit statuses in the help.
var meanings = map[cli.Code]string{
	cli.OK:          "done",
	cli.Failure:     "an error; nothing was made or changed",
	cli.Usage:       "usage error: an unknown machine, a malformed machine file, a GPU or profile that does not exist",
	cli.Interrupted: "interrupted",
}

// app has what all verbs share.
type app struct {
	env            []string
	stdin          io.Reader
	stdout, stderr io.Writer
	started        bool // a verb runs: later errors are not usage errors, unless the table says so
}

// run does everything except ending the process. It returns the exit status.
func run(ctx context.Context, args, env []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := &app{env: env, stdin: stdin, stdout: stdout, stderr: stderr}
	root := a.rootCommand() //nolint:contextcheck // cobra passes the context to the verbs
	cli.AddCompletion(root)
	root.SetArgs(verbFirst(root, args))
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	err = cli.Classify(err, errorTable)
	switch {
	case err == nil:
		return int(cli.OK)
	case ctx.Err() != nil:
		err = cli.With(cli.Interrupted, "", errors.New("interrupted"))
	case !a.started && cli.CodeOf(err) == cli.Failure:
		err = cli.With(cli.Usage, cli.UsageHint(cmd), err)
	}
	cli.Report(a.stderr, err, wantsJSON(cmd))
	return int(cli.CodeOf(err))
}

// verbFirst turns "fault DIR lost" into "fault lost DIR", the order that cobra requires.
func verbFirst(root *cobra.Command, args []string) []string {
	if len(args) < 3 || args[0] != "fault" || strings.HasPrefix(args[1], "-") {
		return args
	}
	if cmd, _, err := root.Find(args[:2]); err == nil && cmd.Name() != "fault" {
		return args
	}
	swapped := slices.Clone(args)
	swapped[1], swapped[2] = args[2], args[1]
	return swapped
}

func wantsJSON(cmd *cobra.Command) bool {
	f := cmd.Flags().Lookup("output")
	return f != nil && f.Value.String() == "json"
}

func (a *app) rootCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gpu-sim",
		Short: "Simulated GPU nodes",
		Long: `Makes directories that look like the root of a host with NVIDIA GPUs and a driver, with device nodes and
sysfs. The driver's library in it is a real shared library with NVML's functions, so programs that use NVML can run on
it.`,
		Example: `  gpu-sim create /tmp/node --machine dgx-h100
  gpu-cdi-plugin --root /tmp/node devices
  gpu-sim fault /tmp/node lost --gpu 3`,
		Annotations:       cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Interrupted),
		SilenceErrors:     true,
		SilenceUsage:      true,
		DisableAutoGenTag: true,
		Args:              cli.UnknownVerb,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error { return a.start(cmd) },
	}
	cmd.SetHelpFunc(cli.Help(meanings))
	cmd.SetHelpCommand(cli.HelpCommand())
	cmd.SetUsageTemplate(strings.Replace(cmd.UsageTemplate(), "{{.UseLine}}",
		"{{if .Annotations.usage}}{{.Annotations.usage}}{{else}}{{.UseLine}}{{end}}", 1))
	cmd.SetFlagErrorFunc(cli.FlagError)
	cli.AddVersion(cmd, cli.ThisBuild().Version)
	cmd.AddCommand(a.createCommand(), a.faultCommand(), a.listCommand(), a.showCommand())
	return cmd
}

// start runs before each verb. It checks for missing flags, which cobra does only later.
func (a *app) start(cmd *cobra.Command) error {
	if err := cli.CheckFlags(cmd); err != nil {
		return err
	}
	a.started = true
	return nil
}

// oneDir is the argument check of a verb that takes a directory.
var oneDir = cli.Arguments("one directory", 1, 1)

func completeDirs(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return nil, cobra.ShellCompDirectiveFilterDirs
}
