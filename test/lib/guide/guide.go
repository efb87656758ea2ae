// Package guide reads the commands that the guides tell a user to copy, so that tests run them as they are written.
//
// Commands are in fenced blocks of the language sh. Other blocks are output, configuration or parts of it.
package guide

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/suite"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Names returns README.md and the guides in docs, as paths below the module's directory.
func Names(t testing.TB) []string {
	t.Helper()
	root, err := suite.Root()
	testenv.Must(t, err)
	files, err := filepath.Glob(filepath.Join(root, "docs/*.md"))
	testenv.Must(t, err)
	names := []string{"README.md"}
	for _, file := range files {
		name, err := filepath.Rel(root, file)
		testenv.Must(t, err)
		names = append(names, name)
	}
	return names
}

// Read returns the text of a document, whose name is a path below the module's directory.
func Read(t testing.TB, name string) string {
	t.Helper()
	root, err := suite.Root()
	testenv.Must(t, err)
	text, err := os.ReadFile(filepath.Join(root, name))
	testenv.Must(t, err)
	return string(text)
}

var commands = regexp.MustCompile("(?ms)^```sh\n(.*?)^```$")

// Blocks returns the blocks of commands in a document, for example of "docs/podman.md".
func Blocks(t testing.TB, name string) []string {
	t.Helper()
	var blocks []string
	for _, match := range commands.FindAllStringSubmatch(Read(t, name), -1) {
		blocks = append(blocks, match[1])
	}
	return blocks
}

// Under returns the blocks of commands of a section, which begins with a heading of the second level.
func Under(t testing.TB, name, heading string) []string {
	t.Helper()
	_, after, found := strings.Cut(Read(t, name), "\n## "+heading+"\n")
	if !found {
		t.Fatalf("%s has no section %q", name, heading)
	}
	section, _, _ := strings.Cut(after, "\n## ")
	var blocks []string
	for _, match := range commands.FindAllStringSubmatch(section, -1) {
		blocks = append(blocks, match[1])
	}
	return blocks
}

var manifests = regexp.MustCompile("(?ms)^```yaml\n(.*?)^```$")

// Manifests returns the blocks of YAML in a document.
func Manifests(t testing.TB, name string) []string {
	t.Helper()
	var blocks []string
	for _, match := range manifests.FindAllStringSubmatch(Read(t, name), -1) {
		blocks = append(blocks, match[1])
	}
	return blocks
}

// First returns the first block of commands in a document: what a user copies.
func First(t testing.TB, name string) string {
	t.Helper()
	blocks := Blocks(t, name)
	if len(blocks) == 0 {
		t.Fatalf("%s has no block of commands", name)
	}
	return blocks[0]
}

// BlocksByHeading returns the blocks of commands in a document, also those for cron, by the headings above them. A
// heading has one block at most.
func BlocksByHeading(t testing.TB, name string) map[string]string {
	t.Helper()
	blocks, heading := map[string]string{}, ""
	for _, match := range headingOrCommands.FindAllStringSubmatch(Read(t, name), -1) {
		switch {
		case match[1] != "":
			heading = match[1]
		case match[2] == "":
		case blocks[heading] != "":
			t.Errorf("%s has several blocks of commands under %q", name, heading)
		default:
			blocks[heading] = match[2]
		}
	}
	return blocks
}

// headingOrCommands matches blocks of other languages too: they can have lines that begin with #.
var headingOrCommands = regexp.MustCompile("(?ms)^#+ ([^\n]*)$|^```(?:sh|crontab)\n(.*?)^```$|^```[^\n]*\n.*?^```$")
