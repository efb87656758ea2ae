package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
)

func (a *app) hookPrintCommand() *cobra.Command {
	out := cli.Output{}
	cmd := &cobra.Command{
		Use:   "print ENGINE...",
		Short: "Print the files that hook install would write",
		Long: `Prints the files of engines as they would be after hook install, each after a line with its path,
whether it would change or not. The hook need not exist: with --hook-path the files can be for another host.`,
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
	out.AddFlags(cmd, "text", "json", "yaml")
	return cmd
}

func (a *app) hookPrint(engines []string, out cli.Output) error {
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
	return out.Print(a.Stdout, cli.View{
		Data: map[string][]file{"files": files},
		Text: strings.TrimSuffix(text.String(), "\n"),
	})
}
