package main

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/internal/cli"
)

func (a *app) configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show and check the configuration",
		Long: `Shows the default and the effective configuration, and checks a configuration file.

One file has the options of all verbs, of the device plugin and of the device manager. Its JSON schema is
specs/config.schema.json.`,
		Annotations: cli.Statuses(cli.OK, cli.Usage),
		Args:        cli.UnknownVerb,
		RunE:        help,
	}
	cmd.AddCommand(a.configDefaultCommand(), a.configViewCommand(), a.configValidateCommand())
	return cmd
}

func (a *app) configDefaultCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "default",
		Short: "Print the default configuration",
		Long:  `Prints a configuration file with all keys and their defaults; in YAML, a comment explains each key.`,
		Example: `  gpu-cdi-plugin config default > config.yaml
  gpu-cdi-plugin config view --config config.yaml`,
		RunE: func(*cobra.Command, []string) error { return a.configDefault(out) },
	}
	out.addFlags(cmd, "yaml", "json")
	return cmd
}

func (a *app) configDefault(out output) error {
	c := config.Default()
	if out.format == "json" {
		return out.print(a.stdout, view{data: &c})
	}
	text, err := c.Document()
	if err != nil {
		return err
	}
	if _, err := a.stdout.Write(text); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

func (a *app) configViewCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "view",
		Short: "Print the effective configuration",
		Long: `Prints the effective configuration, from flags, environment and file. The table has the source of
each value.

The flags of serve and manager are accepted too: config view with the arguments of serve shows the configuration of
serve.`,
		Example: `  gpu-cdi-plugin config view --config config.yaml
  GPU_CDI_MIG_STRATEGY=mixed gpu-cdi-plugin config view -o table`,
		RunE: func(*cobra.Command, []string) error { return a.configView(out) },
	}
	out.addFlags(cmd, "yaml", "json", "table")
	cmd.Flags().AddFlagSet(a.pluginFlags)
	cmd.Flags().AddFlagSet(a.managerFlags)
	return cmd
}

func (a *app) configView(out output) error {
	c := a.configuration()
	var n yaml.Node
	if err := n.Encode(&c); err != nil {
		return fmt.Errorf("write the configuration as YAML: %w", err)
	}
	t := table{header: []string{"KEY", "VALUE", "SOURCE"}}
	if err := a.addRows(&t, "", &n); err != nil {
		return fmt.Errorf("write the configuration as a table: %w", err)
	}
	return out.print(a.stdout, view{data: &c, table: t})
}

// addRows adds a row for each key below prefix; a value with keys of its own has a row for each of them.
func (a *app) addRows(t *table, prefix string, n *yaml.Node) error {
	for i := 0; i < len(n.Content); i += 2 {
		path, value := prefix+n.Content[i].Value, n.Content[i+1]
		if value.Kind == yaml.MappingNode {
			if err := a.addRows(t, path+".", value); err != nil {
				return err
			}
			continue
		}
		value.Style = yaml.FlowStyle
		text, err := yaml.Marshal(value)
		if err != nil {
			return err
		}
		key, _, _ := strings.Cut(path, ".")
		t.rows = append(t.rows, []string{path, strings.TrimSpace(string(text)), cmp.Or(a.sources[key], "default")})
	}
	return nil
}

func (a *app) configValidateCommand() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "validate [FILE]",
		Short: "Validate the configuration and report all problems",
		Long: `Validates the effective configuration, from flags, environment and file. FILE is short for --config FILE.
No driver is needed, so a configuration can be validated anywhere.

With -o json or yaml the result is printed for invalid configurations too, with the problems in it.`,
		Example: `  gpu-cdi-plugin config validate config.yaml
  gpu-cdi-plugin config validate config.yaml -o json | jq -r '.problems[]'
  gpu-cdi-plugin config validate --config /etc/gpu-cdi-plugin/config.yaml --mig-strategy mixed`,
		Args:              a.takeFile,
		ValidArgsFunction: completeFile("yaml", "yml", "json"),
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			err := a.start(cmd)
			if err != nil && out.format != "text" {
				err = errors.Join(err, out.print(a.stdout, a.configResultView(strings.Split(err.Error(), "\n"))))
			}
			return err
		},
		// The configuration is valid if this runs: each verb validates its options before.
		RunE: func(*cobra.Command, []string) error { return out.print(a.stdout, a.configResultView([]string{})) },
	}
	out.addFlags(cmd, "text", "json", "yaml")
	cmd.Flags().AddFlagSet(a.pluginFlags)
	cmd.Flags().AddFlagSet(a.managerFlags)
	return cmd
}

// configResult is the result of config validate.
type configResult struct {
	File     string   `json:"file"`
	Valid    bool     `json:"valid"`
	Problems []string `json:"problems"`
}

func (a *app) configResultView(problems []string) view {
	text := "the configuration is valid"
	if a.configFile != "" {
		text = a.configFile + ": " + text
	}
	return view{data: configResult{a.configFile, len(problems) == 0, problems}, table: table{rows: [][]string{{text}}}}
}

// takeFile sets --config to the argument of validate. It runs before the options are resolved, so that the file is
// handled like any other.
func (a *app) takeFile(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) != 1:
		return oneFile(cmd, args)
	case cmd.Flags().Changed("config"):
		return fmt.Errorf("both --config %s and %s are given", a.configFile, args[0])
	}
	return cmd.Flags().Set("config", args[0])
}
