package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/atomicfile"
)

// record says which process is a GPU's daemon. It is where no container sees it, and only root can read it.
type record struct {
	Version int `json:"version"`
	PID     int `json:"pid"`
	// Started is when the process began, in clock ticks since the boot of that ID: proc(5), field 22 of /proc/PID/stat.
	// A process has another number or another start.
	Started uint64 `json:"started"`
	Boot    string `json:"boot"`
	// Driver is the version of the driver that the program is of.
	Driver string `json:"driver"`
}

// Records of daemons that are not confined have the version before; see Enter.
const (
	unconfinedVersion = 1
	recordVersion     = 2
)

// maxRecord bounds the file, in bytes.
const maxRecord = 4096

// recordOf is the record of a process that is there.
func recordOf(pid int, driver string) (record, error) {
	started, err := startTime(pid)
	if err != nil {
		return record{}, err
	}
	boot, err := bootID()
	if err != nil {
		return record{}, err
	}
	return record{Version: recordVersion, PID: pid, Started: started, Boot: boot, Driver: driver}, nil
}

// write puts the record into a GPU's directory.
func (r record) write(own string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write the record of a daemon: %w", err)
	}
	return atomicfile.Write(filepath.Join(own, recordName), append(data, '\n'), 0o600)
}

// readRecord reads the record in a GPU's directory. If there is none the error wraps fs.ErrNotExist.
func readRecord(own string) (record, error) {
	path := filepath.Join(own, recordName)
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return record{}, fmt.Errorf("read the record of a daemon: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return record{}, fmt.Errorf("read the record of a daemon: %w", err)
	}
	r, err := parseRecord(data)
	if err != nil {
		return record{}, fmt.Errorf("read %s: %w", path, err)
	}
	return r, nil
}

func parseRecord(data []byte) (record, error) {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return record{}, err
	}
	if r.Version < unconfinedVersion || r.Version > recordVersion || r.PID <= 1 || r.Started == 0 || r.Boot == "" {
		return record{}, fmt.Errorf("not the record of a process: %s", excerpt(string(data)))
	}
	return r, nil
}

// recorded reports whether a GPU's directory has a record, whatever it says.
func recorded(own string) bool {
	_, err := os.Lstat(filepath.Join(own, recordName))
	return !errors.Is(err, fs.ErrNotExist)
}

// holds reports whether the process of that number is the one of the record. Whoever asks has a handle on the process of
// that number already, so that it cannot become another one's after.
func (r record) holds() bool {
	now, err := recordOf(r.PID, r.Driver)
	return err == nil && now.PID == r.PID && now.Started == r.Started && now.Boot == r.Boot
}

// confined reports whether the daemon was confined when it was started.
func (r record) confined() bool { return r.Version > unconfinedVersion }

func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the ID of the boot: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// startTime is when a process began, in clock ticks since the boot.
func startTime(pid int) (uint64, error) {
	path := fmt.Sprintf("/proc/%d/stat", pid)
	data, err := os.ReadFile(path)
	if err != nil {
		return 0, fmt.Errorf("read when a process began: %w", err)
	}
	started, err := parseStart(string(data))
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", path, err)
	}
	return started, nil
}

// parseStart reads field 22 of /proc/PID/stat. The second is the program's name in parentheses, and may hold any
// character. The third is Z or X of a process that has ended, which stays for as long as its parent does not care.
func parseStart(stat string) (uint64, error) {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	const place = 22 - 3 // the first field behind the name is the third
	if len(fields) <= place {
		return 0, errors.New("fewer than 22 fields")
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, errors.New("the process has ended")
	}
	return strconv.ParseUint(fields[place], 10, 64)
}
