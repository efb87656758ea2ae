package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"gpu-cdi-plugin/agent"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/nvml"
)

// generateOptions are the options of the verb cdi generate.
type generateOptions struct {
	cli.Output
	given func(flag string) bool
	// Write means that the spec is written into --cdi-dir, and File is the path of a file to which it is written.
	// Otherwise the spec is printed.
	Write bool
	File  string
	// Explain prints what was searched for, instead of the spec.
	Explain      bool
	Capabilities *driver.Capabilities
}

func (a *app) generateCommand() *cobra.Command {
	var opts generateOptions
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Make the CDI spec of this host's GPUs",
		Long: `Makes a CDI spec with everything that a container needs to use this host's GPUs: device nodes, the
driver's files and one hook. It prints the spec, or with --write writes it into --cdi-dir, where engines
read it.

Each GPU has its index and its UUID as names, each MIG device GPU:INDEX and its UUID, and "all" is all of them. A GPU
that cannot be read is left out. No spec is written if another file in the CDI directories defines one of its names,
since engines would then offer neither device. Nor is it written if users other than root can change the hook, which
engines run as root, the driver's library or --cdi-dir (see --insecure-paths).

Extras (see extras and imex in the configuration) are what containers can get besides GPUs. Each configured extra that
the host has gets a spec of its own kind: its own document, or its own file in --cdi-dir. The file of an extra that the
host no longer has is removed.`,
		Example: `  gpu-cdi-plugin cdi generate
  gpu-cdi-plugin cdi generate --write
  gpu-cdi-plugin cdi generate --write --extras gds,gdrcopy
  gpu-cdi-plugin cdi generate --file /etc/cdi/nvidia.yaml --capabilities compute,utility
  gpu-cdi-plugin cdi generate --explain`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Partial, cli.NoDriver, cli.NoGPU,
			cli.Interrupted),
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.given = cmd.Flags().Changed
			if opts.Explain && !opts.given("output") {
				opts.Format = "table"
			}
			return a.cdiGenerate(cmd.Context(), opts)
		},
	}
	f := cmd.Flags()
	opts.AddFlags(cmd, "json", "yaml", "table")
	f.BoolVar(&opts.Write, "write", false, "write the spec into --cdi-dir and print the file's path")
	f.StringVar(&opts.File, "file", "", "write the spec to a `file`, .json or .yaml, and print its path")
	f.BoolVar(&opts.Explain, "explain", false,
		"print what was searched for, and where it was found, instead of the spec; by default as a table")
	opts.Capabilities = addCapabilitiesFlag(f)
	a.addTimeout(cmd)
	a.addExtras(cmd)
	cmd.SetFlagErrorFunc(outputIsNoFile)
	_ = cmd.MarkFlagFilename("file", "json", "yaml")
	_ = cmd.RegisterFlagCompletionFunc("capabilities",
		cobra.FixedCompletions(driver.CapabilityNames(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// outputIsNoFile adds a hint if --output names a file, as in nvidia-ctk cdi generate.
func outputIsNoFile(cmd *cobra.Command, err error) error {
	improved := cli.FlagError(cmd, err)
	if e, ok := errors.AsType[*pflag.InvalidValueError](err); ok && e.GetFlag().Name == "output" {
		return cli.With(cli.Usage, "to write the spec to a file, use --write or --file FILE", improved)
	}
	return improved
}

func (a *app) cdiGenerate(ctx context.Context, opts generateOptions) error {
	path, err := a.destination(opts)
	if err != nil {
		return err
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	if path != "" {
		if err := a.CheckHook(); err != nil {
			return err
		}
		if err := a.checkDriverRoot(h); err != nil {
			return err
		}
		a.logRootOfLibrary(h)
	}
	if opts.Write {
		if err := a.CheckDir("cdi-dir", a.CDIDir); err != nil {
			return err
		}
	}
	g, err := a.generate(ctx, h, *opts.Capabilities)
	if opts.Explain && errors.Is(err, nvml.ErrLibraryNotFound) {
		return cmp.Or(opts.Print(a.Stdout, explainView(a.explainRoot(h, missingLibrary(h)))), err)
	}
	if opts.Explain && err != nil && g != nil {
		return cmp.Or(opts.Print(a.Stdout, explainView(a.explainRoot(h, g.findings))), err)
	}
	if err != nil {
		return err
	}
	err = a.checkAndWrite(h, g, path)
	if opts.Explain { // they explain the error
		err = cmp.Or(opts.Print(a.Stdout, explainView(a.explainRoot(h, g.findings))), err)
	}
	if err != nil {
		return err
	}
	if !opts.Explain {
		if err := a.printGenerated(g, path, cdi.Format(opts.Format)); err != nil {
			return err
		}
	}
	a.warnMissing(g.findings)
	return g.checkComplete()
}

// checkAndWrite writes the spec's file, if there is a path. If the spec has no devices, that is an error.
func (a *app) checkAndWrite(h host.Host, g *generated, path string) error {
	if err := g.checkDevices(); err != nil {
		return err
	}
	if path == "" {
		return nil
	}
	return a.write(h, g.files(path, a.CDIKind))
}

// printGenerated prints the paths of the files that were written or, if none was, the specs themselves.
func (a *app) printGenerated(g *generated, path string, f cdi.Format) error {
	if path != "" {
		return a.printPaths(g.files(path, a.CDIKind))
	}
	return a.printSpecs(g.files("", a.CDIKind), f)
}

// missingLibrary returns a finding for each path at which the driver's library was searched for.
func missingLibrary(h host.Host) []driver.Finding {
	var findings []driver.Finding
	for _, path := range nvml.LibraryPaths(h) {
		findings = append(findings, driver.Finding{Name: path, Kind: driver.KindLibrary, Note: "not found"})
	}
	return findings
}

// destination checks that the options fit together, and returns the path of the spec's file, or "".
func (a *app) destination(opts generateOptions) (path string, err error) {
	path = opts.File
	if opts.Write {
		path = a.ownSpec()
	}
	if err := a.checkDestination(opts, path); err != nil {
		return "", cli.With(cli.Usage, "see gpu-cdi-plugin cdi generate --help", err)
	}
	return path, nil
}

func (a *app) checkDestination(opts generateOptions, path string) error {
	switch {
	case opts.given("file") && opts.File == "":
		return errors.New("--file is empty")
	case opts.Write && opts.File != "":
		return errors.New("--write and --file exclude each other")
	case opts.File != "" && len(agent.Extras(a.config)) > 0:
		return errors.New("--file is for one spec, and each extra has its own; " +
			"use --write, with --cdi-dir for the directory")
	case opts.Explain:
	case opts.Format == "table":
		return errors.New("--output table needs --explain")
	case path != "" && opts.given("output"):
		return errors.New("--output formats what is printed; the extension of a spec file selects its format")
	}
	if path == "" {
		return nil
	}
	_, err := cdi.FormatOf(path)
	return err
}

const hintSpecDir = "use --cdi-dir or --file to name a directory that can be created or written to"

// write writes the expected files. If one of them cannot be written, none is.
func (a *app) write(h host.Host, files []specFile) error {
	// Parents are not created: /var/run is emptied at boot, but a missing parent is probably a mistake.
	if err := fileio.MakeDir(filepath.Dir(files[0].path)); err != nil {
		return cli.With(cli.Failure, hintSpecDir, fmt.Errorf("make the spec directory: %w", err))
	}
	dirs := cdi.Load(a.specDirs(h)...)
	for _, f := range files {
		if kind := otherKind(f.path, f.kind); kind != "" {
			return cli.With(cli.Failure, "remove it by hand if it is not needed, or name another file with --file",
				fmt.Errorf("write %s: it is a spec of kind %s, not %s", f.path, kind, f.kind))
		}
		if f.spec == nil {
			continue
		}
		if err := dirs.CheckConflicts(f.path, f.spec); err != nil {
			return err
		}
	}
	for _, f := range files {
		if err := a.writeFile(f); err != nil {
			return cli.With(cli.Failure, hintSpecDir, err)
		}
	}
	a.warnServed(files[0].path)
	return nil
}

// warnServed logs a warning if a service writes a spec file again that a verb has changed.
func (a *app) warnServed(path string) {
	served, err := node.IsServed(path)
	if err != nil {
		a.Log.Debug("it is unknown whether a service keeps the spec up to date: " + err.Error())
	}
	if served {
		a.Log.Warn("a service (serve or cdi watch) keeps " + path + " up to date and writes it again, by its own " +
			"configuration: to change the spec, change /etc/gpu-cdi-plugin/config.yaml and reload the service; to remove it, " +
			"stop the service first")
	}
}

// writeFile writes a spec. If the spec has no devices, it removes the file.
func (a *app) writeFile(f specFile) error {
	if f.spec != nil {
		a.Log.Debug("write the spec "+f.path, "devices", len(f.spec.Devices))
		return cdi.WriteFile(f.path, f.spec)
	}
	err := fileio.Remove(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove a spec without devices: %w", err)
	}
	a.Log.Info("the spec " + f.path + " is removed, since it would have no device")
	return nil
}

func (a *app) printPaths(files []specFile) error {
	out, v := cli.Output{Format: "name"}, cli.View{}
	for _, f := range files {
		if f.spec != nil {
			v.Names = append(v.Names, f.path)
		}
	}
	return out.Print(a.Stdout, v)
}

func (a *app) printSpecs(files []specFile, format cdi.Format) error {
	var all []byte
	for _, f := range files {
		if f.spec == nil {
			continue
		}
		data, err := cdi.Marshal(f.spec, format)
		if err != nil {
			return err
		}
		if len(all) > 0 && format == cdi.YAML {
			all = append(all, "---\n"...)
		}
		all = append(all, data...)
	}
	if _, err := a.Stdout.Write(all); err != nil {
		return fmt.Errorf("print the spec: %w", err)
	}
	return nil
}

func explainView(findings []driver.Finding) cli.View {
	t := cli.Table{Header: []string{"NAME", "KIND", "USED", "FOUND", "NOTE"}}
	for _, f := range findings {
		t.Rows = append(t.Rows, []string{f.Name, string(f.Kind), cli.YesNo(f.Used), cli.OrDash(f.Path), f.Note})
	}
	return cli.View{Data: map[string][]driver.Finding{"findings": append([]driver.Finding{}, findings...)}, Table: t}
}
