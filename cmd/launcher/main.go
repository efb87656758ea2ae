// Command launcher is the entry point of the container image. The programs of the image run on the host: containers'
// runtimes run prestart-hook there, and the paths in a CDI spec are those of the host. So the launcher puts them into a
// directory of the host and runs them in the host's root. It is static, since the image has no C library.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

const usage = `Usage: launcher [FLAG]... run ARG...
       launcher [FLAG]... remove
       launcher tmpfs DIR OPTIONS
       launcher wait

The entry point of the container image of gpu-cdi-plugin, as root in a container that has the host's root directory.

run     puts gpu-cdi-plugin and prestart-hook into --dir of the host, and becomes that gpu-cdi-plugin in the host's root
        with these arguments. A program is replaced by a rename, and only if it differs, so that containers can start
        meanwhile.
remove  removes the two programs from the host, and /var/lib/gpu-cdi-plugin and /run/gpu-cdi-plugin. What is mounted
        below them, as the shared memory of MPS, is unmounted, and keeps its files as long as containers have it. CDI
        specs and node labels stay: "launcher run cdi remove" removes them before. While engines are configured to run
        the hook it is an error: "launcher run hook uninstall" ends that. So it is, without --force, while there are
        records of prepared ResourceClaims: their pods could not end. What is not there is no error.
tmpfs   mounts a tmpfs with these options at a directory of the container, unless something is mounted there.
wait    waits until it gets SIGTERM.

Flags:
  --host DIR    the host's root directory in the container (default /host)
  --dir DIR     the directory of the programs on the host (default /var/lib/gpu-cdi-plugin/bin)
  --config DIR  a directory of the container whose file config.yaml is the configuration: adds --config to the
                arguments. A changed file is seen, also when the directory is a ConfigMap of Kubernetes
  --force       remove also if there are records of prepared ResourceClaims

EXIT STATUS
  0  done
  1  an error; a program that could not be replaced is still the old one
  2  wrong arguments
  run otherwise has the exit status of gpu-cdi-plugin
`

// version is set by the linker.
var version = "unknown"

// errUsage means that the arguments are wrong.
var errUsage = errors.New("wrong arguments")

func main() {
	err := run(os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, errUsage):
		fmt.Fprintf(os.Stderr, "launcher: %v\nlauncher: see launcher --help\n", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintf(os.Stderr, "launcher: %v\n", err)
		os.Exit(1)
	}
}

func run(args []string, stdout io.Writer) error {
	var l launcher
	flags := flag.NewFlagSet("launcher", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&l.host, "host", "/host", "")
	flags.StringVar(&l.dir, "dir", "/var/lib/gpu-cdi-plugin/bin", "")
	flags.StringVar(&l.config, "config", "", "")
	flags.BoolVar(&l.force, "force", false, "")
	showVersion := flags.Bool("version", false, "")
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(stdout, usage)
		return nil
	case err != nil:
		return fmt.Errorf("%w: %w", errUsage, err)
	case *showVersion:
		fmt.Fprintln(stdout, "launcher", version)
		return nil
	case flags.NArg() == 0:
		return fmt.Errorf("%w: want run, remove, tmpfs or wait", errUsage)
	}
	verb, rest := flags.Arg(0), flags.Args()[1:]
	switch {
	case verb == "run" && len(rest) > 0:
		return l.run(rest)
	case verb == "remove" && len(rest) == 0:
		return l.remove()
	case verb == "tmpfs" && len(rest) == 2:
		return mountTmpfs(rest[0], rest[1])
	case verb == "wait" && len(rest) == 0:
		stop := make(chan os.Signal, 1)
		signal.Notify(stop, unix.SIGTERM, unix.SIGINT)
		<-stop
		return nil
	}
	return fmt.Errorf("%w: want run ARGUMENT..., remove, tmpfs DIR OPTIONS or wait, got %q", errUsage, flags.Args())
}
