// Package uevent reports when the kernel adds, removes, binds or unbinds a GPU on PCI.
//
// The kernel sends its uevents to the network namespaces that belong to the host's user namespace, so a program in a
// container receives them too, unless it has a user namespace of its own.
package uevent

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// kernelGroup is the multicast group of the kernel's own messages. Group 2 has those of udev.
const kernelGroup = 1

// MaxMessage is the size of the largest message in bytes: the kernel's buffer for the variables is 2 KiB, and the path
// is before it.
const MaxMessage = 8192

// bufferBytes holds the messages of a node whose GPUs and their functions all come at once.
const bufferBytes = 1 << 20

// Listen returns a source of the kernel's messages. Each Read returns one.
func Listen() (io.ReadCloser, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK,
		unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("listen to the kernel's uevents: %w", err)
	}
	file := os.NewFile(uintptr(fd), "uevents")
	// Only CAP_NET_ADMIN may exceed the limit of the host. A smaller buffer will do too, see Watch.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bufferBytes) != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, bufferBytes)
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup}); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("listen to the kernel's uevents: %w", err)
	}
	return file, nil
}

// Watch calls changed for each message about a GPU on PCI until the source ends, and returns its error. A message that
// is forged does no more than that. Where the kernel has dropped messages, one of them may have been about a GPU.
func Watch(source io.Reader, changed func()) error {
	message := make([]byte, MaxMessage)
	for {
		n, err := source.Read(message)
		dropped := errors.Is(err, unix.ENOBUFS)
		if dropped || aboutGPU(message[:n]) {
			changed()
		}
		if err != nil && !dropped {
			return fmt.Errorf("read the kernel's uevents: %w", err)
		}
	}
}

// aboutGPU reports whether a message is about a PCI device that is a display controller, of class 03. The kernel writes
// the class without leading zeros: 30200 for 0x030200.
func aboutGPU(message []byte) bool {
	pci, display := false, false
	for field := range bytes.SplitSeq(message, []byte{0}) {
		name, value, _ := strings.Cut(string(field), "=")
		switch name {
		case "SUBSYSTEM":
			pci = value == "pci"
		case "PCI_CLASS":
			display = len(value) == 5 && value[0] == '3'
		}
	}
	return pci && display
}
