package wording

import (
	"errors"
	"fmt"
	"io/fs"
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

func TestProblems(t *testing.T) {
	one, two, broken := errors.New("one"), errors.New("two"), errors.New("a\nb\r\nc")
	joined := errors.Join(one, two)
	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"one error":                 {one, "one"},
		"joined errors":             {joined, "one|two"},
		"joined errors in a join":   {errors.Join(joined, one), "one|two|one"},
		"joined errors in an error": {fmt.Errorf("a\nb: %w in c", joined), "a b: one|two in c"},
		"an error that wraps two":   {fmt.Errorf("%w: %w", one, joined), "one: one|two"},
		"a line break in an error":  {errors.Join(broken, one), "a b c|one"},
		"one in a wrapped error":    {fmt.Errorf("open: %w", broken), "open: a b c"},
		"a line break in a path": {
			&fs.PathError{Op: "open", Path: "a\nb", Err: fs.ErrNotExist}, "open a b: file does not exist",
		},
		"a limited error": {
			fmt.Errorf("x: %w", Limit(errors.Join(errors.New(strings.Repeat("y", 2000)), one))),
			"x: " + strings.Repeat("y", 997) + "...|one",
		},
		"a text that is not that of what is wrapped": {&status{joined}, "a status"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := strings.Join(Problems(c.err), "|"); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// status is an error with a text of its own.
type status struct{ error }

func (*status) Error() string { return "a\nstatus" }

func (s *status) Unwrap() error { return s.error }

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
