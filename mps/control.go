package mps

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"

	"gpu-cdi-plugin/resource"
)

// control sends commands to one GPU's daemon. A method may send several; the caller's context bounds them together.
type control struct {
	helper  Helper
	dir     string
	program Program
}

func (c *control) ask(ctx context.Context, format string, args ...any) (string, error) {
	return c.helper.ask(ctx, c.dir, c.program, fmt.Sprintf(format, args...))
}

// limited reports whether the daemon gives servers that it starts from now on these limits.
func (c *control) limited(ctx context.Context, l resource.MPSLimits) (bool, error) {
	answer, err := c.ask(ctx, "get_default_device_pinned_mem_limit 0")
	if err != nil {
		return false, err
	}
	memory, err := parseMemoryLimit(answer)
	if err != nil || !memory.matches(l.MemoryBytes>>20) || l.ThreadPercent == 0 {
		return err == nil && memory.matches(l.MemoryBytes>>20), err
	}
	answer, err = c.ask(ctx, "get_default_active_thread_percentage")
	if err != nil {
		return false, err
	}
	threads, err := parsePercentage(answer)
	return err == nil && math.Abs(threads-float64(l.ThreadPercent)) < 0.5, err
}

// limit sets the limits of the daemon and of its servers. Clients that are connected retain theirs.
func (c *control) limit(ctx context.Context, l resource.MPSLimits) error {
	if _, err := c.ask(ctx, "set_default_device_pinned_mem_limit 0 %dM", l.MemoryBytes>>20); err != nil {
		return err
	}
	if l.ThreadPercent > 0 {
		if _, err := c.ask(ctx, "set_default_active_thread_percentage %d", l.ThreadPercent); err != nil {
			return err
		}
	}
	servers, err := c.servers(ctx)
	for i := 0; err == nil && i < len(servers); i++ {
		err = c.limitServer(ctx, servers[i], l)
	}
	if err != nil {
		return err
	}
	has, err := c.limited(ctx, l)
	if err == nil && !has {
		err = fmt.Errorf("it did not accept the limits %s", describe(l))
	}
	return err
}

// limitServer sets the limits of a server.
func (c *control) limitServer(ctx context.Context, pid int, l resource.MPSLimits) error {
	if _, err := c.ask(ctx, "set_device_pinned_mem_limit %d 0 %dM", pid, l.MemoryBytes>>20); err != nil {
		return err
	}
	if l.ThreadPercent == 0 {
		return nil
	}
	_, err := c.ask(ctx, "set_active_thread_percentage %d %d", pid, l.ThreadPercent)
	return err
}

func (c *control) servers(ctx context.Context) ([]int, error) {
	answer, err := c.ask(ctx, "get_server_list")
	if err != nil {
		return nil, err
	}
	return parsePIDs(answer, maxServers)
}

// busy reports whether the daemon has clients.
func (c *control) busy(ctx context.Context) (bool, error) {
	servers, err := c.servers(ctx)
	if err != nil {
		return false, err
	}
	for _, pid := range servers {
		answer, err := c.ask(ctx, "get_client_list %d", pid)
		if err != nil {
			return false, err
		}
		clients, err := parsePIDs(answer, maxClients)
		if err != nil || len(clients) > 0 {
			return true, err
		}
	}
	return false, nil
}

// quit sends the command to end.
func (c *control) quit(ctx context.Context) error {
	_, err := c.ask(ctx, "quit")
	return err
}

// describe formats limits for a log.
func describe(l resource.MPSLimits) string {
	text := fmt.Sprintf("%d MiB", l.MemoryBytes>>20)
	if l.ThreadPercent > 0 {
		text += fmt.Sprintf(", %d%% of the threads", l.ThreadPercent)
	}
	return text
}

// The parsers of the daemon's answers accept nothing else: a container may have put something in the daemon's place.

// maxServers and maxClients bound lists of processes. A daemon has one server, and for a while those of other users
// whose clients have not ended. A server has at most 60 clients.
const (
	maxServers = 16
	maxClients = 1024
)

// parsePIDs parses a list of PIDs, one per line. More of them than most is an error.
func parsePIDs(answer string, most int) ([]int, error) {
	var list []int
	for line := range strings.Lines(answer) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		n, err := strconv.ParseUint(line, 10, 31)
		if err != nil || n == 0 || len(list) == most {
			return nil, fmt.Errorf("want at most %d PIDs, got %s", most, excerpt(answer))
		}
		list = append(list, int(n))
	}
	return list, nil
}

// parsePercentage parses a percentage such as "33.0".
func parsePercentage(answer string) (float64, error) {
	n, err := strconv.ParseFloat(strings.TrimSpace(answer), 64)
	if err != nil || !(n > 0 && n <= 100) {
		return 0, fmt.Errorf("want a percentage, got %s", excerpt(answer))
	}
	return n, nil
}

// memoryLimit is a limit as the daemon prints it: "512M" or, rounded down from 1024M on, "4G". The zero value is no
// limit.
type memoryLimit struct {
	n    uint64
	unit byte
}

func parseMemoryLimit(answer string) (memoryLimit, error) {
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

// matches reports whether a daemon with a limit of so many MiB prints this one.
func (l memoryLimit) matches(mib uint64) bool {
	if l.unit == 'G' {
		return mib>>10 == l.n
	}
	return mib == l.n
}

// excerpt quotes the beginning of a program's output for a message.
func excerpt(text string) string {
	const length = 80
	text = strings.TrimSpace(text)
	if len(text) > length {
		text = text[:length] + "..."
	}
	return strconv.QuoteToASCII(text)
}
