package shellword

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestQuote(t *testing.T) {
	for text, want := range map[string]string{
		"": "''", "a": "a", "--env=A=b,c:d@e%": "--env=A=b,c:d@e%", "a b": "'a b'", "it's": `'it'\''s'`, "~": "'~'",
		"$(x)": "'$(x)'", "a\nb": "'a\nb'", "#": "'#'", "é": "'é'", "*": "'*'", "!": "'!'",
	} {
		if got := Quote(text); got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
}

// A shell reads the words of a line as they were.
func TestLineInAShell(t *testing.T) {
	words := []string{
		"", "--", "-n", "a b", "'", `"`, `\`, "a\nb\n", "\t", "$HOME", "`id`", "$(id)", "*", "~", "#x", "a;b", "a&b", "|",
		"<x", "!", "é\u2028", "\xff\x01", "a=b", "{a,b}", "[a]", "?",
	}
	out, err := exec.Command("sh", "-c", `printf '%s\0' `+Line(words)).Output()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(words, strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}
