package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/wording"
)

// waitLine says why a request waits: on a terminal in one line that is overwritten, elsewhere in a line for each
// change.
type waitLine struct {
	w        io.Writer
	terminal *os.File // nil if w is none that can overwrite a line
	shown    bool
}

// newWaitLine returns a line for stderr.
func (a *app) newWaitLine() *waitLine {
	l := &waitLine{w: a.Stderr}
	if f, ok := a.Stderr.(*os.File); ok && !slices.Contains(a.Env, "TERM=dumb") {
		l.terminal = f
	}
	return l
}

// overwrite moves a terminal's cursor to the begin of the line, and clears it.
const overwrite = "\r\x1b[K"

func (l *waitLine) show(text string) {
	text = wording.Visible(strings.ReplaceAll(text, "\n", "; "))
	columns := l.columns()
	if columns == 0 {
		fmt.Fprintln(l.w, text)
		return
	}
	fmt.Fprint(l.w, overwrite, wording.Shorten(text, columns))
	l.shown = true
}

// clear removes the line from a terminal, before something else is printed.
func (l *waitLine) clear() {
	if l.shown {
		fmt.Fprint(l.w, overwrite)
	}
	l.shown = false
}

// columns returns how long a line of the terminal can be, which the user can change, or 0 if it is no terminal.
func (l *waitLine) columns() int {
	if l.terminal == nil {
		return 0
	}
	size, err := unix.IoctlGetWinsize(int(l.terminal.Fd()), unix.TIOCGWINSZ)
	switch {
	case err != nil:
		return 0
	case size.Col == 0: // unknown, as of serial lines
		return 79
	}
	return max(int(size.Col)-1, 10) // the last column may move the cursor to the next line
}
