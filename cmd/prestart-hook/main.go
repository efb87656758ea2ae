// Command prestart-hook is an OCI hook that prepares a container's root for the GPUs that the container was given.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
)

const usage = `Usage: prestart-hook create-container [FLAG]...

An OCI hook for the createContainer stage. "gpu-cdi-plugin cdi generate" writes it, with its flags, into CDI specs.
Container runtimes run it with the OCI state on standard input. It is not meant to be run by hand.

It makes the links and the loader cache by which programs in the container find the driver's libraries. It never
runs another program, never leaves the container's root, and changes nothing that is right already.

Flags (paths are those in the container):
  --libraries=DIR:SONAME=FILE,...   driver libraries for the loader cache, which are mounted in DIR
  --link=PATH::TARGET               make a symbolic link
  --dri=PCI-ADDRESS/NODE,...        a GPU's nodes in /dev/dri, for the links in /dev/dri/by-path
  --driver-version=VERSION          of the host's driver, for CUDA forward compatibility
  --cuda-version=VERSION            of the host's driver; not used, the driver's version decides
  --mask-params                     show ModifyDeviceFiles: 0 in /proc/driver/nvidia/params
  --egl-profile                     limit EGL to the container's GPUs

  --help, --version

EXIT STATUS
  0  done; warnings are on standard error
  1  the container would not work: its root was not found, is not a mount point, or is in the host's mount namespace;
     its programs would not find the driver's libraries; or the hook took longer than 10 seconds
  2  wrong arguments
`

// version is set by the linker.
var version = "unknown"

// The exit statuses, as the usage lists them.
const (
	statusOK      = 0
	statusFailure = 1
	statusUsage   = 2
)

// deadline bounds the whole run, including the runtime's writing of the state. The hook takes milliseconds, but a file
// system of the container may never respond, and runtimes wait for a hook without a limit.
const deadline = 10 * time.Second

// heapLimit is in bytes. Below it no garbage is collected, since the process lives for milliseconds.
const heapLimit = 64 << 20

func main() {
	// If even the message about the deadline blocks.
	time.AfterFunc(deadline+time.Second, func() { os.Exit(statusFailure) })
	os.Exit(run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

func run(args []string, stdin *os.File, stdout, stderr io.Writer) int {
	// The environment may be the image's: runc passes the container's to hooks that have none of their own.
	os.Clearenv()
	unix.Umask(0o022)
	// A runtime that does not read warnings must not make the hook fail.
	signal.Ignore(unix.SIGPIPE)
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(heapLimit)
	if len(args) == 1 && (args[0] == "--help" || args[0] == "-h") {
		fmt.Fprint(stdout, usage)
		return statusOK
	}
	if len(args) == 1 && args[0] == "--version" {
		fmt.Fprintln(stdout, "prestart-hook", version)
		return statusOK
	}
	c, err := hookargs.Parse(args)
	if err == nil && isTerminal(stdin) {
		err = errors.New("standard input is a terminal, expected the OCI state from a container runtime")
	}
	if err != nil {
		report(stderr, err)
		fmt.Fprintln(stderr, `prestart-hook: this is an OCI hook for container runtimes; see "prestart-hook --help"`)
		return statusUsage
	}
	warnings, err := createContainer(c, stdin)
	for _, warning := range warnings {
		report(stderr, warning)
	}
	if err != nil {
		report(stderr, err)
		return statusFailure
	}
	return statusOK
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

func createContainer(c *hookargs.CreateContainer, stdin io.Reader) (warnings []error, err error) {
	end := time.After(deadline)
	state, err := within(end, "read the OCI state from standard input", func() (*hook.State, error) {
		return hook.ReadState(stdin)
	})
	if err != nil {
		return nil, err
	}
	h, err := host.New("/", "/", "/")
	if err != nil {
		return nil, err
	}
	return within(end, "prepare the container's root", func() ([]error, error) {
		return hook.CreateContainer(c, state, h)
	})
}

// within returns the result of act, or an error when end fires. It then abandons act, which ends with the process.
func within[T any](end <-chan time.Time, name string, act func() (T, error)) (result T, err error) {
	type outcome struct {
		result T
		err    error
	}
	done := make(chan outcome, 1)
	go func() {
		result, err := act()
		done <- outcome{result, err}
	}()
	select {
	case o := <-done:
		return o.result, o.err
	case <-end:
		return result, fmt.Errorf("%s: not done after %v, abandoned", name, deadline)
	}
}

// report writes a line for each problem in err.
func report(w io.Writer, err error) {
	for line := range strings.SplitSeq(strings.TrimSpace(err.Error()), "\n") {
		fmt.Fprintln(w, "prestart-hook:", line)
	}
}
