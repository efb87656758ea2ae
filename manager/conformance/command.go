package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// This is the only file of the package that runs programs: those that the user of the checks names. They run with the
// user's rights, without a shell.

const (
	// dirPlaceholder stands for the directory of kubelet.sock, and registryPlaceholder for the registry.
	dirPlaceholder      = "{dir}"
	registryPlaceholder = "{registry}"
	// dirVariable names the directory in the environment of the plugin.
	dirVariable = "DEVICE_PLUGIN_DIR"
	// fixedDir is the directory of plugins that have no option for it.
	fixedDir = "/var/lib/kubelet/device-plugins"
	// outputDelay is how long output is waited for after the end of a program whose children keep it open.
	outputDelay = time.Second
)

// command is a plugin that was started here.
type command struct {
	process *os.Process
	done    chan struct{} // closed when the program has ended and was waited for
	state   string        // how it ended, after done
}

// startCommand starts a plugin that registers in dir, for which a placeholder stands.
func startCommand(args []string, placeholder, dir string, output io.Writer) (*command, error) {
	fixed := !mentions(args, placeholder) && dir != fixedDir && os.Geteuid() == 0
	words := slices.Clone(args)
	for i := range words {
		words[i] = strings.ReplaceAll(words[i], placeholder, dir)
	}
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Env = append(os.Environ(), dirVariable+"="+dir)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = output, output, outputDelay
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	c := &command{done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		// The signal at the parent's death is sent when this thread ends, and the thread may have mounts of its own: it
		// stays until the program has ended, and is not used for anything else.
		runtime.LockOSThread()
		defer close(c.done)
		remove := func() {}
		if fixed {
			var err error
			if remove, err = mountFixed(dir); err != nil {
				started <- err
				return
			}
		}
		defer remove()
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		c.process = cmd.Process
		started <- nil
		_ = cmd.Wait() // the state says it
		c.state = cmd.ProcessState.String()
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotStarted, err)
	}
	return c, nil
}

func mentions(args []string, placeholder string) bool {
	return slices.ContainsFunc(args, func(arg string) bool { return strings.Contains(arg, placeholder) })
}

// mountFixed gives the calling thread, and the programs that it starts, mounts of their own in which the kubelet's
// directory is dir. The function that it returns removes the directories that it had to make.
func mountFixed(dir string) (remove func(), err error) {
	var made []string
	mounted := false
	remove = func() {
		if mounted {
			_ = unix.Unmount(fixedDir, unix.MNT_DETACH) // only for this thread: programs keep their mounts
		}
		for _, d := range made {
			_ = os.Remove(d) // what is not empty is in use
		}
	}
	for d := fixedDir; ; d = filepath.Dir(d) {
		if _, err := os.Stat(d); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		made = append(made, d)
	}
	if err := os.MkdirAll(fixedDir, 0o755); err != nil {
		return remove, err
	}
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		remove()
		return remove, fmt.Errorf("make a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		remove()
		return remove, fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount(dir, fixedDir, "", unix.MS_BIND, ""); err != nil {
		remove()
		return remove, fmt.Errorf("mount %s on %s: %w", dir, fixedDir, err)
	}
	mounted = true
	return remove, nil
}

// ended waits for at most limit until the program has ended, and returns how.
func (c *command) ended(limit time.Duration) (state string, ok bool) {
	select {
	case <-c.done:
	case <-time.After(limit):
	}
	select { // the first may choose either, if both have come
	case <-c.done:
		return c.state, true
	default:
		return "", false
	}
}

// terminate sends SIGTERM and waits for the end.
func (c *command) terminate(limit time.Duration) (state string, ok bool) {
	_ = c.process.Signal(syscall.SIGTERM) // it may have ended
	return c.ended(limit)
}

// kill ends the program, if it runs, and waits.
func (c *command) kill() {
	_ = c.process.Kill() // it may have ended
	<-c.done
}

// runCommand runs a program to its end.
func runCommand(ctx context.Context, args []string, output io.Writer) error {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = output, output, outputDelay
	return cmd.Run()
}
