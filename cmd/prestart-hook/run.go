package main

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook"
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
)

const usage = `Usage: prestart-hook create-container [FLAG]...

An OCI hook for createContainer. "gpu-cdi-plugin cdi generate" writes it, with its flags, into CDI specs, and
container runtimes start it with the OCI state on standard input. There is no use in starting it by hand.

It makes the links and the loader cache by which programs in the container find the driver's libraries. It never
starts another program, never leaves the container's root, and changes nothing that is right already.

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
  0  done; what could not be done, and the container can do without, is on standard error
  1  the container would not work: its root was not found, is no mount point, or is in the host's mount namespace;
     its programs would not find the driver's libraries; or it took longer than 10 seconds
  2  wrong arguments
`

// deadline is how long the whole hook may take, the runtime's writing of the state included. A hook takes milliseconds;
// runtimes wait for one without a limit of their own, and a file system of the container may never answer.
const deadline = 10 * time.Second

// heapLimit is in bytes. A hook lives for milliseconds: below the limit no garbage is collected.
const heapLimit = 64 << 20

func run(args []string, stdin *os.File, stdout, stderr io.Writer) exit.Code {
	// The environment may be the container's (runc passes it to hooks without one of their own).
	os.Clearenv()
	unix.Umask(0o022)
	// A message that nobody reads must not cost the container.
	signal.Ignore(unix.SIGPIPE)
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(heapLimit)
	if len(args) == 1 && (args[0] == "--help" || args[0] == "-h") {
		fmt.Fprint(stdout, usage)
		return exit.OK
	}
	if len(args) == 1 && args[0] == "--version" {
		fmt.Fprintln(stdout, "prestart-hook", version)
		return exit.OK
	}
	c, err := hookargs.Parse(args)
	if err != nil {
		report(stderr, err)
		fmt.Fprintln(stderr, `prestart-hook: this is an OCI hook for container runtimes; see "prestart-hook --help"`)
		return exit.Usage
	}
	notes, err := createContainer(c, stdin)
	for _, note := range notes {
		report(stderr, note)
	}
	if err != nil {
		report(stderr, err)
	}
	return exit.CodeOf(err)
}

func createContainer(c *hookargs.CreateContainer, stdin *os.File) ([]error, error) {
	if _, err := unix.IoctlGetTermios(int(stdin.Fd()), unix.TCGETS); err == nil {
		err := fmt.Errorf("standard input is a terminal, but a container runtime writes the OCI state there")
		return nil, exit.With(exit.Usage, "", err)
	}
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

// within returns what act returns, or an error at the end of the time. Then act is left where it waits, until the
// process ends.
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
		return result, fmt.Errorf("%s: not done after %v, given up", name, deadline)
	}
}

// report writes one line for each problem in err.
func report(w io.Writer, err error) {
	for line := range strings.SplitSeq(strings.TrimSpace(err.Error()), "\n") {
		fmt.Fprintln(w, "prestart-hook:", line)
	}
}
