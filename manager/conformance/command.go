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

// Only this file of the package runs programs: those that the user names, with the user's rights and without a shell.

const (
	// dirPlaceholder stands for the directory of kubelet.sock, registryPlaceholder for the registry.
	dirPlaceholder      = "{dir}"
	registryPlaceholder = "{registry}"
	// dirVariable is the environment variable that gives the plugin the directory.
	dirVariable = "DEVICE_PLUGIN_DIR"
	// fixedDir is the directory of plugins that have no option for another one.
	fixedDir = "/var/lib/kubelet/device-plugins"
	// outputDelay is how long to wait for output after a program has ended, if its children keep the output open.
	outputDelay = time.Second
)

// command is a plugin that the checks started.
type command struct {
	process *os.Process
	done    chan struct{} // closed when the program has ended
	state   string        // how the program ended; set before done is closed
}

// startCommand starts a plugin that registers in dir. Where an argument has the placeholder, it is replaced by dir.
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
		// The signal at the parent's death (PDEATHSIG) is sent when this thread ends, and the thread may have its own
		// mounts. So the goroutine keeps the thread until the program has ended, and uses it for nothing else.
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
		_ = cmd.Wait() // the process state has the result
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

// mountFixed gives the calling thread, and the programs that it starts, their own mounts, with dir in place of the
// kubelet's directory. The function that it returns removes the directories that it created.
func mountFixed(dir string) (remove func(), err error) {
	var made []string
	mounted := false
	remove = func() {
		if mounted {
			_ = unix.Unmount(fixedDir, unix.MNT_DETACH) // only for this thread: programs keep their mounts
		}
		for _, d := range made {
			_ = os.Remove(d) // a directory that is in use is not empty, and stays
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

// ended waits until the program has ended, but not longer than `limit`, and returns how it ended.
func (c *command) ended(limit time.Duration) (state string, ok bool) {
	select {
	case <-c.done:
	case <-time.After(limit):
	}
	select { // if both were ready, the first select may have chosen either
	case <-c.done:
		return c.state, true
	default:
		return "", false
	}
}

// terminate sends SIGTERM and waits until the program has ended, but not longer than `limit`.
func (c *command) terminate(limit time.Duration) (state string, ok bool) {
	_ = c.process.Signal(syscall.SIGTERM) // the process may have ended already
	return c.ended(limit)
}

// kill ends the program if it runs, and waits until it has ended.
func (c *command) kill() {
	_ = c.process.Kill() // the process may have ended already
	<-c.done
}

// runCommand runs a program to its end.
func runCommand(ctx context.Context, args []string, output io.Writer) error {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = output, output, outputDelay
	return cmd.Run()
}
