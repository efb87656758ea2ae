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

// WriteReference writes a program's manual pages to dir/man1, and what shells complete to dir/bash, dir/zsh and
// dir/fish. It is not part of the programs: the build tag is that of a release (scripts/dist).
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

// WriteLink writes what WriteReference does for a link to the program by which it runs one of its verbs.
func WriteLink(p *Program, name, verb, dir string) error {
	page := fmt.Sprintf(".so man1/%s-%s.1\n", p.Name, verb)
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "man1", name+".1"), []byte(page), 0o644),
		writeCompletion(&cobra.Command{Use: name}, dir), // shells ask the program what to complete
	)
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
