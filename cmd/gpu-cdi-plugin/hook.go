package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rogpeppe/go-internal/diff"
	"github.com/spf13/cobra"

	"gpu-cdi-plugin/hook/install"
	"gpu-cdi-plugin/internal/cli"
)

func (a *app) hookCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "hook",
		Short: "Make engines use prestart-hook for annotations",
		Long: `Configures engines to give containers the CDI devices that their annotations name: with the OCI hook of podman and
CRI-O, or with gpu-cdi-runtime in front of runc or crun. Engines that read CDI specs themselves do not need it for the
devices that a user or the kubelet asks for.`,
		Annotations: cli.Statuses(cli.OK, cli.Usage),
		Args:        cli.UnknownVerb,
		RunE:        help,
	}
	cmd.AddCommand(a.hookInstallCommand(), a.hookUninstallCommand(), a.hookPrintCommand())
	return cmd
}

func (a *app) hookInstallCommand() *cobra.Command {
	var out output
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "install ENGINE...",
		Short: "Configure engines for annotations",
		Long: `Configures engines, prints which files it has made and changed, and says which engine has to be restarted; it restarts
none. Without arguments it changes nothing and prints what each engine would get.

  podman      a precreate hook in /etc/gpu-cdi-plugin/hooks.d, and a drop-in by which podman reads it
  docker      in /etc/docker/daemon.json the feature cdi, and the runtime gpu-cdi
  containerd  the runtime gpu-cdi: a drop-in where config.toml is of version 3 or later and imports conf.d, or else
              a part of config.toml; with version 2 also enable_cdi
  crio        a drop-in with the runtime handler gpu-cdi
  live        a createRuntime hook for CRI-O and podman, beside their own hooks
  wrapper     gpu-cdi-runtime alone, for runc and crun without an engine; the engines have it too

gpu-cdi-runtime is made as a link beside prestart-hook. What is in a file already stays, byte for byte. All files are
written or none; a file of another program with one of our names, a setting that contradicts and a file that cannot
be read are errors. A second call changes nothing.`,
		Example: `  gpu-cdi-plugin hook install
  gpu-cdi-plugin hook install podman
  gpu-cdi-plugin hook install docker containerd --dry-run`,
		ValidArgsFunction: completeEngines,
		Args:              cobra.ArbitraryArgs,
		RunE: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.Join(a.printEngines(out), cli.With(cli.Usage, "name one or more of them: gpu-cdi-plugin "+
					"hook install ENGINE...", errors.New("nothing is installed: no engine was named")))
			}
			return a.hookInstall(args, out, dryRun)
		},
	}
	out.addFlags(cmd, "table", "json", "yaml")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print the difference of each file and change nothing")
	return cmd
}

func (a *app) hookUninstallCommand() *cobra.Command {
	var out output
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "uninstall [ENGINE...]",
		Short: "Take back what hook install has done",
		Long: `Removes what hook install has written for these engines, or for all. Files that it made go; others are as they were,
byte for byte, or without our entries if they have been changed since. Uninstall before prestart-hook is removed: podman
starts no container with a hook that does not exist.`,
		Example: `  gpu-cdi-plugin hook uninstall
  gpu-cdi-plugin hook uninstall docker --dry-run`,
		ValidArgsFunction: completeEngines,
		Args:              cobra.ArbitraryArgs,
		RunE:              func(_ *cobra.Command, args []string) error { return a.hookUninstall(args, out, dryRun) },
	}
	out.addFlags(cmd, "table", "json", "yaml")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print the difference of each file and change nothing")
	return cmd
}

