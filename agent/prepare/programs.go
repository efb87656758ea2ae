package prepare

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/trust"
)

// describe names a process for people: its PID, command, user and cgroup.
func describe(h host.Host, p *proc.Process) string {
	what := []string{plain(p.Command())}
	groups, unknown := p.Cgroups()
	if s, err := p.Status(); err == nil {
		name := ""
		if unknown == nil && !groups.InContainer() { // a container has users of its own
			name = userName(h, s.UIDs[0])
		}
		if name == "" {
			what = append(what, "UID "+s.UIDs[0])
		} else {
			what = append(what, "user "+plain(name))
		}
	}
	if unknown == nil {
		what = append(what, "cgroup "+plain(groups.String()))
	}
	return fmt.Sprintf("process %d (%s)", p.PID, strings.Join(what, ", "))
}

// maxPasswd bounds /etc/passwd, in bytes.
const maxPasswd = 1 << 20

// userName returns the name of a user in a host's /etc/passwd (passwd(5)), or "".
func userName(h host.Host, uid string) string {
	text, err := fileio.ReadFile(filepath.Join(h.Root(), "etc", "passwd"), maxPasswd)
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Split(line, ":"); len(fields) > 2 && fields[2] == uid {
			return fields[0]
		}
	}
	return ""
}

// DefaultPrograms are programs that may use a GPU although a container is about to get it: display servers, and
// NVIDIA's daemons and tools.
func DefaultPrograms() []string {
	return []string{
		"Xorg", "Xorg.bin", "Xwayland", "gnome-shell", "kwin_wayland", "kwin_x11", "plasmashell", "gdm-x-session",
		"nvidia-persistenced", "nv-hostengine", "dcgm-exporter", "dcgmi", "nv-fabricmanager", "nvidia-imex",
		"nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-powerd", "nvsm_core",
	}
}

// known reports whether the process is one of the programs, by the name of its executable, and the name can be
// trusted. Anyone can give a program any name, so a known process must also be one of these:
//   - root's, of the host: in no container's cgroup, and in the PID and user namespaces of the host. A container in
//     these namespaces that can write to the host's cgroups can leave its own, and then passes for the host;
//   - the same of a system account or of a user at a seat, if only root can change the file that it executes. The file
//     alone is not enough: with LD_PRELOAD any user can have root's programs do anything;
//   - root with CAP_SYS_ADMIN in the host's user namespace, like a monitoring agent in a container. Such a
//     container has full control of the node already, so trusting the name grants it nothing.
func known(h host.Host, p *proc.Process, programs []string) bool {
	executable, err := p.Executable()
	if err != nil || !slices.Contains(programs, filepath.Base(executable)) || !p.In(proc.InitialUser) {
		return false
	}
	s, err := p.Status()
	if err != nil {
		return false
	}
	inHost := ofHost(p) && p.In(proc.InitialPID)
	if allUIDs(s, isRoot) {
		return inHost || s.Capabilities&(1<<unix.CAP_SYS_ADMIN) != 0
	}
	seated := usersAtSeats(h)
	return inHost && executesRootsFile(h, p, executable) && allUIDs(s, func(uid string) bool {
		return isRoot(uid) || isSystemAccount(uid) || slices.Contains(seated, uid)
	})
}

// isDesktop reports whether the process is a part of a desktop, which may be any program: a process of the host, of
// root or of a user at a seat.
func isDesktop(h host.Host, p *proc.Process) bool {
	s, err := p.Status()
	if err != nil || !ofHost(p) {
		return false
	}
	seated := usersAtSeats(h)
	return allUIDs(s, func(uid string) bool { return isRoot(uid) || slices.Contains(seated, uid) })
}

// executesRootsFile reports whether the process executes the file at a path, and only root can change that file and
// each directory above it. The path is one that the kernel reports, from the process's mount namespace. The host may
// have another file there.
func executesRootsFile(h host.Host, p *proc.Process, path string) bool {
	path = filepath.Join(h.Root(), path)
	if trust.RootFile(path) != nil {
		return false
	}
	same, err := p.Executes(path)
	return err == nil && same
}

func isRoot(uid string) bool { return uid == "0" }

// isSystemAccount reports whether a user is no person. Distributions give persons UIDs from 1000 on (UID_MIN in
// login.defs(5)).
func isSystemAccount(uid string) bool { return len(uid) < len("1000") }

// usersAtSeats returns the IDs of the users who have a session at a seat of the host, that is at its screen and
// keyboard. Remote users have none. systemd-logind names them in a file for each seat, which sd_seat_get_sessions(3)
// reads too.
func usersAtSeats(h host.Host) (uids []string) {
	seats := filepath.Join(h.Root(), "run", "systemd", "seats")
	files, err := os.ReadDir(seats)
	if err != nil {
		return nil
	}
	for _, file := range files {
		text, err := fileio.ReadFile(filepath.Join(seats, file.Name()), maxSeat)
		if err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			if list, is := strings.CutPrefix(line, "UIDS="); is {
				uids = append(uids, strings.Fields(strings.ReplaceAll(list, `"`, ""))...)
			}
		}
	}
	return uids
}

// maxSeat bounds the file of a seat, in bytes.
const maxSeat = 64 << 10

// allUIDs reports whether something is true of each user ID of a process: the real, effective, saved and file system's.
func allUIDs(s proc.Status, is func(uid string) bool) bool {
	return !slices.ContainsFunc(s.UIDs, func(uid string) bool { return !is(uid) })
}

// ofHost reports whether the process is in no container's cgroup.
func ofHost(p *proc.Process) bool {
	groups, err := p.Cgroups()
	return err == nil && len(groups) > 0 && !groups.InContainer()
}
