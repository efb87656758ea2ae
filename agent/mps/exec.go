package mps

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/proc"
)

// Only this file of the package runs programs: the driver's nvidia-cuda-mps-control, as the daemon of a GPU and as the
// client that sends it commands. Program.prepare has checked that only root can change it.

// maxAnswer bounds the answer to a command, in bytes, and killDelay the time that a killed command may take to end.
const (
	maxAnswer = 64 << 10
	killDelay = time.Second
)

// process is a daemon that this process started.
type process struct {
	ended chan struct{} // closed when the daemon has ended
	err   error         // how the daemon ended
	kill  func()        // sends SIGTERM, and SIGKILL after stopLimit
}

// startDaemon starts the daemon. The kernel ends the daemon when the calling thread ends, so the caller must be locked
// to its thread. When ctx ends, the daemon goes on.
func (c *control) startDaemon(ctx context.Context, output io.Writer) (*process, error) {
	if err := proc.CloseOnExec(); err != nil {
		return nil, fmt.Errorf("start %s: %w", c.path, err)
	}
	ctx, kill := context.WithCancel(context.WithoutCancel(ctx))
	cmd := exec.CommandContext(ctx, c.path, "-f")
	cmd.Env = c.env
	cmd.Stdout, cmd.Stderr = output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGTERM}
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGTERM) }
	cmd.WaitDelay = stopLimit
	if err := cmd.Start(); err != nil {
		kill()
		return nil, fmt.Errorf("start %s: %w", c.path, err)
	}
	p := &process{ended: make(chan struct{}), kill: kill}
	go func() {
		defer close(p.ended)
		defer kill()
		p.err = cmp.Or(cmd.Wait(), errors.New("exit status 0"))
	}()
	return p, nil
}

// ask sends a command to the daemon and returns the answer.
func (c *control) ask(ctx context.Context, format string, args ...any) (string, error) {
	command := fmt.Sprintf(format, args...)
	var out, errorText limitedBuffer
	cmd := exec.CommandContext(ctx, c.path)
	cmd.Env = c.env
	cmd.Stdin = strings.NewReader(command + "\n")
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &errorText, killDelay
	err := cmd.Run()
	switch {
	case out.exceeded:
		err = fmt.Errorf("the answer has more than %d bytes", maxAnswer)
	case ctx.Err() != nil:
		err = fmt.Errorf("no answer: %w", context.Cause(ctx))
	case err != nil && errorText.String() != "":
		err = fmt.Errorf("%w: %s", err, quote(errorText.String()))
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", command, err)
	}
	return out.String(), nil
}

// limitedBuffer returns an error after maxAnswer bytes. It does not embed bytes.Buffer, whose ReadFrom would have no
// limit.
type limitedBuffer struct {
	buffer   bytes.Buffer
	exceeded bool
}

func (l *limitedBuffer) Write(b []byte) (int, error) {
	if l.buffer.Len()+len(b) > maxAnswer {
		l.exceeded = true
		return 0, errors.New("too much output")
	}
	return l.buffer.Write(b)
}

func (l *limitedBuffer) String() string { return l.buffer.String() }
