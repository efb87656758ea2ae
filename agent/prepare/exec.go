package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/trust"
)

// Only this file of the package runs programs: the driver's nvidia-smi and nvidia-modprobe, and the program that an
// administrator has configured. It checks that only root can change them, and gives each its own environment.

// Program is a program that runs as root.
type Program struct {
	// Path is the absolute path of the program, without links in Root.
	Path string
	Args []string
	// Env is added to the environment, which has only PATH and LC_ALL and no variables of this process.
	Env []string
	// Root is the program's root directory; empty means that of this process.
	Root string
	// Library is the path on the host of a library of the driver. If Root does not have the program's dynamic loader,
	// as where only the driver is installed, the program runs in the root of this process, and that one's loader
	// searches the library's directory. Empty means that it does not run then.
	Library string
	// Timeout is how long the program may run, within the caller's deadline; 0 means 10 s.
	Timeout time.Duration

	inherits []*fileio.Lock // locks that the program also holds until it ends
}

const (
	defaultTimeout = 10 * time.Second
	// killDelay is how long a killed program may take to end.
	killDelay = time.Second
	maxOutput = 64 << 10 // bytes; what follows is dropped
)

// exec runs the administrator's program.
func (x *target) exec(ctx context.Context) (string, error) {
	p := x.task.rules.Exec
	p.Env = append([]string{
		"GPU_DEVICE_UUID=" + x.d.UUID,
		"GPU_UUID=" + x.d.GPU,
		"GPU_PCI_BUS_ID=" + x.d.PCIBusID,
		"GPU_POLICY=" + string(x.task.rules.Policy),
		"GPU_SHARED=" + x.shared,
	}, p.Env...)
	output, status, err := p.Run(ctx, x.runner.opts.Check)
	if err == nil && status != 0 {
		err = fmt.Errorf("exit status %d", status)
	}
	if err != nil {
		return "", fmt.Errorf("run %s: %w%s", p.Path, err, quoted(output))
	}
	return strings.TrimSpace(output), nil
}

// quoted formats the end of a program's output, which says why it failed, for an error.
func quoted(output string) string {
	const most = 300
	text := plain(output[max(0, len(output)-most):])
	if text == "" {
		return ""
	}
	return ": " + text
}

// Run runs the program. It returns the output, also with an error, and the exit status, which is -1 after a signal.
// When ctx ends or the program's time is over, Run kills the program's process group. It returns once the program has
// ended, which a hanging driver can prevent.
func (p *Program) Run(ctx context.Context, check func(string) error) (output string, status int, err error) {
	if check == nil {
		check = trust.RootFile
	}
	if !filepath.IsAbs(p.Path) || filepath.Clean(p.Path) != p.Path {
		return "", 0, fmt.Errorf("%q is not the absolute path of a program", p.Path)
	}
	if err := check(filepath.Join("/", p.Root, p.Path)); err != nil {
		return "", 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(p.Timeout, defaultTimeout))
	defer cancel()
	var buffer boundedBuffer
	cmd := exec.CommandContext(ctx, p.Path, p.Args...)
	cmd.Dir = "/"
	cmd.Env = append(
		[]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"},
		p.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Chroot: p.Root}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &buffer, &buffer, killDelay
	for _, l := range p.inherits {
		cmd.ExtraFiles = append(cmd.ExtraFiles, l.File())
	}
	if len(p.inherits) > 0 { // if this process ends first, writing to a pipe would end the program
		fd, err := unix.MemfdCreate(filepath.Base(p.Path), unix.MFD_CLOEXEC)
		if err != nil {
			return "", 0, fmt.Errorf("make a file for the program's output: %w", err)
		}
		file := os.NewFile(uintptr(fd), p.Path)
		defer file.Close()
		cmd.Stdout, cmd.Stderr = file, file
	}
	if err := proc.CloseOnExec(); err != nil {
		return "", 0, err
	}
	err = cmd.Run()
	if p.Library != "" && errors.Is(err, fs.ErrNotExist) { // the program exists, so its loader does not
		return p.runOutside(ctx, check)
	}
	if file, ok := cmd.Stdout.(*os.File); ok {
		_, _ = io.Copy(&buffer, io.NewSectionReader(file, 0, maxOutput))
	}
	exit, exited := errors.AsType[*exec.ExitError](err)
	switch {
	case err != nil && ctx.Err() != nil:
		err = fmt.Errorf("killed, since it took too long: %w", context.Cause(ctx))
	case exited:
		return string(buffer.text), exit.ExitCode(), nil
	}
	return string(buffer.text), 0, err
}

// runOutside runs the program in the root of this process.
func (p *Program) runOutside(ctx context.Context, check func(string) error) (output string, status int, err error) {
	if err := check(p.Library); err != nil { // its directory too, from which the loader takes other libraries
		return "", 0, err
	}
	outside := *p
	outside.Path, outside.Root, outside.Library = filepath.Join(p.Root, p.Path), "", ""
	outside.Env = append(slices.Clip(p.Env), "LD_LIBRARY_PATH="+filepath.Dir(p.Library))
	return outside.Run(ctx, check)
}

// boundedBuffer keeps the first maxOutput bytes and drops the rest. Its only method that takes bytes is Write: io.Copy
// would use another one.
type boundedBuffer struct{ text []byte }

func (b *boundedBuffer) Write(data []byte) (int, error) {
	b.text = append(b.text, data[:min(len(data), maxOutput-len(b.text))]...)
	return len(data), nil
}
