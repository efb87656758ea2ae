package wording

import (
	"errors"
	"strings"
	"testing"
)

func TestText(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"a short text":                 {"abc", "abc"},
		"as long as allowed":           {"abcdefgh", "abcdefgh"},
		"longer":                       {"abcdefghi", "abcde..."},
		"a character of several bytes": {"abcdäfghi", "abcd..."},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Shorten(c.text, 8); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestList(t *testing.T) {
	for name, c := range map[string]struct {
		items []int
		want  string
	}{
		"nothing":            {nil, ""},
		"as many as allowed": {[]int{1, 2}, "1, 2"},
		"more":               {[]int{1, 2, 3, 4}, "1, 2 and 2 more"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := ShortenList(c.items, 2, ", "); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestLimit(t *testing.T) {
	cause := errors.New("cause")
	long, many := strings.Repeat("x", 2000), strings.Repeat("a\n", 49)+"a"
	for name, c := range map[string]struct{ text, want string }{
		"a short error": {"one\ntwo", "one\ntwo"},
		"a long line":   {long, strings.Repeat("x", 997) + "..."},
		"20 lines":      {many[:39], many[:39]},
		"many lines":    {many, strings.Repeat("a\n", 20) + "and 30 more"},
	} {
		t.Run(name, func(t *testing.T) {
			err := Limit(&limited{c.text, cause})
			if err.Error() != c.want || !errors.Is(err, cause) {
				t.Errorf("got %q, want %q", err, c.want)
			}
		})
	}
	if err := Limit(nil); err != nil {
		t.Errorf("no error becomes %v", err)
	}
}
