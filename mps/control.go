package mps

import (
	"context"
	"fmt"
	"math"

	"gpu-cdi-plugin/resource"
)

// control asks one GPU's daemon and tells it what to do. How long the answers may take is the caller's to say: a method may
// ask several times.
type control struct {
	helper  Helper
	own     string
	program Program
}

func (c *control) ask(ctx context.Context, format string, args ...any) (string, error) {
	return c.helper.ask(ctx, c.own, c.program, fmt.Sprintf(format, args...))
}

// limited reports whether the daemon has the limits, for clients of servers that it starts from now on.
func (c *control) limited(ctx context.Context, l resource.MPSLimits) (bool, error) {
	answer, err := c.ask(ctx, "get_default_device_pinned_mem_limit 0")
	if err != nil {
		return false, err
	}
	memory, err := readMemoryLimit(answer)
	if err != nil {
		return false, err
	}
	if l.ThreadPercent == 0 {
		return memory.shows(mebibytes(l)), nil
	}
	answer, err = c.ask(ctx, "get_default_active_thread_percentage")
	if err != nil {
		return false, err
	}
	threads, err := percentage(answer)
	if err != nil {
		return false, err
	}
	return memory.shows(mebibytes(l)) && math.Abs(threads-float64(l.ThreadPercent)) < 0.5, nil
}

// limit gives the daemon its limits, and its servers too, whose later clients get them. Clients that are there keep what
// they have.
func (c *control) limit(ctx context.Context, l resource.MPSLimits) error {
	if _, err := c.ask(ctx, "set_default_device_pinned_mem_limit 0 %dM", mebibytes(l)); err != nil {
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
		err = fmt.Errorf("it does not take the limits %s", inWords(l))
	}
	return err
}

// limitServer gives a server its limits. It may have ended by now.
func (c *control) limitServer(ctx context.Context, pid int, l resource.MPSLimits) error {
	if _, err := c.ask(ctx, "set_device_pinned_mem_limit %d 0 %dM", pid, mebibytes(l)); err != nil {
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
	return pids(answer, maxServers)
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
		clients, err := pids(answer, maxClients)
		if err != nil || len(clients) > 0 {
			return true, err
		}
	}
	return false, nil
}

// quit tells the daemon to end.
func (c *control) quit(ctx context.Context) error {
	_, err := c.ask(ctx, "quit")
	return err
}
