package testenv

import (
	"encoding/binary"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// NetworkNamespace gives the test's thread, and the processes that it starts, a network namespace of their own, without
// interfaces that are up.
func NetworkNamespace(t testing.TB) {
	t.Helper()
	Root(t)
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		Skip(t, "needs network namespaces: "+err.Error())
	}
}

// SendUevent has the kernel send a uevent, of a header and variables, to all that listen in the network namespace of
// the calling thread: see NetworkNamespace.
func SendUevent(t testing.TB, fields ...string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	payload := strings.Join(fields, "\x00") + "\x00"
	message := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+len(payload)))
	message = binary.NativeEndian.AppendUint16(message, unix.NLMSG_MIN_TYPE)
	message = binary.NativeEndian.AppendUint16(message, unix.NLM_F_REQUEST)
	message = append(message, make([]byte, unix.SizeofNlMsghdr-len(message))...) // no sequence, from no port
	message = append(message, payload...)
	if err := unix.Sendto(fd, message, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		t.Fatal(err)
	}
}
