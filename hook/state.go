package hook

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/rootfs"
)

const (
	maxState  = 4 << 20  // bytes; it carries the annotations, of which Kubernetes allows 256 KiB
	maxConfig = 64 << 20 // bytes
)

// State is the part of the OCI state that the hook uses.
type State struct {
	ID string `json:"id"`
	// Bundle is the directory of config.json.
	Bundle string `json:"bundle"`
	// Root is the container's root, as it stands in config.json. Only crun and some others say it.
	Root string `json:"root"`
}

// ReadState reads the OCI state, as runtimes write it to a hook's standard input. Its end is the end of the JSON value,
// since not every runtime closes the pipe.
func ReadState(r io.Reader) (*State, error) {
	s := &State{}
	limited := &io.LimitedReader{R: r, N: maxState}
	if err := json.NewDecoder(limited).Decode(s); err != nil {
		if limited.N == 0 {
			err = fmt.Errorf("larger than %d bytes", maxState)
		} else if errors.Is(err, io.EOF) {
			err = errors.New("there is none")
		}
		return nil, fmt.Errorf("read the OCI state: %w", err)
	}
	if s.ID == "" {
		return nil, errors.New("read the OCI state: it has no id")
	}
	return s, nil
}

// findRoot is the path of the container's root on the host, or ".". Where the runtime does not say it, it is the working
// directory, which runc sets: whatever becomes of its path, that stays the container's. Where the working directory is
// the bundle or no mount point, it is what the bundle's config.json says.
func (s *State) findRoot() (string, error) {
	if s.Root != "" {
		return s.resolve(s.Root)
	}
	if !filepath.IsAbs(s.Bundle) {
		return "", fmt.Errorf("the state's bundle %q is not an absolute path", s.Bundle)
	}
	if isMountRoot(".") && !isWorkingDir(s.Bundle) {
		return ".", nil
	}
	path, err := rootFromConfig(filepath.Join(s.Bundle, "config.json"))
	if err != nil {
		return "", fmt.Errorf("%w, and the working directory is no container's root", err)
	}
	return s.resolve(path)
}

func isWorkingDir(path string) bool {
	dir, err := os.Stat(path)
	if err != nil {
		return false
	}
	own, err := os.Stat(".")
	return err == nil && os.SameFile(dir, own)
}

func rootFromConfig(config string) (string, error) {
	data, err := rootfs.ReadHostFile(config, maxConfig)
	if err != nil {
		return "", err
	}
	path, err := parseRoot(data)
	if err != nil {
		return "", fmt.Errorf("%s: %w", config, err)
	}
	return path, nil
}

func parseRoot(data []byte) (string, error) {
	var config struct {
		Root struct {
			Path string `json:"path"`
		} `json:"root"`
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return "", err
	}
	if config.Root.Path == "" {
		return "", errors.New("it has no root.path")
	}
	return config.Root.Path, nil
}

// resolve makes a root's path absolute; a relative one is in the bundle. It refuses what cannot be a container's root.
func (s *State) resolve(path string) (string, error) {
	if !filepath.IsAbs(path) {
		if !filepath.IsAbs(s.Bundle) || !filepath.IsLocal(path) {
			return "", fmt.Errorf("root %q leads out of the bundle %q", path, s.Bundle)
		}
		path = filepath.Join(s.Bundle, path)
	}
	if filepath.Clean(path) == "/" {
		return "", fmt.Errorf("%q cannot be a container's root", path)
	}
	return path, nil
}

func isMountRoot(path string) bool {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_TYPE, &st); err != nil {
		return false
	}
	return st.Attributes&st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0
}
