package main

import (
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/wording"
)

func (a *app) listCommand() *cobra.Command {
	var out cli.Output
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the devices that the CDI directories offer",
		Long: `Lists the devices of all spec files in /etc/cdi (under --root) and in --cdi-dir, of every vendor, as
engines see them.

A device is shadowed if a file in a directory of higher priority also defines it, and in conflict if another file of
the same directory does: then engines offer neither. A file that cannot be read is listed with its error.`,
		Example: `  gpu-cdi-plugin cdi list
  gpu-cdi-plugin cdi list -o name`,
		Annotations: cli.Statuses(cli.OK, cli.Failure, cli.Usage, cli.Partial),
		RunE:        func(*cobra.Command, []string) error { return a.cdiList(out) },
	}
	out.AddFlags(cmd, "table", "wide", "json", "yaml", "name")
	return cmd
}

func (a *app) cdiList(out cli.Output) error {
	h, err := a.host()
	if err != nil {
		return err
	}
	dirs := cdi.Load(a.specDirs(h)...)
	if err := out.Print(a.Stdout, specDirsView(dirs)); err != nil {
		return err
	}
	return specDirsError(dirs)
}

// specDirsError returns an error if there are devices in the spec directories that engines do not offer.
func specDirsError(dirs *cdi.SpecDirs) error {
	unread, lost := 0, map[string]bool{}
	for _, f := range dirs.Files {
		if f.Error != "" {
			unread++
		}
	}
	for _, d := range dirs.Devices {
		if d.State == cdi.Conflicting {
			lost[d.Name] = true
		}
	}
	var problems []string
	if unread > 0 {
		problems = append(problems, wording.Count(unread, "file")+" cannot be read")
	}
	if len(lost) > 0 {
		problems = append(problems, wording.Count(len(lost), "device")+" defined twice, so engines do not offer them")
	}
	if problems == nil {
		return nil
	}
	return partly("repair or remove the files that the list names", "%s", strings.Join(problems, "; "))
}

func specDirsView(dirs *cdi.SpecDirs) cli.View {
	t := cli.Table{Header: []string{"NAME", "STATE", "FILE", "OTHER FILE"}, Wide: 3}
	for _, d := range dirs.Devices {
		t.Rows = append(t.Rows, []string{d.Name, string(d.State), d.File, cli.OrDash(d.Other)})
	}
	for _, f := range dirs.Files {
		if f.Error != "" {
			t.Rows = append(t.Rows, []string{"-", "error: " + f.Error, f.Path, "-"})
		}
	}
	data := *dirs // with empty lists instead of null
	data.Files = append([]cdi.SpecFile{}, dirs.Files...)
	data.Devices = append([]cdi.Definition{}, dirs.Devices...)
	return cli.View{Data: data, Table: t, Names: dirs.Names()}
}
