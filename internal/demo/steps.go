package demo

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// Steps prints what is done, each step as one line with its time.
type Steps struct {
	w     io.Writer
	now   func() time.Time
	start time.Time
	err   error // the first that printing met
}

// NewSteps starts the clock.
func NewSteps(w io.Writer) *Steps { return &Steps{w: w, now: time.Now, start: time.Now()} }

// Do does one step. What it returns is its result in a few words.
func (s *Steps) Do(name string, step func() (string, error)) error {
	begin := s.now()
	result, err := step()
	took := s.now().Sub(begin)
	if err != nil {
		result = "not done"
	}
	s.Say("%-10s %-89s %7.2f s", name, result, took.Seconds())
	return err
}

// Skip prints a step that cannot be done, and why.
func (s *Steps) Skip(name, reason string) { s.Say("%-10s skipped: %s", name, reason) }

// Show prints what a program said, set apart.
func (s *Steps) Show(output string) {
	for line := range strings.Lines(output) {
		s.Say("    | %s", strings.TrimRight(line, "\n"))
	}
}

// Say prints a line.
func (s *Steps) Say(format string, args ...any) {
	if _, err := fmt.Fprintf(s.w, format+"\n", args...); err != nil && s.err == nil {
		s.err = fmt.Errorf("print what is done: %w", err)
	}
}

// Err is the first error of printing. The steps are done all the same.
func (s *Steps) Err() error { return s.err }

// Elapsed is the time since the first step began.
func (s *Steps) Elapsed() time.Duration { return s.now().Sub(s.start) }
