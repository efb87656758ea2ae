package wording

import "testing"

func TestVisible(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"letters of any language":       {"GPU ä 日本", "GPU ä 日本"},
		"lines":                         {"a\nb", "a\nb"},
		"an escape sequence":            {"\x1b[31mx\a", `\x1b[31mx\a`},
		"one of a single byte in 8 bit": {"\u009b31m", `\u009b31m`},
		"what turns the direction":      {"a\u202eb", `a\u202eb`},
		"a tab and a carriage return":   {"a\tb\r", `a\tb\r`},
		"bytes that are no text":        {"a\xffb", "a\ufffdb"},
		"a backslash stays as it is":    {`a\b`, `a\b`},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Visible(c.text); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}
