package podresources

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/proc"
)

// ErrUnknown means that a kubelet uses the host, but its PodResources socket does not exist where it is expected, so
// that the containers with devices are unknown.
var ErrUnknown = errors.New("pod-resources-socket must name the kubelet's PodResources socket")

// Source finds the kubelet of a host, lists its containers, and reads the files in which it records their devices.
type Source struct {
	Host host.Host
	// Socket is the PodResources socket; empty means detected.
	Socket string
	// PluginDir is the kubelet's directory of device plugins.
	PluginDir string

	checkpoint file[kubelet.Checkpoint]
	claims     file[[]kubelet.Claim]
}

// Answer is what a kubelet says of its pods.
type Answer struct {
	// Holders are the containers that have devices or claims.
	Holders []Holder
	// Runs says that a kubelet has answered. Otherwise the host has none.
	Runs bool
}

// List is like the function List, but also notices that the host has no kubelet. The error may wrap ErrUnknown.
func (s *Source) List(ctx context.Context) (Answer, error) {
	socket := s.Path()
	list, err := List(ctx, socket)
	if err == nil {
		return Answer{list, true}, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return Answer{}, err
	}
	other := filepath.Join(s.PluginDir, "kubelet.sock")
	switch _, err := os.Lstat(other); {
	case err == nil:
		return Answer{}, fmt.Errorf("%s does not exist although %s does: %w", socket, other, ErrUnknown)
	case !errors.Is(err, fs.ErrNotExist):
		return Answer{}, err
	}
	return Answer{}, nil
}

// Allocatable is like the function Allocatable.
func (s *Source) Allocatable(ctx context.Context) (map[string]map[string]bool, error) {
	return Allocatable(ctx, s.Path())
}

// Path returns the socket. The kubelet makes it below its root directory, while the directory of device plugins is
// always the same. If there is no socket beside the directory of device plugins, Path uses the --root-dir of a running
// kubelet.
func (s *Source) Path() string {
	if s.Socket != "" {
		return s.Socket
	}
	root := filepath.Dir(filepath.Clean(s.PluginDir))
	if _, err := os.Stat(inRoot(root)); err != nil {
		if other := rootDir(s.Host); other != "" {
			root = other
		}
	}
	return inRoot(root)
}

func inRoot(dir string) string { return filepath.Join(dir, "pod-resources", "kubelet.sock") }

// rootDir returns the --root-dir of a running kubelet, or "".
func rootDir(h host.Host) string {
	args, _ := proc.FindKubelet(h.Proc())
	return Option(args, "root-dir")
}

// Option returns the value of an option in a command line, or "".
func Option(args []string, name string) string {
	for i, arg := range args {
		option, isOption := strings.CutPrefix(arg, "--")
		if !isOption {
			continue
		}
		if value, found := strings.CutPrefix(option, name+"="); found {
			return value
		}
		if option == name && i+1 < len(args) {
			return args[i+1]
		}
	}
	return ""
}
