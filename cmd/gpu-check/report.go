package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"gpu-cdi-plugin/test/lib/proc"
)

// The results of a step.
const (
	right       = "ok"
	failed      = "FAILED"
	notPossible = "not possible"
)

// unavailable is the reason why a step is not possible on this machine. It is no failure.
type unavailable struct{ reason string }

func (u *unavailable) Error() string { return u.reason }

// outcome is the result of a step.
type outcome struct {
	step, saw string
	err       error
	took      time.Duration
}

func (o *outcome) result() string {
	if _, ok := errors.AsType[*unavailable](o.err); ok {
		return notPossible
	}
	if o.err != nil {
		return failed
	}
	return right
}

// detail returns what the step saw, or its error.
func (o *outcome) detail() string {
	if o.err != nil {
		return o.err.Error()
	}
	return o.saw
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

func round(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

const heading = `# Seen on real hardware

Each section is the result of one run of ` + "`make gpu-check`" + `: the GPU and the driver, and each step from the
driver to a program in a container. Hardware without a section has not been tried.
`

// section is the report of one run, in Markdown.
func (c *checker) section(ctx context.Context, now time.Time, done []outcome) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n## %s: %d × %s, driver %s\n\n",
		now.Format(time.DateOnly), len(c.gpus.Devices), c.gpus.Devices[0].Name, c.gpus.DriverVersion)
	kernel, _, _ := strings.Cut(version(ctx, "uname", "-r"), "-")
	fmt.Fprintf(&b, "CUDA %s, Linux %s, %s, gpu-cdi-plugin %s.", c.gpus.CUDAVersion, kernel,
		version(ctx, c.runc, "--version"), version(ctx, c.program("gpu-cdi-plugin"), "version", "-o", "name"))
	if c.root != "/" {
		fmt.Fprintf(&b, " The node is under %s: a simulated one, or the root of a driver container.", c.root)
	}
	b.WriteString("\n\n")
	b.WriteString("| step | result | time | seen |\n|---|---|---|---|\n")
	for _, o := range done {
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", o.step, o.result(), round(o.took), cell(o.detail()))
	}
	return b.String()
}

// cell returns text for a cell of a Markdown table.
func cell(s string) string {
	s = strings.ReplaceAll(strings.TrimSpace(s), "|", `\|`)
	return strings.ReplaceAll(s, "\n", "<br>")
}

// version is the first line of a program's output.
func version(ctx context.Context, args ...string) string {
	out, err := proc.Output(ctx, args...)
	if err != nil {
		return args[0] + " of unknown version"
	}
	return strings.TrimSpace(firstLine(out))
}

func appendReport(path, section string) (err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	if info.Size() == 0 {
		section = heading + section
	}
	if _, err := f.WriteString(section); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}
