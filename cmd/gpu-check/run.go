package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"gpu-cdi-plugin/internal/cli"
)

// options are the command line.
type options struct {
	bin, runc, root, report string
}

func parseOptions(args []string, stderr io.Writer) (o options, err error) {
	f := flag.NewFlagSet("gpu-check", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.StringVar(&o.bin, "bin", "bin", "`directory` of gpu-cdi-plugin and prestart-hook")
	f.StringVar(&o.runc, "runc", "", "`path` of runc (default peers/runc in --bin)")
	f.StringVar(&o.root, "root", "/", "`directory` that the node is under; other than / for a simulated one")
	f.StringVar(&o.report, "report", "", "`file` to append a section to (default none)")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if o.runc == "" {
		o.runc = filepath.Join(o.bin, "peers/runc")
	}
	for _, p := range []*string{&o.bin, &o.runc, &o.root} {
		if *p, err = filepath.Abs(*p); err != nil {
			return o, err
		}
	}
	return o, nil
}

// run is the whole program: main without the process.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) cli.Code {
	o, err := parseOptions(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return cli.OK
	}
	if err != nil {
		fmt.Fprintln(stderr, "gpu-check:", err)
		return cli.Usage
	}
	if err := runChecks(ctx, o, stdout); err != nil {
		fmt.Fprintln(stderr, "gpu-check:", err)
		return cli.CodeOf(err)
	}
	return cli.OK
}

// runChecks runs every step, prints a line for each, and appends to the report. Without a driver or a GPU it does
// neither.
func runChecks(ctx context.Context, o options, w io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "gpu-check-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	c := &checker{options: o, dir: dir}
	if err := c.findGPUs(ctx); err != nil {
		return err
	}
	var done []outcome
	for _, s := range steps {
		start := time.Now()
		saw, err := s.run(c, ctx)
		saw = strings.ReplaceAll(saw, c.specFile(), "the spec")
		out := outcome{step: s.name, saw: saw, err: err, took: time.Since(start)}
		fmt.Fprintf(w, "%-13s %-50s %7s  %s\n", out.result(), out.step, round(out.took), firstLine(out.detail()))
		done = append(done, out)
	}
	if o.report != "" {
		if err := appendReport(o.report, c.section(ctx, time.Now(), done)); err != nil {
			return err
		}
		fmt.Fprintf(w, "written to %s\n", o.report)
	}
	return failures(done)
}

func failures(done []outcome) error {
	var errs []error
	for _, o := range done {
		if o.result() == failed {
			errs = append(errs, fmt.Errorf("%s: %w", o.step, o.err))
		}
	}
	return errors.Join(errs...)
}
