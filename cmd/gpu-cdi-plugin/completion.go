package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/exit"
)

var shells = []string{"bash", "zsh", "fish", "powershell"}

func (a *app) completionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "completion bash|zsh|fish|powershell",
		Short: "Print a completion script for a shell",
		Long: `Prints a script with which a shell completes this program's verbs, flags, flag values, files and the names of the
devices that the host's CDI specs offer. For bash the package bash-completion has to be there.`,
		Example: `  gpu-cdi-plugin completion bash > /etc/bash_completion.d/gpu-cdi-plugin
  gpu-cdi-plugin completion zsh > "${fpath[1]}/_gpu-cdi-plugin"
  gpu-cdi-plugin completion fish > ~/.config/fish/completions/gpu-cdi-plugin.fish
  gpu-cdi-plugin completion powershell >> $PROFILE`,
		Annotations:           cli.Statuses(exit.OK, exit.Failure, exit.Usage),
		DisableFlagsInUseLine: true,
		ValidArgs:             shells,
		Args:                  oneShell,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.complete(cmd.Root(), args[0]); err != nil {
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

func (a *app) complete(root *cobra.Command, shell string) error {
	switch shell {
	case "bash":
		return root.GenBashCompletionV2(a.stdout, true)
	case "zsh":
		return root.GenZshCompletion(a.stdout)
	case "fish":
		return root.GenFishCompletion(a.stdout, true)
	default:
		return root.GenPowerShellCompletionWithDesc(a.stdout)
	}
}
