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

// setup is run by the first process of a node's namespaces. Its argument is the node's directory. What the node's
// programs would write into the machine is covered by directories and files of the node; the kernel's settings that a
// kubelet insists on are files, too. As on a node with systemd, mounts are seen by the pods that ask for it. It ends, and
// all processes of the node with it, when its input does. -n keeps the first mounts out of the machine's /run/mount.
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

// entered are the names in /proc/PID/ns of the namespaces that within enters. That for mounts is the last, as it
// changes what paths mean.
var entered = []string{"ipc", "uts", "pid", "net", "mnt"}

// newNamespaces makes namespaces for a node whose files are in dir.
func newNamespaces(dir string) (_ *namespaces, err error) {
	stdin, hold, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer stdin.Close()
	said, stdout, err := os.Pipe()
	if err != nil {
		hold.Close()
		return nil, err
	}
	defer said.Close()
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
	if err := errors.Join(ready(said), ns.open()); err != nil {
		return nil, errors.Join(fmt.Errorf("set up the namespaces of a node: %w", err), ns.Close())
	}
	return ns, nil
}

// ready waits until the set-up says that it is done. The rest that it says is its complaint.
func ready(said io.Reader) error {
	var complaint strings.Builder
	for lines := bufio.NewScanner(said); lines.Scan(); {
		if lines.Text() == "ready" {
			return nil
		}
		fmt.Fprintln(&complaint, lines.Text())
	}
	return errors.New(complaint.String())
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

// within runs f in the namespaces. Processes that f starts and sockets that it opens are in them; goroutines that it
// starts are not.
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
		return fmt.Errorf("part from the other threads: %w", err)
	}
	for _, f := range ns.files {
		if err := unix.Setns(int(f.Fd()), 0); err != nil {
			return fmt.Errorf("enter %s: %w", f.Name(), err)
		}
	}
	return nil
}

// Close ends all processes in the namespaces and waits until the first has ended, which is after all others.
func (ns *namespaces) Close() error {
	errs := []error{ns.hold.Close(), ns.first.Kill()}
	for _, f := range ns.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}
