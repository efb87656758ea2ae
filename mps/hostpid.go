package mps

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// ErrPIDNamespace is that the plugin runs in another PID namespace than the node's kubelet.
var ErrPIDNamespace = errors.New("this process is not in the host's PID namespace, which MPS needs")

// CheckPIDNamespace returns ErrPIDNamespace if the process that listens on the kubelet's socket has no PID here.
//
// MPS needs the host's PID namespace: the server knows its clients by the PIDs that the kernel reports for their
// sockets (0 for a process outside of the namespace), so that clients cannot be distinguished or counted.
// And the mounts of the host's process 1 show whether the containers' runtime sees a GPU's directories.
//
// The host is where the kubelet is: on a node that is a container itself, as with kind, that is not the machine's first
// PID namespace, so the number of that namespace proves nothing, and neither does what process 1 is. The kernel's
// answer about the kubelet's socket does. Without a kubelet there is no answer and no error: a pod is started by a
// running one.
func CheckPIDNamespace(kubeletSocket string) error {
	conn, err := net.DialTimeout("unix", kubeletSocket, time.Second)
	if err != nil {
		return nil // see above
	}
	defer conn.Close()
	f, err := conn.(*net.UnixConn).File()
	if err != nil {
		return fmt.Errorf("use the kubelet's socket: %w", err)
	}
	defer f.Close()
	peer, err := unix.GetsockoptUcred(int(f.Fd()), unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return fmt.Errorf("find the process of the kubelet's socket: %w", os.NewSyscallError("getsockopt", err))
	}
	if peer.Pid == 0 {
		return ErrPIDNamespace
	}
	return nil
}
