package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// This is the only file of the product that runs programs. It runs this program itself, which confines itself and
// becomes nvidia-cuda-mps-control (see Enter).

// Program is nvidia-cuda-mps-control.
type Program struct {
	// Path is the program's path on the host, without links.
	Path string
	// SearchPath has the directories in which it searches for its server.
	SearchPath []string
	// Libraries are the paths of the driver's libraries by file name and SONAME, if the loader does not find them by
	// itself. Their directories are not given to the loader: they may contain another C library than the host's.
	Libraries map[string]string
	// Driver is the version of the program's driver.
	Driver string
	// Root is the directory in which the driver is installed; empty means the root directory.
	Root string
}

// environment returns the program's environment for a GPU.
func (p Program) environment(gpuDir string) []string {
	dir, uuid := filepath.Split(gpuDir)
	dirs := dirsOf(dir, uuid)
	env := []string{
		"CUDA_VISIBLE_DEVICES=" + uuid,
		"CUDA_MPS_PIPE_DIRECTORY=" + dirs.Pipe,
		"CUDA_MPS_LOG_DIRECTORY=" + dirs.Log,
		"PATH=" + strings.Join(p.SearchPath, ":"),
	}
	if len(p.Libraries) > 0 {
		env = append(env, "LD_LIBRARY_PATH="+filepath.Join(dir, librariesName))
	}
	return env
}

// Helper runs this program so that it calls Enter with what follows Args on its command line.
type Helper struct {
	// Path is the program, such as /proc/self/exe, and Args its name and first arguments.
	Path string
	Args []string
}

// setUp sets the arguments and attributes of a command that becomes nvidia-cuda-mps-control for a GPU.
func (h Helper) setUp(cmd *exec.Cmd, gpuDir string, p Program, options ...string) {
	own := []string{"--driver-dir", p.Root, "--", gpuDir, p.Path}
	cmd.Args = slices.Concat(h.Args, options, own, p.environment(gpuDir))
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
}

// startDaemon starts a GPU's daemon. It is a child of this process but in a session of its own, so that it outlives the
// plugin.
func (h Helper) startDaemon(gpuDir string, p Program) (*process, error) {
	const flags = os.O_WRONLY | os.O_CREATE | os.O_TRUNC | os.O_APPEND | unix.O_NOFOLLOW
	output, err := os.OpenFile(filepath.Join(gpuDir, outputName), flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the daemon's output: %w", err)
	}
	defer output.Close()
	cmd := exec.Command(h.Path)
	h.setUp(cmd, gpuDir, p, "--start", "--driver", p.Driver)
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the daemon: %w", err)
	}
	// Nothing has waited for the child yet, so the PID is still its own.
	daemon, err := openProcess(cmd.Process.Pid, nil)
	if err != nil {
		return nil, errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	if err := cmd.Process.Release(); err != nil {
		return daemon, fmt.Errorf("release the daemon: %w", err)
	}
	return daemon, nil
}

// maxAnswer bounds the answer to a command, in bytes, and killDelay the time until a killed command has ended.
const (
	maxAnswer = 64 << 10
	killDelay = time.Second
)

// ask sends a command to a GPU's daemon and returns the answer.
func (h Helper) ask(ctx context.Context, gpuDir string, p Program, command string) (string, error) {
	var answer, errorText limitedBuffer
	cmd := exec.CommandContext(ctx, h.Path)
	h.setUp(cmd, gpuDir, p)
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

// limitedBuffer refuses more than maxAnswer bytes.
type limitedBuffer struct {
	bytes.Buffer
	exceeded bool
}

func (l *limitedBuffer) Write(b []byte) (int, error) {
	if l.Len()+len(b) > maxAnswer {
		l.exceeded = true
		return 0, errors.New("too much output")
	}
	return l.Buffer.Write(b)
}
