package mps

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"

	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/resource"
)

// control sends commands to the daemon of one GPU. A method may send several commands; the context limits all of them
// together.
type control struct {
	path string   // of nvidia-cuda-mps-control
	env  []string // the variables that identify the daemon
}

// limited reports whether the daemon will give these limits to servers that it starts.
func (c *control) limited(ctx context.Context, l resource.MPSLimits) (bool, error) {
	answer, err := c.ask(ctx, "get_default_device_pinned_mem_limit 0")
	if err != nil {
		return false, err
	}
	if is, err := isMemoryLimit(answer, l.MemoryBytes>>20); !is || l.ThreadPercent == 0 {
		return is, err
	}
	if answer, err = c.ask(ctx, "get_default_active_thread_percentage"); err != nil {
		return false, err
	}
	return isPercentage(answer, l.ThreadPercent)
}

// answers returns an error unless the daemon answers. It does not compare the limits, which the daemon rounds.
func (c *control) answers(ctx context.Context) error {
	answer, err := c.ask(ctx, "get_default_device_pinned_mem_limit 0")
	if err == nil {
		_, err = isMemoryLimit(answer, 0)
	}
	return err
}

// limit sets the limits of the daemon and of its servers. Clients that are connected keep their limits.
func (c *control) limit(ctx context.Context, l resource.MPSLimits) error {
	answer, err := c.ask(ctx, "set_default_device_pinned_mem_limit 0 %dM", l.MemoryBytes>>20)
	if err != nil {
		return err
	}
	if strings.HasPrefix(answer, "Unknown command") { // driver 470
		return ErrNoLimits
	}
	if l.ThreadPercent > 0 {
		if _, err := c.ask(ctx, "set_default_active_thread_percentage %d", l.ThreadPercent); err != nil {
			return err
		}
	}
	if answer, err = c.ask(ctx, "get_server_list"); err != nil {
		return err
	}
	servers, err := parsePIDs(answer)
	if err != nil {
		return err
	}
	for _, pid := range servers {
		if _, err := c.ask(ctx, "set_device_pinned_mem_limit %d 0 %dM", pid, l.MemoryBytes>>20); err != nil {
			return err
		}
		if l.ThreadPercent > 0 {
			if _, err := c.ask(ctx, "set_active_thread_percentage %d %d", pid, l.ThreadPercent); err != nil {
				return err
			}
		}
	}
	has, err := c.limited(ctx, l)
	if err != nil {
		return err
	}
	if !has {
		return fmt.Errorf("the daemon did not accept the limits %s", describe(l))
	}
	return nil
}

// describe formats limits for a log.
func describe(l resource.MPSLimits) string {
	text := fmt.Sprintf("%d MiB", l.MemoryBytes>>20)
	if l.ThreadPercent > 0 {
		text += fmt.Sprintf(", %d%% of the threads", l.ThreadPercent)
	}
	return text
}

// parsePIDs parses a list of PIDs, one per line.
func parsePIDs(answer string) ([]int, error) {
	var list []int
	for line := range strings.Lines(answer) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		n, err := strconv.ParseUint(line, 10, 31)
		if err != nil || n == 0 {
			return nil, fmt.Errorf("want PIDs, got %s", quote(answer))
		}
		list = append(list, int(n))
	}
	return list, nil
}

// isMemoryLimit reports whether an answer says that the daemon has a limit of mib MiB. The daemon prints "512M" or,
// from 1024M on, a number of GiB that is rounded down, like "4G". Without a limit it prints nothing.
func isMemoryLimit(answer string, mib uint64) (bool, error) {
	answer = strings.TrimSpace(answer)
	number := strings.TrimRight(answer, "GM")
	_, err := strconv.ParseUint(number, 10, 48)
	if answer != "" && (err != nil || len(answer) != len(number)+1) {
		return false, fmt.Errorf("want a size such as 512M, got %s", quote(answer))
	}
	return answer == fmt.Sprintf("%dM", mib) || mib >= 1024 && answer == fmt.Sprintf("%dG", mib>>10), nil
}

// isPercentage reports whether an answer such as "33.0" is the given percentage.
func isPercentage(answer string, percent int) (bool, error) {
	n, err := strconv.ParseFloat(strings.TrimSpace(answer), 64)
	if err != nil || !(n > 0 && n <= 100) {
		return false, fmt.Errorf("want a percentage, got %s", quote(answer))
	}
	return math.Abs(n-float64(percent)) < 0.5, nil
}

// quote quotes the beginning of a program's output for a message.
func quote(text string) string {
	return strconv.QuoteToASCII(wording.Shorten(strings.TrimSpace(text), 80))
}
