package cli

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/wording"
)

func (p *Program) configCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show and check the configuration",
		Long: `Shows the default and the effective configuration, and checks a configuration file.

One file has the options of all verbs and of serve. Its JSON schema is ` + p.Schema + `, in
/usr/share/doc/` + p.Name + ` or the source code.`,
		Example:     p.examples("config default > config.yaml", "config validate config.yaml"),
		Annotations: Statuses(OK, Usage),
		Args:        UnknownVerb,
		RunE:        ShowHelp,
	}
	cmd.AddCommand(p.configDefaultCommand(), p.configViewCommand(), p.configValidateCommand())
	return cmd
}

func (p *Program) configDefaultCommand() *cobra.Command {
	var out Output
	cmd := &cobra.Command{
		Use:     "default",
		Short:   "Print the default configuration",
		Long:    `Prints a configuration file with all keys and their defaults; in YAML, a comment explains each key.`,
		Example: p.examples("config default > config.yaml", "config view --config config.yaml"),
		RunE:    func(*cobra.Command, []string) error { return p.configDefault(out) },
	}
	out.AddFlags(cmd, "yaml", "json")
	return cmd
}

func (p *Program) configDefault(out Output) error {
	if out.Format == "json" {
		return out.Print(p.Stdout, View{Data: p.Default})
	}
	text, err := p.Keys.Document(p.Default)
	if err != nil {
		return err
	}
	if _, err := p.Stdout.Write(text); err != nil {
		return fmt.Errorf("print the result: %w", err)
	}
	return nil
}

func (p *Program) configViewCommand() *cobra.Command {
	var out Output
	cmd := &cobra.Command{
		Use:   "view",
		Short: "Print the effective configuration",
		Long: `Prints the effective configuration, from flags, environment and file. The table has the source of
each value.

The flags of serve are accepted too: config view with the arguments of serve shows the configuration of serve.`,
		Example: p.examples("config view --config config.yaml", "config view --log-level debug -o table"),
		RunE:    func(*cobra.Command, []string) error { return p.configView(out) },
	}
	out.AddFlags(cmd, "yaml", "json", "table")
	cmd.Flags().AddFlagSet(p.ServiceFlags)
	return cmd
}

func (p *Program) configView(out Output) error {
	var n yaml.Node
	if err := n.Encode(p.Config); err != nil {
		return fmt.Errorf("write the configuration as YAML: %w", err)
	}
	t := Table{Header: []string{"KEY", "VALUE", "SOURCE"}}
	if err := p.addRows(&t, "", &n); err != nil {
		return fmt.Errorf("write the configuration as a Table: %w", err)
	}
	return out.Print(p.Stdout, View{Data: p.Config, Table: t})
}

// addRows adds a row for each key below `prefix`. If the value of a key is an object, its keys get rows instead.
func (p *Program) addRows(t *Table, prefix string, n *yaml.Node) error {
	for i := 0; i < len(n.Content); i += 2 {
		path, value := prefix+n.Content[i].Value, n.Content[i+1]
		if value.Kind == yaml.MappingNode {
			if err := p.addRows(t, path+".", value); err != nil {
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
		t.Rows = append(t.Rows, []string{path, strings.TrimSpace(string(text)), cmp.Or(p.sources[key], "default")})
	}
	return nil
}

func (p *Program) configValidateCommand() *cobra.Command {
	var out Output
	cmd := &cobra.Command{
		Use:   "validate [FILE]",
		Short: "Validate the configuration and report all problems",
		Long: `Validates the effective configuration, from flags, environment and file. FILE is short for --config FILE.
No driver is needed, so a configuration can be validated anywhere.

With -o json or yaml the result is printed for invalid configurations too, with the problems in it.`,
		Example: p.examples("config validate config.yaml", "config validate config.yaml -o json | jq -r '.problems[]'",
			"config validate --config config.yaml --log-level debug"),
		Args:              p.takeFile,
		ValidArgsFunction: CompleteFile("yaml", "yml", "json"),
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			err := p.Start(cmd)
			if err != nil && out.Format != "text" {
				err = errors.Join(err, out.Print(p.Stdout, p.configResultView(wording.Problems(err))))
			}
			return err
		},
		// The configuration is valid here: the options of each verb are validated before it runs.
		RunE: func(*cobra.Command, []string) error { return out.Print(p.Stdout, p.configResultView([]string{})) },
	}
	out.AddFlags(cmd, "text", "json", "yaml")
	cmd.Flags().AddFlagSet(p.ServiceFlags)
	return cmd
}

// configResult is the result of config validate.
type configResult struct {
	File     string   `json:"file"`
	Valid    bool     `json:"valid"`
	Problems []string `json:"problems"`
}

func (p *Program) configResultView(problems []string) View {
	text := "there is no configuration file; the defaults, with flags and environment, are valid"
	if p.configFile != "" {
		text = p.configFile + ": the configuration is valid"
	}
	return View{Data: configResult{p.configFile, len(problems) == 0, problems}, Table: Table{Rows: [][]string{{text}}}}
}

// takeFile sets --config to the argument of `config validate`. It runs before the options are resolved, so that the
// file is treated like any other.
func (p *Program) takeFile(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) != 1:
		return OneFile(cmd, args)
	case cmd.Flags().Changed("config"):
		return fmt.Errorf("both --config %s and %s are given", p.configFile, args[0])
	}
	return cmd.Flags().Set("config", args[0])
}

// examples returns the examples of a verb that every program has.
func (p *Program) examples(lines ...string) string {
	return "  " + p.Name + " " + strings.Join(lines, "\n  "+p.Name+" ")
}

// OneFile is the argument check of a verb with an optional file.
var OneFile = Arguments("one file", 0, 1)
