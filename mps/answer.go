package mps

import (
	"fmt"
	"strconv"
	"strings"
)

// What the control program answers. Anything else is an error: a container may have put something in its place.

// maxServers and maxClients bound lists of processes. A daemon has one server, and for a while those of other users whose
// clients have not ended; a server has at most 60 clients.
const (
	maxServers = 16
	maxClients = 1024
)

// pids reads a list of process numbers, a line each. More of them than most is an error.
func pids(answer string, most int) ([]int, error) {
	var list []int
	for line := range strings.Lines(answer) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		n, err := strconv.ParseUint(line, 10, 31)
		if err != nil || n == 0 || len(list) == most {
			return nil, fmt.Errorf("want at most %d process numbers, got %s", most, excerpt(answer))
		}
		list = append(list, int(n))
	}
	return list, nil
}

// percentage reads a part of the threads, such as "33.0".
func percentage(answer string) (float64, error) {
	n, err := strconv.ParseFloat(strings.TrimSpace(answer), 64)
	if err != nil || !(n > 0 && n <= 100) {
		return 0, fmt.Errorf("want a percentage, got %s", excerpt(answer))
	}
	return n, nil
}

// memoryLimit reads a limit of memory: "512M" or, rounded down from 1024M on, "4G". Nothing is no limit.
type memoryLimit struct {
	n    uint64
	unit byte
}

func readMemoryLimit(answer string) (memoryLimit, error) {
	text := strings.TrimSpace(answer)
	if text == "" {
		return memoryLimit{}, nil
	}
	digits, unit := text[:len(text)-1], text[len(text)-1]
	n, err := strconv.ParseUint(digits, 10, 44)
	if err != nil || unit != 'M' && unit != 'G' {
		return memoryLimit{}, fmt.Errorf("want a size such as 512M, got %s", excerpt(answer))
	}
	return memoryLimit{n, unit}, nil
}

// shows reports whether a daemon with a limit of so many MiB answers like this.
func (l memoryLimit) shows(mib uint64) bool {
	if l.unit == 'G' {
		return mib>>10 == l.n
	}
	return mib == l.n
}

// excerptLength is how much of an answer is repeated in a message.
const excerptLength = 80

// excerpt is the beginning of what a program said, fit for a message.
func excerpt(text string) string {
	text = strings.TrimSpace(text)
	if len(text) > excerptLength {
		text = text[:excerptLength] + "..."
	}
	return strconv.QuoteToASCII(text)
}
