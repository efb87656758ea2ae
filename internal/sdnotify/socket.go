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

// Socket returns the socket that systemd passed to this process, as the environment says (LISTEN_FDS, LISTEN_PID), or
// nil if systemd passed none. It is called once: the caller closes the file. More than one socket is an error.
func Socket(env []string) (*os.File, error) {
	if variable(env, "LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil //nolint:nilnil // there is none
	}
	switch count := variable(env, "LISTEN_FDS"); count {
	case "", "0":
		return nil, nil //nolint:nilnil // there is none
	case "1":
	default:
		return nil, fmt.Errorf("systemd passes %s sockets (LISTEN_FDS); want one", strconv.Quote(count))
	}
	unix.CloseOnExec(firstSocket)
	return os.NewFile(firstSocket, "the socket of systemd"), nil
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
