package proc

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Stat has values of /proc/PID/stat (proc_pid_stat(5)).
type Stat struct {
	// State is a letter, such as R for a running process and Z for one that its parent has not waited for.
	State string
	// Parent is the PID of the parent.
	Parent int
	// Start is the start time, in clock ticks since the boot.
	Start uint64
	// Threads is the number of threads that have not ended. The first one can end before others do.
	Threads int
}

// Stat reads the process's stat.
func (p *Process) Stat() (Stat, error) {
	text, err := p.read("stat")
	if err != nil {
		return Stat{}, err
	}
	return parseStat(text)
}

// parseStat parses the fields state, parent, threads and start time (3, 4, 20 and 22). Before them is the program's
// name in parentheses, which may contain any characters.
func parseStat(text string) (Stat, error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 20 {
		return Stat{}, errors.New("the stat of a process has no start time")
	}
	parent, err := strconv.Atoi(fields[1])
	if err != nil {
		return Stat{}, fmt.Errorf("the parent in the stat of a process: %w", err)
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return Stat{}, fmt.Errorf("the start time in the stat of a process: %w", err)
	}
	threads, err := strconv.Atoi(fields[17])
	if err != nil {
		return Stat{}, fmt.Errorf("the threads in the stat of a process: %w", err)
	}
	return Stat{State: fields[0], Parent: parent, Start: start, Threads: threads}, nil
}

// CheckRunning returns ErrEnded if the process has ended, even if its parent has not waited for it yet. A process whose
// first thread has ended runs as long as another one does, such as one that hangs in a driver after SIGKILL.
func (p *Process) CheckRunning() error {
	s, err := p.Stat()
	if err != nil {
		return err
	}
	if strings.Contains("ZXx", s.State) && s.Threads < 2 {
		return ErrEnded
	}
	return nil
}

// Status has values of /proc/PID/status (proc_pid_status(5)).
type Status struct {
	// UIDs are the real, effective, saved and file system user IDs.
	UIDs []string
	// Capabilities are the effective capabilities, in the process's user namespace.
	Capabilities uint64
}

// Status reads the process's status.
func (p *Process) Status() (Status, error) {
	text, err := p.read("status")
	if err != nil {
		return Status{}, err
	}
	return parseStatus(text)
}

func parseStatus(text string) (Status, error) {
	var s Status
	seen := map[string]bool{}
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		fields := strings.Fields(value)
		if len(fields) == 0 {
			continue
		}
		var err error
		switch key {
		case "Uid":
			if s.UIDs = fields; len(fields) != 4 {
				err = fmt.Errorf("%d values, want 4", len(fields))
			}
		case "CapEff":
			s.Capabilities, err = strconv.ParseUint(fields[0], 16, 64)
		default:
			continue
		}
		if err != nil {
			return Status{}, fmt.Errorf("%s of a process: %w", key, err)
		}
		seen[key] = true
	}
	if len(seen) != 2 {
		return Status{}, errors.New("the status of a process is not complete")
	}
	return s, nil
}
