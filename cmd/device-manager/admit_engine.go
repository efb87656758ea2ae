package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/manager/arguments"
	"gpu-cdi-plugin/manager/model"
)

// errNeedsQuotes means that a shell would split an argument, or expand it to names of files.
var errNeedsQuotes = errors.New("it has a blank, a line break or one of *?[, so $(...) would not pass it on as it is")

// printArguments prints run options as one line of arguments for a container engine: for $(...), or quoted for eval.
// The values come from plugins: in $(...), a value with blanks would become several arguments, such as --privileged.
func (a *app) printArguments(engine string, run model.RunOptions, quote bool) error {
	args, err := arguments.For(engine, run)
	if err != nil {
		return err
	}
	line := wording.Line(args)
	if !quote {
		line = strings.Join(args, " ")
	}
	for _, arg := range args {
		if !quote && strings.ContainsAny(arg, " \t\r\n\v\f*?[") {
			hint := `use --quote with eval: eval "` + engine + ` run $(device-manager admit --quote ...) IMAGE"`
			return cli.With(cli.Failure, hint,
				fmt.Errorf("argument %q: %w", wording.Shorten(arg, maxShown), errNeedsQuotes))
		}
	}
	_, err = fmt.Fprintln(a.Stdout, line)
	return err
}

// maxShown is how many bytes of an argument a message quotes.
const maxShown = 100

// injectRunOptions adds a container's run options to a bundle. It adds the CDI devices that plugins return, by their
// names or in annotations for engines.
func (a *app) injectRunOptions(bundle string, run model.RunOptions) error {
	names := slices.Clone(run.CDIDevices)
	keys, annotated, err := cdilib.ParseAnnotations(run.Annotations)
	if err != nil {
		return fmt.Errorf("read the annotations of the run options: %w", err)
	}
	for _, name := range annotated {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	edits, err := arguments.Edits(run)
	if err != nil {
		return err
	}
	more := cdi.Additions{Edits: *edits, Annotations: maps.Clone(run.Annotations)}
	for _, key := range keys {
		delete(more.Annotations, key)
	}
	dirs := cdi.Dirs(a.Root, a.CDIDir)
	trusted := func(path string) error { return a.CheckPath(trust.File, path) }
	if err := cdi.Load(dirs...).CheckTrust(names, trusted); err != nil {
		return err
	}
	_, err = cdi.Inject(bundle, names, more, dirs...)
	if errors.Is(err, cdi.ErrNoConfig) {
		err = cli.With(cli.Failure, "runc spec --bundle "+wording.Quote(bundle)+" makes one", err)
	}
	return err
}
