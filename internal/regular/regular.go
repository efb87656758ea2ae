// Package regular opens and reads regular files only, and never waits: a FIFO or a device in place of a file is an
// error, and so is a file that is larger than the caller's limit.
package regular

import (
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Open opens a regular file for reading and returns what it is. O_NONBLOCK keeps the open of a FIFO from waiting for a
// writer.
func Open(path string) (*os.File, fs.FileInfo, error) {
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
	f, _, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, _, err := Read(f, limit)
	return data, err
}

// Read reads an open file of at most limit bytes from its beginning, and returns what it is. The file was opened with
// O_NONBLOCK; one that is not regular is an error.
func Read(f *os.File, limit int64) ([]byte, fs.FileInfo, error) {
	info, err := stat(f)
	if err != nil {
		return nil, nil, err
	}
	if info.Size() > limit {
		return nil, nil, fmt.Errorf("%s has %d bytes, the limit is %d", f.Name(), info.Size(), limit)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("%s grew beyond the limit of %d bytes", f.Name(), limit)
	}
	if err != nil {
		return nil, nil, err
	}
	return data, info, nil
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

// TypeName names the type of a file, such as "a directory".
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
