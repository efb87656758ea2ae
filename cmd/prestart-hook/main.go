// Command prestart-hook is an OCI hook that prepares a container's root for the GPUs that the container gets. For
// runtimes without CDI it also gives containers the devices that their annotations name: as a precreate hook, as a
// createRuntime hook, or under the name gpu-cdi-runtime, as a program that adds the devices and then runs the runtime.
// In a container it can check what the container was given.
package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook"
	"gpu-cdi-plugin/hook/inject"
	"gpu-cdi-plugin/internal/hookargs"
	"gpu-cdi-plugin/internal/host"
)

const usage = `Usage: prestart-hook create-container [FLAG]...
       prestart-hook precreate
       prestart-hook create-runtime
       prestart-hook check [-o table|json]
       gpu-cdi-runtime [RUNTIME OPTION]... VERB [OPTION]...

An OCI hook. Runtimes and engines run it, in one of four positions. Only check is meant to be run by hand.

create-container, a hook of the createContainer stage with the OCI state on standard input. "gpu-cdi-plugin cdi
generate" writes it, with its flags, into CDI specs. It makes the links and the loader cache by which programs in the
container find the driver's libraries. It never runs another program, never leaves the container's root, and changes
nothing that is already right. Flags (paths are those in the container):
  --libraries=DIR:SONAME=FILE,...   driver libraries for the loader cache, which are mounted in DIR
  --link=PATH::TARGET               make a symbolic link
  --dri=PCI-ADDRESS/NODE,...        a GPU's nodes in /dev/dri, for the links in /dev/dri/by-path
  --driver-version=VERSION          of the host's driver, for CUDA forward compatibility
  --cuda-version=VERSION            of the host's driver; not used, the driver's version decides
  --mask-params                     show ModifyDeviceFiles: 0 in /proc/driver/nvidia/params
  --egl-profile                     limit EGL to the container's GPUs

precreate, a hook of the precreate stage of podman: config.json on standard input, and on standard output the
same with the devices that its annotations name.

create-runtime, a hook of the createRuntime stage, or of the deprecated prestart stage, with the OCI state on standard
input. It gives the created container the devices that the annotations of the bundle's config.json name: rules of the
device cgroup, device nodes, mounts, and the work of create-container. It gives all or nothing. Variables of the specs
cannot be given then, so use one of the other two positions where you can. It needs Linux 5.12.

gpu-cdi-runtime, this program under that name or gpu-cdi-runtime-ENGINE, in front of runc or crun: for "create" and
"run" it puts the devices that the annotations name into the bundle's config.json. Then, and for every other verb at
once, it becomes the runtime, with the same arguments, environment and files.

check, in a container, says why a GPU is not there: it opens NVIDIA's device nodes and searches for the driver's
libraries like the loader, and compares that with what the container was given. It needs nothing of the image:
  podman run --device nvidia.com/gpu=all -v /usr/libexec/gpu-cdi-plugin/prestart-hook:/hook:ro IMAGE /hook check

An annotation whose key begins with cdi.k8s.io/ has qualified names of CDI devices, separated by commas:
  cdi.k8s.io/gpu: nvidia.com/gpu=0,nvidia.com/gpu=1
The specs are those in /etc/cdi and /var/run/cdi. Variables such as NVIDIA_VISIBLE_DEVICES have no effect. A container
without such an annotation stays as it is.

POLICY
  /etc/gpu-cdi-plugin/hook.yaml, which only root can change. It need not exist. Keys:
  kinds      list of the CDI kinds that annotations may name; without it, those whose specs gpu-cdi-plugin wrote
  devices    list of the qualified names that annotations may name; without it, all of the kinds
  allocated  true: only devices that the kubelet gave the container, as "gpu-cdi-plugin serve" reports
  rules      list of rules; with it, a device needs one that allows it. A rule has the three keys above and conditions:
             annotations (keys with patterns of values), user-namespace (true or false), bundle-owner (user IDs)
  runtime    path of the runtime behind gpu-cdi-runtime; without it, the engine's default, which "gpu-cdi-plugin hook
             install" wrote to /etc/gpu-cdi-plugin/runtime-ENGINE.yaml for gpu-cdi-runtime-ENGINE, or else the first
             runc or else crun in PATH and the standard directories
  log        path of a file, or syslog, for errors and warnings; without it, they are only on standard error

  --help, --version

EXIT STATUS
  0  done; warnings are on standard error
  1  create-container: the container would not work: its root was not found, is not a mount point, or is in the host's
     mount namespace; or its programs would not find the driver's libraries
     precreate, create-runtime, gpu-cdi-runtime: an annotated device cannot be given, or may not be; nothing was
     changed, or the changes were reverted
     every position: it took longer than 10 seconds
  2  wrong arguments
  4  check: the container cannot use what it was given, or was given no GPU
  gpu-cdi-runtime otherwise has the exit status of the runtime
`

// The names of this program.
const (
	hookName    = "prestart-hook"
	runtimeName = "gpu-cdi-runtime"
)

// version is set by the linker.
var version = "unknown"

// The exit statuses, as the usage lists them.
const (
	statusOK      = 0
	statusFailure = 1
	statusUsage   = 2
)

// deadline bounds the whole run, including the time in which the runtime writes the OCI state. The hook takes
// milliseconds, but a file system of the container may never respond, and runtimes wait for a hook without a limit.
const deadline = 10 * time.Second

