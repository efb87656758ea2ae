package sdnotify

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// firstSocket is the descriptor of the first socket that systemd passes: SD_LISTEN_FDS_START.
const firstSocket = 3

// maxSockets is more than any program here takes.
const maxSockets = 16

// Sockets returns the sockets that systemd passed to this process, as the environment says (LISTEN_FDS, LISTEN_PID).
// The name of each file is the path at which it listens. It is called once: the caller closes the files.
func Sockets(env []string) ([]*os.File, error) {
	count := variable(env, "LISTEN_FDS")
	if count == "" || variable(env, "LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil
	}
	n, err := strconv.ParseUint(count, 10, 31)
	if err != nil || n > maxSockets {
		return nil, fmt.Errorf("systemd passes %s sockets (LISTEN_FDS); want 0 to %d", strconv.Quote(count), maxSockets)
	}
	var files []*os.File
	for fd := firstSocket; fd < firstSocket+int(n); fd++ {
		unix.CloseOnExec(fd)
		files = append(files, os.NewFile(uintptr(fd), pathOf(fd)))
	}
	return files, nil
}

// pathOf returns the path at which a socket listens, or what else the descriptor is.
func pathOf(fd int) string {
	address, err := unix.Getsockname(fd)
	if err != nil {
		return fmt.Sprintf("descriptor %d: %v", fd, err)
	}
	at, isUnix := address.(*unix.SockaddrUnix)
	if !isUnix {
		return fmt.Sprintf("descriptor %d: it is no unix socket", fd)
	}
	return at.Name
}

// ForChild returns an environment without the variables by which systemd means only this process.
func ForChild(env []string) []string {
	var rest []string
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		if name != "NOTIFY_SOCKET" && !strings.HasPrefix(name, "WATCHDOG_") && !strings.HasPrefix(name, "LISTEN_") {
			rest = append(rest, kv)
		}
	}
	return rest
}

// variable returns the value of a variable, or "". Of several values the last one counts.
func variable(env []string, name string) string {
	for _, kv := range slices.Backward(env) {
		if value, ok := strings.CutPrefix(kv, name+"="); ok {
			return value
		}
	}
	return ""
}
