package kubenode

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/proc"
)

// setup is run by the first process of the namespaces. Its arguments are their directory, and the script that sets up
// their network, with its arguments. It mounts directories and files of its own over what programs would change on the
// machine, and over the kernel settings that a kubelet requires. Mounts propagate to pods that request it, as on a node
// with systemd. When its input ends it exits, and all processes in the namespaces with it. -n keeps the first mounts
// out of the machine's /run/mount.
const setup = `
set -e
dir=$1 network=$2
shift 2
mount -n --make-rprivate /
ip link set lo up
eval "$network"
mount -n --bind "$dir/run" /run
mount -t proc proc /proc
for f in vm/overcommit_memory:1 vm/panic_on_oom:0 kernel/panic:10 kernel/panic_on_oops:1 \
	kernel/keys/root_maxkeys:1000000 kernel/keys/root_maxbytes:25000000; do
	file=$dir/sysctl/$(echo ${f%:*} | tr / .)
	echo ${f#*:} >"$file"
	if [ -e /proc/sys/${f%:*} ]; then mount --bind "$file" /proc/sys/${f%:*}; fi
done
for d in cdi cni containerd nri; do
	if [ -d /etc/$d ]; then mount -t tmpfs tmpfs /etc/$d; fi
done
mount --bind "$dir/log" /var/log
mount --bind "$dir/lib" /var/lib
mount --make-rshared /
echo ready
cat
exit 0
`

// Namespaces are the mount, PID, IPC, UTS and network namespaces of a node, or of others that it can reach. Their /run,
// /var/lib and /var/log are in a directory of the machine.
type Namespaces struct {
	dir   string
	first *proc.Process
	hold  io.Closer
	files []*os.File // of the namespaces, in the order in which they are entered
}

// entered are the names in /proc/PID/ns of the namespaces that Within enters. The mount namespace comes last, because
// paths differ in it.
var entered = []string{"ipc", "uts", "pid", "net", "mnt"}

// NewNamespaces makes namespaces whose files are in dir, which must exist. network is a shell script that sets up their
// network; it gets the arguments.
func NewNamespaces(dir, network string, args ...string) (_ *Namespaces, err error) {
	for _, d := range []string{"log", "run", "lib", "sysctl"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	stdin, hold, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer stdin.Close()
	output, stdout, err := os.Pipe()
	if err != nil {
		hold.Close()
		return nil, err
	}
	defer output.Close()
	first, err := proc.Start(proc.Cmd{
		Args:       append([]string{"/bin/sh", "-c", setup, "sh", dir, network}, args...),
		Env:        environment,
		Stdin:      stdin,
		Namespaces: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET,
	}, stdout)
	stdout.Close()
	if err != nil {
		hold.Close()
		return nil, err
	}
	ns := &Namespaces{dir: dir, first: first, hold: hold}
	if err := errors.Join(awaitSetup(output), ns.open()); err != nil {
		return nil, errors.Join(fmt.Errorf("set up the namespaces in %s: %w", dir, err), ns.Close())
	}
	return ns, nil
}

// awaitSetup waits until setup prints that it is done. Any other output is an error.
func awaitSetup(output io.Reader) error {
	var message strings.Builder
	for lines := bufio.NewScanner(output); lines.Scan(); {
		if lines.Text() == "ready" {
			return nil
		}
		fmt.Fprintln(&message, lines.Text())
	}
	return errors.New(message.String())
}

// Pid returns the ID of the first process in the namespaces.
func (ns *Namespaces) Pid() int { return ns.first.Pid() }

// Host returns the path on the machine of a file in the namespaces' /run, /var/lib or /var/log.
func (ns *Namespaces) Host(path string) string {
	dirs := map[string]string{"/run/": "run", "/var/run/": "run", "/var/lib/": "lib", "/var/log/": "log"}
	for inside, outside := range dirs {
		if rest, ok := strings.CutPrefix(path, inside); ok {
			return filepath.Join(ns.dir, outside, rest)
		}
	}
	return path
}

// Run runs a program in the namespaces.
func (ns *Namespaces) Run(ctx context.Context, args ...string) (res proc.Result, err error) {
	err = ns.Within(func() error {
		res, err = proc.Run(ctx, proc.Cmd{Args: args, Env: environment})
		return err
	})
	return res, err
}

// Dial connects to an address in the namespaces' network.
func (ns *Namespaces) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = ns.Within(func() error {
		conn, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

func (ns *Namespaces) open() error {
	for _, name := range entered {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", ns.first.Pid(), name))
		if err != nil {
			return err
		}
		ns.files = append(ns.files, f)
	}
	return nil
}

// Within runs f in the namespaces. Processes and sockets that f makes are in them, goroutines are not.
func (ns *Namespaces) Within(f func() error) error {
	return proc.OnThread(func() error {
		if err := ns.enter(); err != nil {
			return err
		}
		return f()
	})
}

func (ns *Namespaces) enter() error {
	// A thread that shares its working directory with others cannot change its root.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare the working directory: %w", err)
	}
	for _, f := range ns.files {
		if err := unix.Setns(int(f.Fd()), 0); err != nil {
			return fmt.Errorf("enter %s: %w", f.Name(), err)
		}
	}
	return nil
}

// Close ends all processes in the namespaces and waits for the first one, which ends last.
func (ns *Namespaces) Close() error {
	errs := []error{ns.hold.Close(), ns.first.Kill()}
	for _, f := range ns.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
