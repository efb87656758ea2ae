package kubelet

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/proc"
)

// setup is run by the first process of a node's namespaces. Its argument is the node's directory. It mounts directories
// and files of the node over what the node's programs would change on the machine, and over the kernel settings that a
// kubelet requires. Mounts propagate to pods that request it, as on a node with systemd. When its input ends it exits,
// and all processes of the node with it. -n keeps the first mounts out of the machine's /run/mount.
const setup = `
set -e
mount -n --make-rprivate /
mount -n --bind "$1/run" /run
mount -t proc proc /proc
for f in vm/overcommit_memory:1 vm/panic_on_oom:0 kernel/panic:10 kernel/panic_on_oops:1 \
	kernel/keys/root_maxkeys:1000000 kernel/keys/root_maxbytes:25000000; do
	file=$1/sysctl/$(echo ${f%:*} | tr / .)
	echo ${f#*:} >"$file"
	if [ -e /proc/sys/${f%:*} ]; then mount --bind "$file" /proc/sys/${f%:*}; fi
done
for d in cdi cni containerd nri; do
	if [ -d /etc/$d ]; then mount -t tmpfs tmpfs /etc/$d; fi
done
mount --bind "$1/log" /var/log
mount --bind "$1/lib" /var/lib
mount --make-rshared /
ip link set lo up
ip link add eth0 type veth peer name uplink
ip address add 192.0.2.10/24 dev eth0
ip link set eth0 up
ip link set uplink up
ip route add default via 192.0.2.1
echo ready
cat
exit 0
`

// namespaces are the mount, PID, IPC, UTS and network namespaces of one node.
type namespaces struct {
	first *proc.Process
	hold  io.Closer
	files []*os.File // of the namespaces, in the order in which they are entered
}

// entered are the names in /proc/PID/ns of the namespaces that within enters. The mount namespace comes last, because
// paths differ in it.
var entered = []string{"ipc", "uts", "pid", "net", "mnt"}

// newNamespaces makes the namespaces of a node whose files are in dir.
func newNamespaces(dir string) (_ *namespaces, err error) {
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
		Args:       []string{"/bin/sh", "-c", setup, "sh", dir},
		Env:        []string{"PATH=" + searchPath},
		Stdin:      stdin,
		Namespaces: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWNET,
	}, stdout)
	stdout.Close()
	if err != nil {
		hold.Close()
		return nil, err
	}
	ns := &namespaces{first: first, hold: hold}
	if err := errors.Join(awaitSetup(output), ns.open()); err != nil {
		return nil, errors.Join(fmt.Errorf("set up the namespaces of a node: %w", err), ns.Close())
	}
	return ns, nil
}

// awaitSetup waits until setup prints that the node is ready. Any other output is an error.
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

func (ns *namespaces) open() error {
	for _, name := range entered {
		f, err := os.Open(fmt.Sprintf("/proc/%d/ns/%s", ns.first.Pid(), name))
		if err != nil {
			return err
		}
		ns.files = append(ns.files, f)
	}
	return nil
}

// within runs f in the namespaces. Processes and sockets that f makes are in them, goroutines are not.
func (ns *namespaces) within(f func() error) error {
	return proc.OnThread(func() error {
		if err := ns.enter(); err != nil {
			return err
		}
		return f()
	})
}

func (ns *namespaces) enter() error {
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
func (ns *namespaces) Close() error {
	errs := []error{ns.hold.Close(), ns.first.Kill()}
	for _, f := range ns.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
