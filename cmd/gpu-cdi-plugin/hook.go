package main

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/rogpeppe/go-internal/diff"
	"github.com/spf13/cobra"

	"gpu-cdi-plugin/hook/install"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/trust"
)

func (a *app) hookCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "hook",
		Short: "Make engines use prestart-hook for annotations",
		Long: `Configures engines to give containers the CDI devices that their annotations name: with an OCI hook in
podman and CRI-O, or with gpu-cdi-runtime in front of runc or crun. Engines that read CDI specs themselves do not need
it for the devices that a user or the kubelet requests.`,
		Example: `  gpu-cdi-plugin hook install podman
  gpu-cdi-plugin hook uninstall`,
		Annotations: cli.Statuses(cli.OK, cli.Usage),
		Args:        cli.UnknownVerb,
		RunE:        cli.ShowHelp,
	}
	cmd.AddCommand(a.hookInstallCommand(), a.hookUninstallCommand(), a.hookPrintCommand())
	return cmd
}

func engineNames() []string {
	var names []string
	for _, engine := range install.Engines() {
		names = append(names, engine.Name)
	}
	return names
}

func completeEngines(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	isGiven := func(name string) bool { return slices.Contains(args, name) }
	return slices.DeleteFunc(engineNames(), isGiven), cobra.ShellCompDirectiveNoFileComp
}

func (a *app) planInstall(engines []string) (*install.Plan, error) {
	h, err := a.host()
	if err != nil {
		return nil, err
	}
	hook, err := a.hook()
	if err != nil {
		return nil, err
	}
	files, err := install.Read(h.Root(), engines, hook)
	if err != nil {
		return nil, err
	}
	return files.Install(engines, hook)
}

// locked runs `change` while no other process changes the same files. A dry run takes no lock.
func (a *app) locked(dryRun bool, change func() error) error {
	if dryRun {
		return change()
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	release, err := install.Lock(h.Root())
	if errors.Is(err, fileio.ErrHeld) {
		return cli.With(cli.Locked, "wait until the other hook install or hook uninstall is done", err)
	}
	if err != nil {
		return err
	}
	return errors.Join(change(), release())
}

// applyHook makes the changes of a plan, or prints their differences.
func (a *app) applyHook(p *install.Plan, out cli.Output, dryRun bool) error {
	for _, file := range p.Kept {
		a.Log.Warn(file + " is left as it is, since it was changed after hook install wrote it; remove it if that change " +
			"is not needed")
	}
	for _, warning := range p.Warnings {
		a.Log.Warn(warning)
	}
	if err := a.checkPlan(p); err != nil {
		return err
	}
	if dryRun && out.Format == "table" {
		for _, c := range p.Changes {
			if _, err := io.WriteString(a.Stdout, unified(c)); err != nil {
				return fmt.Errorf("print the result: %w", err)
			}
		}
		return nil
	}
	if !dryRun {
		if err := p.Apply(); err != nil {
			return err
		}
	}
	return out.Print(a.Stdout, planView(p, dryRun))
}

// checkPlan returns an error if a plan cannot be carried out, or if other users could change what it writes or what
// engines will run.
func (a *app) checkPlan(p *install.Plan) error {
	dirs, err := p.Dirs()
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		if err := a.CheckDir("the directory", dir); err != nil {
			return err
		}
	}
	runtimes, err := p.Runtimes()
	if err != nil {
		return err
	}
	for _, path := range runtimes {
		if err := a.CheckPath(trust.RootFile, path); err != nil {
			return fmt.Errorf("the default runtime %s would not be run: %w", path, err)
		}
	}
	return p.Check()
}

// planView lists the changes that were made or, in a dry run, would be made.
func planView(p *install.Plan, dryRun bool) cli.View {
	type file struct {
		Path   string `json:"path"`
		Change string `json:"change"`
		Diff   string `json:"diff,omitempty"`
	}
	data := struct {
		Files   []file   `json:"files"`
		Restart []string `json:"restart"`
		Reload  []string `json:"reload"`
	}{[]file{}, append([]string{}, p.Restart...), append([]string{}, p.Reload...)}
	t := cli.Table{Header: []string{"FILE", "CHANGE"}}
	for _, c := range p.Changes {
		f := file{Path: c.Path, Change: "changed"}
		switch {
		case c.Before == nil:
			f.Change = "made"
		case c.After == nil:
			f.Change = "removed"
		}
		if dryRun {
			f.Diff = unified(c)
		}
		data.Files = append(data.Files, f)
		t.Rows = append(t.Rows, []string{f.Path, f.Change})
	}
	for _, service := range p.Restart {
		t.Legend += "Restart " + service + ": it reads its configuration only when it starts (systemctl restart " +
			service + ").\n"
	}
	for _, service := range p.Reload {
		t.Legend += "Reload " + service + ": it reads its runtimes when it starts or is reloaded (systemctl reload " +
			service + ").\n"
	}
	if len(t.Rows) == 0 {
		t = cli.Table{Legend: "Nothing has to be changed.\n"}
	}
	return cli.View{Data: data, Table: t}
}

// unified formats the change of a file as a unified diff.
func unified(c install.Change) string {
	before, after := "/dev/null", "/dev/null"
	if c.Before != nil {
		before = c.Path
	}
	if c.After != nil {
		after = c.Path
	}
	return string(diff.Diff(before, content(c.Before), after, content(c.After)))
}

// content returns the text of a file, or the target of a link.
func content(f *install.File) []byte {
	switch {
	case f == nil:
		return nil
	case f.Link != "":
		return []byte("symbolic link to " + f.Link + "\n")
	}
	return f.Data
}
