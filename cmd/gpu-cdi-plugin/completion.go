package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
)

var shells = []string{"bash", "zsh", "fish", "powershell"}

func (a *app) completionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "completion bash|zsh|fish|powershell",
		Short: "Print a completion script for a shell",
		Long: `Prints a completion script for a shell: verbs, flags, values, files and CDI device names. In bash it
needs the package bash-completion.`,
		Example: `  gpu-cdi-plugin completion bash > /etc/bash_completion.d/gpu-cdi-plugin
  gpu-cdi-plugin completion zsh > "${fpath[1]}/_gpu-cdi-plugin"
  gpu-cdi-plugin completion fish > ~/.config/fish/completions/gpu-cdi-plugin.fish
  gpu-cdi-plugin completion powershell >> $PROFILE`,
		Annotations:           cli.Statuses(cli.OK, cli.Failure, cli.Usage),
		DisableFlagsInUseLine: true,
		ValidArgs:             shells,
		Args:                  oneShell,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			switch root := cmd.Root(); args[0] {
			case "bash":
				err = root.GenBashCompletionV2(a.stdout, true)
			case "zsh":
				err = root.GenZshCompletion(a.stdout)
			case "fish":
				err = root.GenFishCompletion(a.stdout, true)
			case "powershell":
				err = root.GenPowerShellCompletionWithDesc(a.stdout)
			}
			if err != nil {
				return fmt.Errorf("print the completion script: %w", err)
			}
			return nil
		},
	}
}

func oneShell(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want one shell of %v, got %d arguments", shells, len(args))
	}
	var shell string
	return (&choice{&shell, shells}).Set(args[0])
}

// completeVerbs completes the arguments of help.
func completeVerbs(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
	topic, _, err := cmd.Root().Find(args)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, c := range topic.Commands() {
		if c.IsAvailableCommand() && strings.HasPrefix(c.Name(), prefix) {
			names = append(names, c.Name()+"\t"+c.Short)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
