package sim

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// PCIReset is the result of a write to the reset file of a GPU's PCI device.
type PCIReset struct {
	// Delay is how long the write blocks.
	Delay time.Duration
	// Refuse makes the write fail, with EPIPE instead of the kernel's error.
	Refuse bool
}

// resetPoll is how often a wait for the writer checks whether the context has ended.
const resetPoll = 20 * time.Millisecond

// ServePCIReset acts as the kernel for one reset of a GPU: it waits until a program opens the reset file, delays its
// write, and then completes or fails it. The file is a FIFO until ServePCIReset returns, then it is as before. It ends
// when ctx ends.
func (n *Node) ServePCIReset(ctx context.Context, gpu int, r PCIReset) (err error) {
	if err := n.checkGPU(gpu); err != nil {
		return err
	}
	g := &n.machine.GPUs[gpu]
	if err := n.servePCIReset(ctx, filepath.Join(n.root, g.sysDir(), "reset"), r); err != nil || r.Refuse {
		return errors.Join(err, n.makeResetFile(g, ResetWorks))
	}
	return nil
}

func (n *Node) servePCIReset(ctx context.Context, path string, r PCIReset) (err error) {
	next := path + ".next"
	if err := unix.Mkfifo(next, 0o200); err != nil {
		return fmt.Errorf("make the FIFO %s: %w", next, err)
	}
	defer os.Remove(next) // fails once next was renamed
	pipe, err := openFullPipe(next)
	if err != nil {
		return fmt.Errorf("open the FIFO %s: %w", next, err)
	}
	defer pipe.Close()
	watch, err := watchOpens(next)
	if err != nil {
		return fmt.Errorf("watch the FIFO %s: %w", next, err)
	}
	defer func() { err = errors.Join(err, unix.Close(watch)) }()
	if err := os.Rename(next, path); err != nil { // programs can open it from now on
		return err
	}
	if err := waitForOpen(ctx, watch); err != nil {
		return fmt.Errorf("wait for a writer of %s: %w", path, err)
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(r.Delay):
	}
	if r.Refuse {
		return nil // the write fails without a reader
	}
	// The library resets the GPU when it finds this file, which must happen before the write returns.
	if err := os.WriteFile(next, []byte("1\n"), 0o200); err != nil {
		return err
	}
	if err := os.Rename(next, path); err != nil {
		return err
	}
	return drain(ctx, pipe)
}

// openFullPipe opens a full FIFO, so that a write blocks until a program reads.
func openFullPipe(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	pipe := os.NewFile(uintptr(fd), path)
	size, err := unix.FcntlInt(uintptr(fd), unix.F_SETPIPE_SZ, os.Getpagesize())
	if err != nil {
		return nil, errors.Join(err, pipe.Close())
	}
	if _, err := unix.Write(fd, make([]byte, size)); err != nil {
		return nil, errors.Join(err, pipe.Close())
	}
	return pipe, nil
}

// watchOpens returns an inotify descriptor that reports when a program opens a file.
func watchOpens(path string) (int, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return -1, err
	}
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_OPEN); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

func waitForOpen(ctx context.Context, watch int) error {
	for ctx.Err() == nil {
		fds := []unix.PollFd{{Fd: int32(watch), Events: unix.POLLIN}}
		ready, err := unix.Poll(fds, int(resetPoll.Milliseconds()))
		if err != nil && !errors.Is(err, unix.EINTR) {
			return err
		}
		if ready > 0 {
			return nil
		}
	}
	return context.Cause(ctx)
}

// drain reads what openFullPipe wrote, and then what the program writes.
func drain(ctx context.Context, pipe *os.File) error {
	buffer := make([]byte, os.Getpagesize())
	for ctx.Err() == nil {
		if err := pipe.SetReadDeadline(time.Now().Add(resetPoll)); err != nil {
			return err
		}
		size, err := pipe.Read(buffer)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		if len(bytes.Trim(buffer[:size], "\x00")) > 0 {
			return nil
		}
	}
	return context.Cause(ctx)
}
