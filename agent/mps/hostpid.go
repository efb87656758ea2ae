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

// checkPIDNamespace returns ErrPIDNamespace if the process that listens on the kubelet's socket has no PID here.
//
// An MPS server identifies its clients by the PIDs that the kernel reports for their sockets: 0 for processes outside
// its namespace. And the mounts of the host's process 1 show whether the containers' runtime sees a GPU's shm.
//
// The host is where the kubelet runs. A node can be a container itself, as with kind, so its PID namespace need not be
// the machine's first one. If no kubelet listens there is no error: a plugin in a pod was started by a running kubelet.
func checkPIDNamespace(kubeletSocket string) error {
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
