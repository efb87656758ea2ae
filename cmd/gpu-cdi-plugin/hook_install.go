package main

import (
	"errors"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/hook/install"
	"gpu-cdi-plugin/internal/cli"
)

func (a *app) hookInstallCommand() *cobra.Command {
	var out cli.Output
	var dryRun bool
	cmd := &cobra.Command{
		Use:   "install ENGINE...",
		Short: "Configure engines for annotations",
		Long: `Configures engines, prints which files it has made and changed, and lists the engines that must be
restarted or reloaded; it restarts none. Without arguments it changes nothing and prints what each engine would get.

  podman      a precreate hook in /etc/containers/oci/gpu-cdi-plugin.d, and a drop-in by which podman reads it
  docker      in /etc/docker/daemon.json the runtime gpu-cdi
  containerd  the runtime gpu-cdi, a copy of the default one with our program: a drop-in where config.toml is of
              version 3 or later and imports conf.d, or else a part of config.toml, or with version 2 of the last
              imported file with settings of CRI; with version 2 also runc's table if it has no runtimes
  crio        a drop-in with the runtime handler gpu-cdi, a copy of the default one with our program
  live        a createRuntime hook for CRI-O and podman, beside their own hooks
  wrapper     gpu-cdi-runtime, for runc and crun without an engine

gpu-cdi-runtime is a link beside prestart-hook. That of an engine, gpu-cdi-runtime-ENGINE, runs the engine's default
runtime, which is written to /etc/gpu-cdi-plugin/runtime-ENGINE.yaml: run this again after a change of the default.
NVIDIA's runtime, which gives GPUs to images that ask for them, is never behind ours: runc or crun is written in its
place, with a warning, and without either it is an error.
The existing content of a file stays, byte for byte. With --root nothing outside of that directory is written, and the
hook must be there too, at the path that it has on this host or that --hook-path names.
All files are written or none. These are errors: a file of another program at one of the paths, a contradicting
setting, and a file that cannot be read. A second call changes nothing. A file that hook install wrote and that was
changed afterwards stays as it is, with a warning. Another warning is logged on a node with a kubelet and without a
policy in /etc/gpu-cdi-plugin/hook.yaml: there, every container that can be annotated may take any GPU.`,
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
			return a.locked(dryRun, func() error { return a.hookInstall(args, out, dryRun) })
		},
	}
	out.AddFlags(cmd, "table", "json", "yaml")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "check all, print the difference of each file and change nothing")
	return cmd
}

// printEngines prints the engines that can be configured, and which of them are found and installed on this host.
func (a *app) printEngines(out cli.Output) error {
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
	t := cli.Table{Header: []string{"ENGINE", "FOUND", "INSTALLED", "WITHOUT THE HOOK", "WITH THE HOOK"}}
	var rows []row
	for _, e := range install.Engines() {
		r := row{e.Name, hasProgram(h.Root(), e.Program), slices.Contains(installed, e.Name), e.Without, e.Gives}
		found := cli.YesNo(r.Found)
		if e.Program == "" {
			found = "-"
		}
		rows = append(rows, r)
		t.Rows = append(t.Rows, []string{r.Engine, found, cli.YesNo(r.Installed), r.Without, r.Gives})
	}
	return out.Print(a.Stdout, cli.View{Data: map[string][]row{"engines": rows}, Table: t})
}

// hasProgram reports whether a host has a program in one of the standard directories.
func hasProgram(root, name string) bool {
	return name != "" && slices.ContainsFunc([]string{"usr/bin", "usr/sbin", "usr/local/bin", "usr/local/sbin"},
		func(dir string) bool {
			_, err := os.Stat(filepath.Join(root, dir, name))
			return err == nil
		})
}

func (a *app) hookInstall(engines []string, out cli.Output, dryRun bool) error {
	p, err := a.planInstall(engines)
	if err != nil {
		return err
	}
	if err := a.checkHookBelowRoot(); err != nil {
		return err
	}
	if err := a.warnOfNoPolicy(); err != nil {
		return err
	}
	return a.applyHook(p, out, dryRun)
}

// checkHookBelowRoot does what checkHook does, for the hook on the host whose engines are configured.
func (a *app) checkHookBelowRoot() error {
	h, err := a.host()
	if err != nil {
		return err
	}
	hook, err := a.hook()
	if err != nil {
		return err
	}
	path, err := install.Resolve(h.Root(), hook)
	if err != nil {
		return err
	}
	return a.checkHookAt(path)
}

// warnOfNoPolicy logs a warning on a Kubernetes node where no policy limits annotations.
func (a *app) warnOfNoPolicy() error {
	h, err := a.host()
	if err != nil {
		return err
	}
	exists := func(name string) bool {
		_, err := os.Stat(filepath.Join(h.Root(), name))
		return err == nil
	}
	if exists("var/lib/kubelet") && !exists("etc/gpu-cdi-plugin/hook.yaml") {
		a.Log.Warn("this node has a kubelet and no /etc/gpu-cdi-plugin/hook.yaml: every container that can be annotated " +
			"may take any GPU; with allocated: true in that file it gets only those that the kubelet gave it")
	}
	return nil
}
