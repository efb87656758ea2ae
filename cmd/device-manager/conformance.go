package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/conformance"
)

// conformanceOptions are the options of the verb conformance.
type conformanceOptions struct {
	cli.Output
	conformance.Options
	command, flip string // command lines
}

func (a *app) conformanceCommand() *cobra.Command {
	opts := conformanceOptions{Options: conformance.Options{Timeout: conformance.DefaultTimeout}}
	cmd := &cobra.Command{
		Use:   "conformance",
		Short: "Check a device plugin against the rules of the API",
		Long: `Takes the kubelet's place and checks any device plugin against the rules of the device plugin API:
registration, lists of devices, Allocate, GetPreferredAllocation, PreStartContainer, restarts of the kubelet, and the
end of the plugin. docs/conformance.md, in /usr/share/doc/device-manager or the source code, explains the rules. Exit
status 4 means that a rule of severity must is broken; broken rules of severity should are only reported.

--command starts the plugin. It is split like in a shell, but nothing is expanded. In it, {dir} stands for the
directory of kubelet.sock, which is also in DEVICE_PLUGIN_DIR. Without {dir}, and as root, the plugin sees that
directory at /var/lib/kubelet/device-plugins. --kubelet-dir without --command is for a plugin that is already running
and registers there. --socket calls a plugin that has registered elsewhere; registration and restarts are not checked.
{registry} in --command stands for a directory like the kubelet's plugins_registry, for a plugin that registers by a
socket there.

Allocate is called for all devices: run this only where no container uses them.`,
		Example: `  device-manager conformance --command 'gpu-cdi-plugin serve --device-plugin-dir {dir}'
  device-manager conformance --command 'gpu-cdi-plugin serve --registration watcher --plugins-registry-dir {registry}'
  device-manager conformance --command nvidia-device-plugin -o junit > report.xml
  device-manager conformance --socket /var/lib/kubelet/device-plugins/nvidia-gpu.sock`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Differs, cli.Locked, cli.Interrupted),
		RunE:        func(cmd *cobra.Command, _ []string) error { return a.conformance(cmd.Context(), opts) },
	}
	opts.AddFlags(cmd, "table", "json", "yaml", "junit")
	f := cmd.Flags()
	f.StringVar(&opts.Socket, "socket", "", "`path` of the socket of a plugin that runs already")
	f.StringVar(&opts.command, "command", "", "`command` that starts the plugin")
	f.StringVar(&opts.KubeletDir, "kubelet-dir", "", "`directory` to serve kubelet.sock in (default a new one)")
	f.StringVar(&opts.flip, "flip", "", "`command` that changes the health of a device")
	f.BoolVar(&opts.PreStart, "pre-start", false, "call PreStartContainer too, which may reset devices")
	f.Var((*configfile.Duration)(&opts.Timeout), "timeout", "`duration` that the plugin may take for each step")
	_ = cmd.MarkFlagFilename("socket", "sock")
	return cmd
}

func (a *app) conformance(ctx context.Context, opts conformanceOptions) error {
	for _, line := range []struct {
		flag, text string
		words      *[]string
	}{{"command", opts.command, &opts.Command}, {"flip", opts.flip, &opts.Flip}} {
		words, err := wording.Split(line.text)
		if err != nil {
			return fmt.Errorf("--%s: %w", line.flag, err)
		}
		*line.words = words
	}
	opts.Root, opts.Options.Output = a.Root, a.Stderr
	report, err := conformance.Run(ctx, opts.Options)
	if err != nil {
		return err
	}
	if err := opts.Print(a.Stdout, reportView(report)); err != nil {
		return err
	}
	if report.Failed > 0 {
		return cli.With(cli.Differs,
			"docs/conformance.md, in /usr/share/doc/device-manager or the source code, explains the rules",
			fmt.Errorf("the plugin breaks %s", wording.Count(report.Failed, "rule")))
	}
	return nil
}

// reportView returns a row for each rule and, below the rows, an explanation of each broken rule.
func reportView(r *conformance.Report) cli.View {
	t := cli.Table{Header: []string{"RULE", "SEVERITY", "RESULT", "SEEN"}}
	var why strings.Builder
	for _, result := range r.Results {
		t.Rows = append(t.Rows, []string{result.ID, string(result.Severity), string(result.Outcome), result.Seen})
		if result.Outcome == conformance.Fail {
			fmt.Fprintf(&why, "\n%s (%s)\n  %s\n", result.ID, result.Severity,
				strings.ReplaceAll(result.Explanation(), "\n", "\n  "))
		}
	}
	counts := fmt.Sprintf("\n%d passed, %d failed, %d warnings, %d skipped\n", r.Passed, r.Failed, r.Warned, r.Skipped)
	t.Legend = counts + why.String()
	return cli.View{Data: r, Table: t, Draw: func(w io.Writer) error { return r.WriteJUnit(w) }}
}
