// Command dist makes the parts of a release that need more than a compiler: the container image, and what a person must
// know of the modules that the programs consist of.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
)

const usage = `Usage: dist image --out FILE --version VERSION ARCH=DIR...
       dist sbom --out FILE --version VERSION PROGRAM...
       dist licences --out FILE PROGRAM...

image     writes an OCI archive that podman load and ctr images import take. It has an image for each architecture, with
          the files in DIR and nothing else; the file launcher is the entry point.
sbom      writes a CycloneDX list of the modules that the programs consist of.
licences  writes the licences of these modules, which must be in the module cache.

The time of all files is that of SOURCE_DATE_EPOCH, in seconds. Equal input gives equal output.
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
	out, version := flags.String("out", "", "`file` to write"), flags.String("version", "", "`version` of the release")
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
	}
	return fmt.Errorf("unknown verb %s; want image, sbom or licences", args[0])
}
