package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// This is the only file of the product that runs programs. It runs two: this program itself, which changes what it sees
// and becomes nvidia-cuda-mps-control (see Enter).

// Program is nvidia-cuda-mps-control.
type Program struct {
	// Path is on the host, without links.
	Path string
	// SearchPath is where it looks for its server.
	SearchPath []string
	// Libraries are the driver's libraries by the names that they are asked for, where the loader does not find them. It is
	// given these alone and not their directories, which may hold another C library than the host's.
	Libraries map[string]string
	// Driver is the version of the driver that it is of.
	Driver string
	// Root is where the driver is installed, or empty: the root directory.
	Root string
}

// environment is that of the program when it works for a GPU.
func (p Program) environment(own string) []string {
	dirs := dirsIn(own)
	env := []string{
		"CUDA_VISIBLE_DEVICES=" + filepath.Base(own),
		"CUDA_MPS_PIPE_DIRECTORY=" + dirs.Pipe,
		"CUDA_MPS_LOG_DIRECTORY=" + dirs.Log,
		"PATH=" + strings.Join(p.SearchPath, ":"),
	}
	if len(p.Libraries) > 0 {
		env = append(env, "LD_LIBRARY_PATH="+filepath.Join(filepath.Dir(own), librariesName))
	}
	return env
}

// Helper is how this program is run to become another. Enter is called with what follows Args on its command line.
type Helper struct {
	// Path is the program, such as /proc/self/exe, and Args its name and first arguments.
	Path string
	Args []string
}

// dress makes cmd this program, about to become nvidia-cuda-mps-control for a GPU.
func (h Helper) dress(cmd *exec.Cmd, own string, p Program, options ...string) *exec.Cmd {
	cmd.Args = slices.Concat(h.Args, options, []string{"--driver-dir", p.Root, "--", own, p.Path}, p.environment(own))
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// startDaemon starts a GPU's daemon. It is this process's child as long as that lives, and nothing else of it: what ends
// the plugin does not end it.
func (h Helper) startDaemon(own string, p Program) (*process, error) {
	output, err := openOutput(own)
	if err != nil {
		return nil, fmt.Errorf("open what the daemon prints to: %w", err)
	}
	defer output.Close()
	cmd := h.dress(exec.Command(h.Path), own, p, "--start", "--driver", p.Driver)
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the daemon: %w", err)
	}
	// Nobody else waits for it, so that its number stays its own.
	daemon, err := openProcess(cmd.Process.Pid, nil)
	if err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	if err := cmd.Process.Release(); err != nil {
		return daemon, fmt.Errorf("let go of the daemon: %w", err)
	}
	return daemon, nil
}

// maxAnswer bounds the answer to a command, in bytes, and afterKill how long its end may take when it is too late.
const (
	maxAnswer = 64 << 10
	afterKill = time.Second
)

// ask gives a GPU's daemon a command and returns the answer.
func (h Helper) ask(ctx context.Context, own string, p Program, command string) (string, error) {
	var answer, complaint limited
	cmd := h.dress(exec.CommandContext(ctx, h.Path), own, p)
	cmd.Stdin = strings.NewReader(command + "\n")
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &answer, &complaint, afterKill
	err := cmd.Run()
	switch {
	case answer.exceeded:
		err = fmt.Errorf("the answer has more than %d bytes", maxAnswer)
	case ctx.Err() != nil:
		err = fmt.Errorf("no answer: %w", context.Cause(ctx))
	case err != nil && complaint.String() != "":
		err = fmt.Errorf("%w: %s", err, excerpt(complaint.String()))
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", command, err)
	}
	return answer.String(), nil
}

// limited takes text up to a limit.
type limited struct {
	bytes.Buffer
	exceeded bool
}

func (l *limited) Write(b []byte) (int, error) {
	if l.Len()+len(b) > maxAnswer {
		l.exceeded = true
		return 0, errors.New("too much")
	}
	return l.Buffer.Write(b)
}
