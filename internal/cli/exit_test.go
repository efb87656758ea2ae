package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"testing"
)

func TestCodeAndHint(t *testing.T) {
	noDriver := With(NoDriver, "install one", fs.ErrNotExist)
	for name, c := range map[string]struct {
		err  error
		code Code
		hint string
	}{
		"no error":                      {nil, OK, ""},
		"an error without a status":     {fs.ErrNotExist, Failure, ""},
		"an error with status and hint": {noDriver, NoDriver, "install one"},
		"wrapped":                       {fmt.Errorf("list devices: %w", noDriver), NoDriver, "install one"},
		"joined with another":           {errors.Join(fs.ErrClosed, noDriver), NoDriver, "install one"},
		"the outer status counts":       {With(Partial, "", noDriver), Partial, ""},
		"interrupted":                   {fmt.Errorf("read: %w", context.Canceled), Interrupted, ""},
		"out of time":                   {context.DeadlineExceeded, Failure, ""},
		"interrupted, with a status":    {With(Unreachable, "", context.Canceled), Unreachable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := CodeOf(c.err); got != c.code {
				t.Errorf("status %d, want %d", got, c.code)
			}
			if got := HintOf(c.err); got != c.hint {
				t.Errorf("hint %q, want %q", got, c.hint)
			}
		})
	}
}

func TestWithKeepsTheError(t *testing.T) {
	err := With(NoGPU, "hint", fs.ErrNotExist)
	if !errors.Is(err, fs.ErrNotExist) || err.Error() != fs.ErrNotExist.Error() {
		t.Errorf("got %v, want the error itself, without the hint", err)
	}
	if err := With(NoGPU, "hint", nil); err != nil {
		t.Errorf("no error became %v", err)
	}
}

// The statuses are an interface that scripts rely on.
func TestStatuses(t *testing.T) {
	for code, want := range map[Code]int{
		OK: 0, Failure: 1, Usage: 2, Partial: 3, Differs: 4, NoDriver: 10, NoGPU: 11, Locked: 12, Unreachable: 13,
		Interrupted: 130,
	} {
		if int(code) != want {
			t.Errorf("status %d, want %d", code, want)
		}
	}
}
