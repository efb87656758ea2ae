//go:build reference

package cli

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// WriteReference writes the manual pages of a command and its verbs to dir/man1, and what shells complete to dir/bash,
// dir/zsh and dir/fish. It is not part of the programs: the build tag is that of a release (scripts/dist).
func WriteReference(p *Program, root *cobra.Command, dir string) error {
	addStatuses(root, p.Statuses)
	root.DisableAutoGenTag = true
	date := time.Unix(0, 0).UTC()
	header := &doc.GenManHeader{Section: "1", Source: p.Name, Manual: "User Commands", Date: &date}
	for _, sub := range []string{"man1", "bash", "zsh", "fish"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return fmt.Errorf("make a directory for the reference: %w", err)
		}
	}
	return errors.Join(doc.GenManTree(root, header, filepath.Join(dir, "man1")), writeCompletion(root, dir))
}

// WriteConfigPage writes the manual page of a program's configuration file: the file with all keys and their comments.
func WriteConfigPage(p *Program, dir string) error {
	text, err := p.Keys.Document(p.Default)
	if err != nil {
		return err
	}
	return WritePage(dir, p.Name, 5, "configuration file of "+p.Name, p.ConfigFile+"\n\n"+string(text))
}

// WritePage writes a manual page with a text that already has its lines.
func WritePage(dir, name string, section int, title, text string) error {
	roff := strings.NewReplacer(`\`, `\e`, "-", `\-`, "\n", "\n\\&") // what begins a line is no request then
	page := fmt.Sprintf(".TH %q %d\n.SH NAME\n%s \\- %s\n.SH DESCRIPTION\n.nf\n\\&%s\n.fi\n",
		strings.ToUpper(name), section, roff.Replace(name), roff.Replace(title), roff.Replace(strings.TrimSpace(text)))
	path := filepath.Join(dir, fmt.Sprintf("man%d", section), fmt.Sprintf("%s.%d", name, section))
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("make a directory for the reference: %w", err)
	}
	return os.WriteFile(path, []byte(page), 0o644)
}

func writeCompletion(root *cobra.Command, dir string) error {
	name := root.Name()
	return errors.Join(
		root.GenBashCompletionFileV2(filepath.Join(dir, "bash", name), true),
		root.GenZshCompletionFile(filepath.Join(dir, "zsh", "_"+name)),
		root.GenFishCompletionFile(filepath.Join(dir, "fish", name+".fish"), true),
	)
}

// addStatuses adds the exit statuses to the descriptions, as in the help.
func addStatuses(cmd *cobra.Command, meanings map[Code]string) {
	var b strings.Builder
	b.WriteString(strings.TrimSpace(cmp.Or(cmd.Long, cmd.Short)) + "\n\n# EXIT STATUS\n")
	for s := range strings.FieldsSeq(cmp.Or(cmd.Annotations[statusKey], "0 1 2")) {
		n, _ := strconv.Atoi(s)
		fmt.Fprintf(&b, "**%d** %s\n\n", n, meanings[Code(n)])
	}
	cmd.Long = b.String()
	for _, verb := range cmd.Commands() {
		addStatuses(verb, meanings)
	}
}
