package inject

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/trust"
)

// syslog is the value of the policy's key "log" for the system log.
const syslog = "syslog"

// Level is the severity of a problem.
type Level string

// The levels.
const (
	Warning Level = "warning"
	Error   Level = "error"
)

// Log writes a problem in one line to the log that the policy names. Position is the position of the hook; container
// is an ID, or empty if unknown. If the policy names no log, Log does nothing. An error means that the line was not
// written.
//
// A log file must belong to root, in a directory that only root can change: other users could make it a link to any
// file.
func (i Injector) Log(level Level, position, container string, problem error) error {
	// The error is ignored: the problem to log may be this error of the policy itself.
	p, _ := readAll(i.PolicyFile)
	if p == nil || p.Log == "" {
		return nil
	}
	line := fmt.Sprintf("level=%s position=%s container=%.100q msg=%.2000q", level, position, container, problem)
	var err error
	switch {
	case p.Log == syslog:
		err = toSyslog(i.SyslogSocket, level, line)
	case filepath.IsAbs(p.Log):
		err = toFile(p.Log, fmt.Sprintf("time=%s %s\n", time.Now().UTC().Format(time.RFC3339), line))
	}
	if err != nil {
		return fmt.Errorf("write to the log %s: %w", p.Log, err)
	}
	return nil
}

// PodmanID returns the ID of podman's container for log lines, or "" if config.json is not podman's. A precreate hook
// gets only config.json, which has no ID of its own; podman mounts a file from its directory of the container.
func PodmanID(config []byte) string {
	var c struct {
		Mounts []struct {
			Source string `json:"source"`
		} `json:"mounts"`
	}
	if json.Unmarshal(config, &c) != nil {
		return ""
	}
	for _, m := range c.Mounts {
		dir, ok := strings.CutSuffix(m.Source, "/userdata/.containerenv")
		id := filepath.Base(dir)
		if data, err := hex.DecodeString(id); ok && err == nil && len(data) == 32 {
			return id
		}
	}
	return ""
}

func toFile(path, line string) error {
	dir := filepath.Dir(path)
	if err := trust.Dir(dir); err != nil {
		return err
	}
	d, err := trust.OpenDirPath(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	const flags = unix.O_WRONLY | unix.O_APPEND | unix.O_CREAT | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
	fd, err := unix.Openat(int(d.Fd()), filepath.Base(path), flags, 0o600)
	if err != nil {
		return &os.PathError{Op: "open", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	var st unix.Stat_t
	switch err := unix.Fstat(fd, &st); {
	case err != nil:
		return &os.PathError{Op: "stat", Path: path, Err: err}
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return fmt.Errorf("%s is not a regular file", path)
	case st.Nlink != 1:
		return fmt.Errorf("%s has %d names (hard links), want one", path, st.Nlink)
	case int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0:
		return fmt.Errorf("%w: %s belongs to user %d and has the mode %04o",
			trust.ErrUnsafe, path, st.Uid, st.Mode&0o7777)
	}
	_, err = f.WriteString(line)
	return err
}

// priorities are syslog's numbers: the facility for daemons, and the severity.
var priorities = map[Level]int{Warning: 3<<3 | 4, Error: 3<<3 | 3}

// toSyslog sends a line to the syslog daemon at a socket. It does not wait if the daemon is slow.
func toSyslog(socket string, level Level, line string) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	now := time.Now().Format(time.Stamp)
	text := fmt.Sprintf("<%d>%s gpu-cdi-hook[%d]: %s", priorities[level], now, os.Getpid(), line)
	err = unix.Sendto(fd, []byte(text), 0, &unix.SockaddrUnix{Name: socket})
	return os.NewSyscallError("send to "+socket, err)
}
