package mps

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

// This is the only file of the package that runs programs. It runs this program itself, which confines itself and
// becomes nvidia-cuda-mps-control (see Enter).

const ownProgram = "/proc/self/exe"

// setUp has a command that runs this program become nvidia-cuda-mps-control for the GPU: the daemon, or the client that
// sends it commands. It has a session of its own, so that a daemon outlives the plugin.
func (c *control) setUp(cmd *exec.Cmd, daemon bool) error {
	p := c.program
	paths := slices.Concat([]string{c.dir, p.Path, p.Root}, p.SearchPath)
	for name, path := range p.Libraries {
		paths = append(paths, name, path)
	}
	for _, path := range paths {
		if !utf8.ValidString(path) {
			return fmt.Errorf("run %s: the path %q is not UTF-8, which MPS needs", ControlProgram, path)
		}
	}
	arg, err := json.Marshal(entry{Dir: c.dir, Daemon: daemon, Program: c.program})
	cmd.Args = append(slices.Clone(c.helper), string(arg))
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return err
}

// startDaemon starts the GPU's daemon. It is a child of this process until this process ends.
func (c *control) startDaemon() (*process, error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_TRUNC | os.O_APPEND | unix.O_NOFOLLOW
	output, err := os.OpenFile(filepath.Join(c.dir, outputName), flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the daemon's output: %w", err)
	}
	defer output.Close()
	cmd := exec.Command(ownProgram)
	if err := c.setUp(cmd, true); err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the daemon: %w", err)
	}
	// Nothing has waited for the child yet, so the PID is still its own.
	daemon, err := openProcess(cmd.Process.Pid, nil)
	if err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	_ = cmd.Process.Release()
	return daemon, nil
}

// maxAnswer bounds the answer to a command, in bytes, and killDelay the time until a killed command has ended.
const (
	maxAnswer = 64 << 10
	killDelay = time.Second
)

// ask sends a command to the GPU's daemon and returns the answer.
func (c *control) ask(ctx context.Context, format string, args ...any) (string, error) {
	command := fmt.Sprintf(format, args...)
	var answer, errorText limitedBuffer
	cmd := exec.CommandContext(ctx, ownProgram)
	if err := c.setUp(cmd, false); err != nil {
		return "", err
	}
	cmd.Stdin = strings.NewReader(command + "\n")
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &answer, &errorText, killDelay
	err := cmd.Run()
	switch {
	case answer.exceeded:
		err = fmt.Errorf("the answer has more than %d bytes", maxAnswer)
	case ctx.Err() != nil:
		err = fmt.Errorf("no answer: %w", context.Cause(ctx))
	case err != nil && errorText.String() != "":
		err = fmt.Errorf("%w: %s", err, excerpt(errorText.String()))
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", command, err)
	}
	return answer.String(), nil
}

// limitedBuffer refuses more than maxAnswer bytes. It does not embed its buffer, whose ReadFrom would have no limit.
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

// String is what was written.
func (l *limitedBuffer) String() string { return l.buffer.String() }