func (a *app) hookPrintCommand() *cobra.Command {
	out := output{}
	cmd := &cobra.Command{
		Use:   "print ENGINE...",
		Short: "Print the files that hook install would write",
		Long: `Prints the files of engines as they are after hook install, each behind a line with its path, whether they have to be
changed or not. The hook need not exist: with --hook-path the files can be for another host.`,
		Example: `  gpu-cdi-plugin hook print podman
  gpu-cdi-plugin hook print containerd -o json`,
		ValidArgsFunction: completeEngines,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("name one or more engines: " + strings.Join(engineNames(), ", "))
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error { return a.hookPrint(args, out) },
	}
	out.addFlags(cmd, "text", "json", "yaml")
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

// printEngines prints what there is to install, and on which engines of this host it is.
func (a *app) printEngines(out output) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	files, err := install.Read(h.Root(), []string{}, "")
	if err != nil {
		return err
	}
	installed, err := files.Installed()
	if err != nil {
		return err
	}
	type row struct {
		Engine    string `json:"engine"`
		Found     bool   `json:"found"`
		Installed bool   `json:"installed"`
		Without   string `json:"without"`
		Gives     string `json:"gives"`
	}
	t := table{header: []string{"ENGINE", "FOUND", "INSTALLED", "HAS WITHOUT IT", "GETS BY IT"}}
	var rows []row
	for _, e := range install.Engines() {
		r := row{e.Name, hasProgram(h.Root(), e.Program), slices.Contains(installed, e.Name), e.Without, e.Gives}
		found := yesNo(r.Found)
		if e.Program == "" {
			found = "-"
		}
		rows = append(rows, r)
		t.rows = append(t.rows, []string{r.Engine, found, yesNo(r.Installed), r.Without, r.Gives})
	}
	return out.print(a.stdout, view{data: map[string][]row{"engines": rows}, table: t})
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// hasProgram reports whether a host has a program in one of the standard directories.
func hasProgram(root, name string) bool {
	return name != "" && slices.ContainsFunc([]string{"usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin"},
		func(dir string) bool {
			_, err := os.Stat(filepath.Join(root, dir, name))
			return err == nil
		})
}

func (a *app) hookInstall(engines []string, out output, dryRun bool) error {
	p, err := a.planInstall(engines)
	if err == nil && !dryRun {
		err = a.checkHook()
	}
	if err != nil {
		return err
	}
	return a.applyHook(p, out, dryRun)
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

func (a *app) hookUninstall(engines []string, out output, dryRun bool) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	if len(engines) == 0 {
		engines = engineNames()
	}
	files, err := install.Read(h.Root(), engines, "")
	if err != nil {
		return err
	}
	p, err := files.Uninstall(engines)
	if err != nil {
		return err
	}
	return a.applyHook(p, out, dryRun)
}

// applyHook makes the changes of a plan, or prints their differences.
func (a *app) applyHook(p *install.Plan, out output, dryRun bool) error {
	if dryRun && out.format == "table" {
		for _, c := range p.Changes {
			if _, err := io.WriteString(a.stdout, unified(c)); err != nil {
				return fmt.Errorf("print the result: %w", err)
			}
		}
		return nil
	}
	if !dryRun {
		for _, dir := range p.Dirs() {
			if err := a.checkDir("the directory", dir); err != nil {
				return err
			}
		}
		if err := p.Apply(); err != nil {
			return err
		}
	}
	return out.print(a.stdout, planView(p, dryRun))
}

// planView is what was changed, or would be.
func planView(p *install.Plan, dryRun bool) view {
	type file struct {
		Path   string `json:"path"`
		Change string `json:"change"`
		Diff   string `json:"diff,omitempty"`
	}
	data := struct {
		Files   []file   `json:"files"`
		Restart []string `json:"restart"`
	}{[]file{}, append([]string{}, p.Restart...)}
	t := table{header: []string{"FILE", "CHANGE"}}
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
		t.rows = append(t.rows, []string{f.Path, f.Change})
	}
	for _, service := range p.Restart {
		t.legend += "Restart " + service + ": it reads its configuration only when it starts (systemctl restart " +
			service + ").\n"
	}
	if len(t.rows) == 0 {
		t = table{legend: "Nothing has to be changed.\n"}
	}
	return view{data: data, table: t}
}

// unified is the change of a file as a unified diff.
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

// content is the text of a file; of a link, where it leads to.
func content(f *install.File) []byte {
	switch {
	case f == nil:
		return nil
	case f.Link != "":
		return []byte("symbolic link to " + f.Link + "\n")
	}
	return f.Data
}

func (a *app) hookPrint(engines []string, out output) error {
	p, err := a.planInstall(engines)
	if err != nil {
		return err
	}
	type file struct {
		Path    string `json:"path"`
		Content string `json:"content,omitempty"`
		Link    string `json:"link,omitempty"`
	}
	files := []file{}
	var text strings.Builder
	for _, c := range p.Wanted {
		if c.After == nil {
			continue
		}
		f := file{Path: c.Path, Link: c.After.Link}
		if f.Link == "" {
			f.Content = string(c.After.Data)
		}
		files = append(files, f)
		fmt.Fprintf(&text, "# %s\n%s\n", c.Path, content(c.After))
	}
	return out.print(a.stdout, view{
		data:  map[string][]file{"files": files},
		table: table{legend: strings.TrimSuffix(text.String(), "\n")},
	})
}