// heapLimit is in bytes. No garbage is collected before the heap reaches it, since the process runs only for
// milliseconds.
const heapLimit = 64 << 20

func main() {
	// The process must also end if writing the message about the deadline blocks. The live position writes its message
	// earlier.
	last := deadline + time.Second
	if len(os.Args) > 1 && isLive(os.Args[1:]) {
		last = deadline
	}
	time.AfterFunc(last, func() { os.Exit(statusFailure) })
	in := inject.Injector{
		PolicyFile:   "/etc/gpu-cdi-plugin/hook.yaml",
		CDIDirs:      []string{"/etc/cdi", "/var/run/cdi"}, // like engines
		RuntimeDir:   "/run/gpu-cdi-plugin",
		PodLogs:      "/var/log/pods",
		SyslogSocket: "/dev/log",
	}
	os.Exit(run(in, os.Args, os.Stdin, os.Stdout, os.Stderr))
}

// run selects the position of the hook. The first argument is the program's name.
func run(in inject.Injector, args []string, stdin *os.File, stdout, stderr io.Writer) int {
	if isRuntime(args) {
		in.EngineFile = engineFile(in, args[0])
		return runRuntime(in, args[1:], stderr)
	}
	return runHook(in, args[1:], stdin, stdout, stderr)
}

func runHook(in inject.Injector, args []string, stdin *os.File, stdout, stderr io.Writer) int {
	// The environment may be the image's: if a hook has no environment of its own, runc passes the container's.
	os.Clearenv()
	unix.Umask(0o022)
	// If a runtime does not read warnings, that must not make the hook fail.
	signal.Ignore(unix.SIGPIPE)
	if wantsHelp(args) {
		fmt.Fprint(stdout, usage)
		return statusOK
	}
	if len(args) == 1 && args[0] == "--version" {
		fmt.Fprintln(stdout, hookName, version)
		return statusOK
	}
	if isCheck(args) {
		return runCheck(args, "/", stdout, stderr)
	}
	verb := ""
	if len(args) > 0 && (args[0] == "precreate" || isLive(args)) {
		verb = args[0]
	}
	var c *hookargs.CreateContainer
	var err error
	switch {
	case verb == "":
		c, err = hookargs.Parse(args)
	case len(args) > 1:
		err = fmt.Errorf("%s has no arguments", verb)
	}
	if err == nil && isTerminal(stdin) {
		err = errors.New("standard input is a terminal, expected JSON from a container runtime")
	}
	problems := &problems{in: in, stderr: stderr, position: cmp.Or(verb, "create-container")}
	if err != nil {
		problems.report(inject.Error, err)
		fmt.Fprintln(stderr, `prestart-hook: this is an OCI hook for container runtimes; see "prestart-hook --help"`)
		return statusUsage
	}
	switch {
	case verb == "":
		err = createContainer(c, stdin, problems)
	case isLive(args):
		err = createRuntime(in, stdin, problems)
	default:
		err = precreate(in, stdin, stdout, problems)
	}
	if err != nil {
		problems.report(inject.Error, err)
		return statusFailure
	}
	return statusOK
}

// wantsHelp reports whether the arguments are --help, also after a position.
func wantsHelp(args []string) bool {
	return len(args) == 1 && isHelp(args[0]) || len(args) == 2 && isHelp(args[1])
}

func isHelp(arg string) bool { return arg == "--help" || arg == "-h" }

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

func createContainer(c *hookargs.CreateContainer, stdin io.Reader, problems *problems) error {
	debug.SetGCPercent(-1)
	debug.SetMemoryLimit(heapLimit)
	end := time.After(deadline)
	state, err := within(end, "read the OCI state from standard input", func() (*hook.State, error) {
		return hook.ReadState(stdin)
	})
	if err != nil {
		return err
	}
	problems.container = state.ID
	h, err := host.New("/", "/", "/")
	if err != nil {
		return err
	}
	warnings, err := within(end, "prepare the container's root", func() ([]error, error) {
		return hook.CreateContainer(c, state, h)
	})
	for _, warning := range warnings {
		problems.report(inject.Warning, warning)
	}
	return err
}

// maxConfig bounds the config.json that a precreate hook reads, in bytes. runc has no limit.
const maxConfig = 64 << 20

// precreate copies a config.json, and adds the devices that the annotations in it name. After an error it has written
// nothing.
func precreate(in inject.Injector, stdin io.Reader, stdout io.Writer, problems *problems) error {
	end := time.After(deadline)
	config, err := within(end, "read it", func() ([]byte, error) {
		data, err := io.ReadAll(io.LimitReader(stdin, maxConfig+1))
		if err != nil {
			return nil, err
		}
		if len(data) > maxConfig {
			return nil, fmt.Errorf("larger than %d bytes", maxConfig)
		}
		return data, nil
	})
	if err != nil {
		return fmt.Errorf("config.json on standard input: %w", err)
	}
	changed, err := within(end, "put devices into it", func() ([]byte, error) { return in.Config(config) })
	if err != nil {
		problems.container = inject.PodmanID(config)
		return fmt.Errorf("config.json on standard input: %w", oneLine(err))
	}
	if changed != nil {
		config = changed
	}
	_, err = within(end, "write config.json to standard output", func() (int, error) { return stdout.Write(config) })
	return err
}

// within returns the result of act. When `end` fires, it returns an error instead and abandons act, which ends with
// the process.
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
