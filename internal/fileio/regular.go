package fileio

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// OpenRegular opens a regular file for reading, and returns its FileInfo. With O_NONBLOCK it does not wait for the
// writer of a FIFO.
func OpenRegular(path string) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := stat(f)
	if err != nil {
		_ = f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// ReadFile reads a regular file of at most limit bytes.
func ReadFile(path string, limit int64) ([]byte, error) {
	f, _, err := OpenRegular(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, _, err := ReadRegular(f, limit)
	return data, err
}

// ReadRegular reads an open file of at most limit bytes from its beginning, and returns its FileInfo. The file must
// have been opened with O_NONBLOCK. A file that is not regular is an error.
func ReadRegular(f *os.File, limit int64) ([]byte, fs.FileInfo, error) {
	info, err := stat(f)
	if err != nil {
		return nil, nil, err
	}
	if info.Size() > limit {
		return nil, nil, fmt.Errorf("%s has %d bytes, the limit is %d", f.Name(), info.Size(), limit)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, nil, err
	}
	if int64(len(data)) > limit {
		return nil, nil, fmt.Errorf("%s grew beyond the limit of %d bytes", f.Name(), limit)
	}
	return data, info, nil
}

// ReadInput reads at most limit bytes of a file that a user named. The file may also be a pipe or a device, such as a
// shell's <(command). The writer of a pipe must close it within the time. An empty pipe is an error: most often
// another read has emptied it.
func ReadInput(path string, limit int64, within time.Duration) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	_ = f.SetReadDeadline(time.Now().Add(within)) // fails for a regular file, which needs no deadline
	var data []byte
	if err = awaitWriter(f, within); err == nil {
		data, err = io.ReadAll(io.LimitReader(f, limit))
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, fmt.Errorf("read %s: its writer did not close it within %s: %w", path, within, err)
	}
	if err != nil {
		return nil, err
	}
	if info, err := f.Stat(); err == nil && len(data) == 0 && info.Mode().Type() == fs.ModeNamedPipe {
		return nil, fmt.Errorf("read %s: the pipe is empty; a pipe can be read only once", path)
	}
	return data, nil
}

// awaitWriter waits until a file can be read: if a FIFO has no writer yet, reading it would return no data at once.
func awaitWriter(f *os.File, within time.Duration) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	end := time.Now().Add(within)
	var ready int
	var failed error
	err = conn.Control(func(fd uintptr) {
		for {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			ready, failed = unix.Poll(fds, int(max(0, time.Until(end)).Milliseconds()))
			if !errors.Is(failed, unix.EINTR) {
				return
			}
		}
	})
	if err == nil && failed == nil && ready == 0 {
		failed = os.ErrDeadlineExceeded
	}
	return errors.Join(err, failed)
}

func stat(f *os.File) (fs.FileInfo, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is %s, not a regular file", f.Name(), TypeName(info.Mode()))
	}
	return info, nil
}

// TypeName returns the name of a file's type, such as "a directory".
func TypeName(m fs.FileMode) string {
	switch m.Type() {
	case 0:
		return "a regular file"
	case fs.ModeDir:
		return "a directory"
	case fs.ModeSymlink:
		return "a symbolic link"
	case fs.ModeNamedPipe:
		return "a FIFO"
	case fs.ModeSocket:
		return "a socket"
	case fs.ModeDevice | fs.ModeCharDevice:
		return "a character device"
	case fs.ModeDevice:
		return "a block device"
	}
	return "of an unknown type"
}
