package wording

import (
	"errors"
	"os/exec"
	"strings"
	"testing"
	"unicode/utf8"

	"gpu-cdi-plugin/test/lib/testenv"

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
	testenv.Must(t, err)
	if diff := cmp.Diff(words, strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestSplit(t *testing.T) {
	for line, want := range map[string][]string{
		"":                   nil,
		" a  b\tc ":          {"a", "b", "c"},
		`a 'b c' "d e" f\ g`: {"a", "b c", "d e", "f g"},
		`'' ""`:              {"", ""},
		`a'b'"c"`:            {"abc"},
		`"\"\\\n$x" '\'`:     {`"\\n$x`, `\`},
		`$HOME *`:            {"$HOME", "*"},
		`--dir={dir}/x`:      {"--dir={dir}/x"},
	} {
		got, err := Split(line)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%q: %v (-want +got):\n%s", line, err, diff)
		}
	}
	for _, line := range []string{`'a`, `"a`, `a\`} {
		if words, err := Split(line); !errors.Is(err, ErrQuotes) || words != nil {
			t.Errorf("%q: %q, %v", line, words, err)
		}
	}
}

// Split returns the words that Line has quoted.
func FuzzSplit(f *testing.F) {
	f.Add("a b", "'\"\\")
	f.Fuzz(func(t *testing.T, a, b string) {
		if !utf8.ValidString(a) || !utf8.ValidString(b) {
			t.Skip()
		}
		got, err := Split(Line([]string{a, b}))
		if diff := cmp.Diff([]string{a, b}, got); diff != "" || err != nil {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
		if words, err := Split(a); err != nil && words != nil {
			t.Errorf("%q: both %q and %v", a, words, err)
		}
	})
}
