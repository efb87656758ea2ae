package hook

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/hook/rootfs"
	"gpu-cdi-plugin/internal/host"
)

const (
	maxState  = 4 << 20  // bytes; includes the annotations, for which Kubernetes allows 256 KiB
	maxConfig = 64 << 20 // bytes
)

// State is the part of the OCI state that the hook needs.
type State struct {
	ID string `json:"id"`
	// PID is the ID of the container's process in the hook's PID namespace, or 0 if the state has none.
	PID int `json:"pid"`
	// Bundle is the directory of config.json.
	Bundle string `json:"bundle"`
	// Root is the container's root from config.json. crun and some others add it to the state, runc does not.
	Root string `json:"root"`
	// Annotations are the annotations of config.json as the runtime read them.
	Annotations map[string]string `json:"annotations"`
}

// ReadState reads the OCI state that a runtime writes to a hook's standard input. It stops at the end of the JSON
// value, since some runtimes do not close the pipe.
func ReadState(r io.Reader) (*State, error) {
	s := &State{}
	limited := &io.LimitedReader{R: r, N: maxState}
	if err := json.NewDecoder(limited).Decode(s); err != nil {
		if limited.N == 0 {
			err = fmt.Errorf("larger than %d bytes", maxState)
		} else if errors.Is(err, io.EOF) {
			err = errors.New("the input is empty")
		}
		return nil, fmt.Errorf("read the OCI state: %w", err)
	}
	if s.ID == "" {
		return nil, errors.New("read the OCI state: it has no id")
	}
	return s, nil
}

// openRoot opens the container's root. The root must be a mount point in a mount namespace other than the host's.
func openRoot(s *State, h host.Host) (*rootfs.Root, error) {
	path, err := s.findRoot()
	if err != nil {
		return nil, fmt.Errorf("find the container's root: %w", err)
	}
	root, err := rootfs.Open(path, h.Dev())
	if err != nil {
		return nil, fmt.Errorf("open the container's root: %w", err)
	}
	if err := root.CheckContainer(); err != nil {
		_ = root.Close()
		return nil, fmt.Errorf("%s is not a container's root in the createContainer stage, nothing was changed: %w",
			path, err)
	}
	return root, nil
}

// findRoot returns the path of the container's root on the host. If the state does not have the path, the result is
// ".", the working directory: runc makes the root the working directory, and it stays the root even if the path is
// replaced meanwhile. If the working directory is the bundle or not a mount point, findRoot reads the path from the
// bundle's config.json.
func (s *State) findRoot() (string, error) {
	path := s.Root
	if path == "" {
		if !filepath.IsAbs(s.Bundle) {
			return "", fmt.Errorf("the state's bundle %q is not an absolute path", s.Bundle)
		}
		if isMountPoint(".") && !isWorkingDir(s.Bundle) {
			return ".", nil
		}
		config := filepath.Join(s.Bundle, "config.json")
		data, err := rootfs.ReadHostFile(config, maxConfig)
		if err != nil {
			return "", fmt.Errorf("%w, and the working directory is not a container's root", err)
		}
		if path, err = parseRoot(data); err != nil {
			return "", fmt.Errorf("%s: %w, and the working directory is not a container's root", config, err)
		}
	}
	if !filepath.IsAbs(path) {
		if !filepath.IsAbs(s.Bundle) || !filepath.IsLocal(path) {
			return "", fmt.Errorf("the root %q is not inside the bundle %q", path, s.Bundle)
		}
		path = filepath.Join(s.Bundle, path)
	}
	if filepath.Clean(path) == "/" {
		return "", fmt.Errorf("%q cannot be a container's root", path)
	}
	return path, nil
}

// parseRoot returns root.path of a config.json.
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

func isWorkingDir(path string) bool {
	dir, err := os.Stat(path)
	if err != nil {
		return false
	}
	own, err := os.Stat(".")
	return err == nil && os.SameFile(dir, own)
}

func isMountPoint(path string) bool {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_TYPE, &st); err != nil {
		return false
	}
	return st.Attributes&st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0
}
