package podresources

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/kubelet"
)

// maxFile bounds a file of the kubelet, in bytes. A pod's entry has a few kilobytes.
const maxFile = 64 << 20

// Version identifies what the kubelet has written: it replaces its files. The zero value means that there is no file.
type Version struct {
	Inode    uint64
	Modified time.Time
}

// file is a file of the kubelet, which is read again only after it was replaced. Its zero value has not been read.
type file[T any] struct {
	mu      sync.Mutex
	version Version
	content *T // nil if the file does not exist
	err     error
}

// read returns the content of the file at a path, or nil if it does not exist.
func (f *file[T]) read(path string, parse func([]byte) (*T, error)) (*T, Version, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	version, err := versionOf(path)
	if err != nil {
		return nil, Version{}, err
	}
	if version == (Version{}) {
		f.version, f.content, f.err = Version{}, nil, nil
		return nil, Version{}, nil
	}
	if version == f.version {
		return f.content, f.version, f.err
	}
	data, err := fileio.ReadFile(path, maxFile)
	if err != nil { // the next call tries again
		return nil, version, err
	}
	f.version = version
	if f.content, f.err = parse(data); f.err != nil {
		f.content, f.err = nil, fmt.Errorf("%s: %w", path, f.err)
	}
	return f.content, f.version, f.err
}

// versionOf returns the version of a file. A later version may be read, which the next call then reads again.
func versionOf(path string) (Version, error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Version{}, nil
	}
	if err != nil {
		return Version{}, err
	}
	v := Version{Modified: info.ModTime()}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		v.Inode = stat.Ino
	}
	return v, nil
}

// Checkpoint returns the kubelet's record of the devices of containers, or nil if it does not exist. The caller must
// not change it.
func (s *Source) Checkpoint() (*kubelet.Checkpoint, Version, error) {
	return s.checkpoint.read(filepath.Join(s.PluginDir, kubelet.CheckpointName), kubelet.ReadCheckpoint)
}

// Claims returns the kubelet's record of ResourceClaims, which is empty if it does not exist. The caller must not
// change it.
func (s *Source) Claims() ([]kubelet.Claim, error) {
	root := filepath.Dir(filepath.Dir(s.Path()))
	list, _, err := s.claims.read(filepath.Join(root, kubelet.ClaimsName), func(data []byte) (*[]kubelet.Claim, error) {
		list, err := kubelet.ParseClaims(data)
		if err != nil {
			return nil, err
		}
		return &list, nil
	})
	if list == nil {
		return nil, err
	}
	return *list, err
}
