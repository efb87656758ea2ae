package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"gpu-cdi-plugin/hook/inject"
	"gpu-cdi-plugin/internal/wording"
)

// problems reports the problems of a run of the hook: on standard error, which engines may not show, and in the log
// that the policy names.
type problems struct {
	in     inject.Injector
	stderr io.Writer
	// position is the position of the hook, and container the ID, if known.
	position, container string
}

// logTime is how long writing to the log may take. A file system or a daemon may not respond.
const logTime = 500 * time.Millisecond

// report writes a line for each problem in err. If the log cannot be written, the container starts all the same.
func (p *problems) report(level inject.Level, err error) {
	for line := range strings.SplitSeq(strings.TrimSpace(err.Error()), "\n") {
		fmt.Fprintf(p.stderr, "%s: %s\n", hookName, wording.Visible(line))
	}
	if err := p.log(level, err); err != nil {
		fmt.Fprintf(p.stderr, "%s: %s\n", hookName, err)
	}
}

// log writes a line to the log that the policy names. It reads the policy file only now to find the log, so that a run
// without problems need not.
func (p *problems) log(level inject.Level, problem error) error {
	done := make(chan error, 1)
	go func() { done <- p.in.Log(level, p.position, p.container, oneLine(problem)) }()
	select {
	case err := <-done:
		return err
	case <-time.After(logTime):
		return fmt.Errorf("write to the log: not done after %v", logTime)
	}
}

// maxLine bounds a message in one line, in bytes. Engines show only one line.
const maxLine = 2000

// oneLine formats an error in one line, without control characters of an image.
func oneLine(err error) error {
	text := strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; ")
	return errors.New(wording.Shorten(wording.Visible(text), maxLine))
}
