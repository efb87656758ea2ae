// Command dist makes the parts of a release that need more than a compiler: the container image, what a person must
// know of the modules that the programs consist of, and the layouts from which image and chart are published.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const usage = `Usage: dist image --out FILE --version VERSION ARCH=DIR...
       dist sbom --out FILE --version VERSION PROGRAM...
       dist licences --out FILE PROGRAM...
       dist layout --out DIR --version VERSION IMAGE CHART
       dist exchange --out DIR NEW

image     writes an OCI archive that podman load and ctr images import take. It has an image for each architecture, with
          the files in DIR and nothing else; the file launcher is the entry point.
sbom      writes a CycloneDX list of the modules that the programs consist of.
licences  writes the licences of these modules, which must be in the module cache.
layout    adds an image that this program wrote to the OCI layout DIR/image, and a packaged chart to DIR/chart.
exchange  puts NEW in the place of DIR at once. NEW then has what DIR had.

Images and lists have the time SOURCE_DATE_EPOCH, in seconds. Equal input gives equal output.
`

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "dist: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string, stdout io.Writer) error {
	if len(args) == 0 || args[0] == "--help" {
		fmt.Fprint(stdout, usage)
		return nil
	}
	flags := flag.NewFlagSet(args[0], flag.ContinueOnError)
	out := flags.String("out", "", "`file` or directory to write")
	version := flags.String("version", "", "`version` of the release")
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	if *out == "" || flags.NArg() == 0 {
		return errors.New("want --out and arguments; see dist --help")
	}
	switch args[0] {
	case "image":
		return writeImage(*out, *version, flags.Args())
	case "sbom":
		return writeSBOM(*out, *version, flags.Args())
	case "licences":
		return writeLicences(*out, flags.Args())
	case "layout":
		if flags.NArg() != 2 {
			return errors.New("want IMAGE and CHART; see dist --help")
		}
		return addToLayouts(*out, *version, flags.Arg(0), flags.Arg(1))
	case "exchange":
		if err := unix.Renameat2(unix.AT_FDCWD, flags.Arg(0), unix.AT_FDCWD, *out, unix.RENAME_EXCHANGE); err != nil {
			return fmt.Errorf("exchange %s and %s: %w", *out, flags.Arg(0), err)
		}
		return nil
	}
	return fmt.Errorf("unknown verb %s; see dist --help", args[0])
}
