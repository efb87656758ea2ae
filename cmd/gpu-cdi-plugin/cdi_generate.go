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

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/nvml"
)

// generateOptions are the options of cdi generate.
type generateOptions struct {
	// Format is json, yaml or table; empty is the usual one of what is printed.
	Format string
	// NoHeaders prints a table without its first line.
	NoHeaders bool
	// Write writes the spec into --cdi-dir, File to a file; otherwise it is printed.
	Write bool
	File  string
	// FileGiven tells that there was a --file, if only an empty one: a variable of a script that is not set.
	FileGiven bool
	// Explain prints what was looked for in place of the spec.
	Explain      bool
	Capabilities *driver.Capabilities
}

func (a *app) generateCommand() *cobra.Command {
	var opts generateOptions
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Make the CDI spec of this host's GPUs",
		Long: `Makes a CDI spec with everything that a container needs to use this host's GPUs: device nodes, the driver's files and
one hook. It is printed, or with --write put into --cdi-dir, where engines look for it.

Each GPU is there by index and by UUID, each MIG device by GPU:INDEX and by UUID, and "all" is all of them. A GPU that
cannot be read is left out; the others are there. A spec is not written where another file in the CDI directories
already defines one of its names, since engines then offer neither, and not if others than root could change the hook,
which engines run as root, the driver's library or --cdi-dir (see --insecure-paths).

What containers can get besides GPUs, where it is configured (extras, imex) and the host has it, is in a spec of its own
kind: a document of its own, or a file of its own in --cdi-dir. A file of an extra that the host has no longer is
removed.`,
		Example: `  gpu-cdi-plugin cdi generate
  gpu-cdi-plugin cdi generate --write
  gpu-cdi-plugin cdi generate --write --extras gds,gdrcopy
  gpu-cdi-plugin cdi generate --file /etc/cdi/nvidia.yaml --capabilities compute,utility
  gpu-cdi-plugin cdi generate --explain`,
		Annotations: cli.Statuses(exit.OK, exit.Failure, exit.Usage, exit.Partial, exit.NoDriver, exit.NoGPU,
			exit.Interrupted),
		Args:              noArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts.FileGiven = cmd.Flags().Changed("file")
			return a.cdiGenerate(cmd.Context(), opts)
		},
	}
	f := cmd.Flags()
	f.VarP(&choice{&opts.Format, []string{"json", "yaml", "table"}}, "output", "o", "output `format`: json, yaml; with --explain table, json, yaml")
	f.BoolVar(&opts.NoHeaders, "no-headers", false, "print tables without their first line")
	f.BoolVar(&opts.Write, "write", false, "write the spec into --cdi-dir and print the file's path")
	f.StringVar(&opts.File, "file", "", "write the spec to a `file`, .json or .yaml, and print its path")
	f.BoolVar(&opts.Explain, "explain", false, "print what was looked for, and what was found where, instead of the spec")
	opts.Capabilities = addCapabilities(f)
	a.addTimeout(cmd)
	a.addExtras(cmd)
	cmd.SetFlagErrorFunc(fileForFormat)
	completeChoices(cmd, f, "output")
	_ = cmd.MarkFlagFilename("file", "json", "yaml")
	_ = cmd.RegisterFlagCompletionFunc("capabilities", cobra.FixedCompletions(driver.CapabilityNames(), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// fileForFormat helps who knows --output from other generators, where it names a file.
func fileForFormat(cmd *cobra.Command, err error) error {
	plain := cli.FlagError(cmd, err)
	if e, ok := errors.AsType[*pflag.InvalidValueError](err); ok && e.GetFlag().Name == "output" {
		return exit.With(exit.Usage, "to write the spec to a file, use --write or --file FILE", plain)
	}
	return plain
}

func (a *app) cdiGenerate(ctx context.Context, opts generateOptions) error {
	format, path, err := a.destination(opts)
	if err != nil {
		return err
	}
	if path != "" {
		if err := a.checkHook(); err != nil {
			return err
		}
	}
	if opts.Write {
		if err := a.checkSafeDir(optionDir{"cdi-dir", a.CDIDir}); err != nil {
			return err
		}
	}
	h, err := a.host()
	if err != nil {
		return err
	}
	if path != "" {
		if err := a.checkDriverRoot(h); err != nil {
			return err
		}
	}
	g, err := a.generate(ctx, h, *opts.Capabilities)
	if opts.Explain && errors.Is(err, nvml.ErrLibraryNotFound) {
		return cmp.Or(a.printGenerated(&generated{findings: missingLibrary(h)}, opts, format, ""), err)
	}
	if err != nil {
		return err
	}
	if err := g.noDevice(h); err != nil {
		if opts.Explain { // the table says why, so this is when it is needed most
			return cmp.Or(a.printGenerated(g, opts, format, ""), err)
		}
		return err
	}
	if path != "" {
		if err := a.write(h, g.files(path, a.CDIKind)); err != nil {
			return err
		}
	}
	if err := a.printGenerated(g, opts, format, path); err != nil {
		return err
	}
	return g.incomplete()
}

// missingLibrary are the places where the driver's library is not.
func missingLibrary(h host.Host) []driver.Finding {
	var findings []driver.Finding
	for _, path := range nvml.LibraryPaths(h) {
		findings = append(findings, driver.Finding{Name: path, Kind: driver.KindLibrary, Note: "not found"})
	}
	return findings
}

// destination checks the options with each other, before anything is done.
func (a *app) destination(opts generateOptions) (format cdi.Format, path string, err error) {
	path, format = opts.File, cdi.Format(opts.Format)
	if opts.Write {
		path = a.ownSpec()
	}
	switch {
	case opts.FileGiven && opts.File == "":
		err = errors.New("--file is empty")
	case opts.Write && opts.File != "":
		err = errors.New("--write and --file both say where the spec goes; use one of them")
	case opts.File != "" && len(a.configuredExtras()) > 0:
		err = errors.New("--file is for one spec, and extras have their own; use --write, with --cdi-dir for the directory")
	case opts.Explain:
	case opts.Format == "table":
		err = errors.New("a spec has no table; --explain has one")
	case path != "" && opts.Format != "":
		err = errors.New("--output is for what is printed; the extension of a spec file says its format")
	case format == "":
		format = cdi.JSON
	}
	if err == nil && path != "" {
		_, err = cdi.FormatOf(path)
	}
	return format, path, exit.With(exit.Usage, "see gpu-cdi-plugin cdi generate --help", err)
}

const hintSpecDir = "name a directory that can be made or written to, with --cdi-dir or --file"

// write makes the files what they should be. Nothing is written if one of them cannot be.
func (a *app) write(h host.Host, files []specFile) error {
	if err := makeSpecDir(filepath.Dir(files[0].path)); err != nil {
		return exit.With(exit.Failure, hintSpecDir, err)
	}
	there := cdi.Load(a.specDirs(h)...)
	for _, f := range files {
		if kind := otherKind(f.path, f.kind); kind != "" {
			return exit.With(exit.Failure, "remove it by hand if it is not needed, or name another file with --file",
				fmt.Errorf("write %s: it is a spec of kind %s, not %s", f.path, kind, f.kind))
		}
		if f.spec == nil {
			continue
		}
		if err := there.ConflictsWith(f.path, f.spec); err != nil {
			return err
		}
	}
	for _, f := range files {
		if err := a.writeFile(f); err != nil {
			return exit.With(exit.Failure, hintSpecDir, err)
		}
	}
	return nil
}

// writeFile makes a file what it should be, which may be that there is none.
func (a *app) writeFile(f specFile) error {
	if f.spec != nil {
		a.log.Debug("the spec "+f.path+" is written", "devices", len(f.spec.Devices))
		return cdi.WriteFile(f.path, f.spec)
	}
	err := atomicfile.Remove(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove the spec of what this host has no longer: %w", err)
	}
	a.log.Info("the spec " + f.path + " is removed, since this host has nothing of its kind")
	return nil
}

// makeSpecDir makes the directory if only that is missing: /var/run is emptied at boot. A missing parent is more likely
// a mistake.
func makeSpecDir(dir string) error {
	if err := atomicfile.MakeDir(dir); err != nil { // engines of users without privileges read it too
		return fmt.Errorf("make the spec directory: %w", err)
	}
	return nil
}

func (a *app) printGenerated(g *generated, opts generateOptions, format cdi.Format, path string) error {
	switch {
	case opts.Explain:
		out := output{format: opts.Format, noHeaders: opts.NoHeaders}
		return out.print(a.stdout, explainView(g.findings))
	case path != "":
		return a.printPaths(g.files(path, a.CDIKind))
	}
	var all []byte
	for _, f := range g.files("", a.CDIKind) {
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
	if _, err := a.stdout.Write(all); err != nil {
		return fmt.Errorf("print the spec: %w", err)
	}
	return nil
}

func (a *app) printPaths(files []specFile) error {
	for _, f := range files {
		if f.spec == nil {
			continue
		}
		if err := a.printPath(f.path); err != nil {
			return err
		}
	}
	return nil
}

// printPath tells which file was written or removed.
func (a *app) printPath(path string) error {
	if _, err := fmt.Fprintln(a.stdout, path); err != nil {
		return fmt.Errorf("print the path %s: %w", path, err)
	}
	return nil
}

func explainView(findings []driver.Finding) view {
	t := table{header: []string{"NAME", "KIND", "USED", "FOUND", "NOTE"}}
	for _, f := range findings {
		used := "no"
		if f.Used {
			used = "yes"
		}
		t.rows = append(t.rows, []string{f.Name, string(f.Kind), used, orDash(f.Path), f.Note})
	}
	return view{data: map[string][]driver.Finding{"findings": append([]driver.Finding{}, findings...)}, table: t}
}
