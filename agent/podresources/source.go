package podresources

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/host"
	"gpu-cdi-plugin/internal/kubelet"
	"gpu-cdi-plugin/internal/proc"
)

// ErrUnknown means that a kubelet uses the host, but its PodResources socket does not exist where it is expected, so
// that the containers with devices are unknown.
var ErrUnknown = errors.New("pod-resources-socket must name the kubelet's PodResources socket")

// Source finds the kubelet of a host and lists its containers.
type Source struct {
	Host host.Host
	// Socket is the PodResources socket; empty means detected.
	Socket string
	// PluginDir is the kubelet's directory of device plugins.
	PluginDir string
}

// List is like the function List, but returns no containers if the host has no kubelet. The error may wrap ErrUnknown.
func (s *Source) List(ctx context.Context) ([]Holder, error) {
	socket := s.Path()
	list, err := List(ctx, socket)
	if !errors.Is(err, fs.ErrNotExist) {
		return list, err
	}
	trace, err := s.traceOfKubelet()
	switch {
	case err != nil:
		return nil, err
	case trace != "":
		return nil, fmt.Errorf("%s does not exist although %s does: %w", socket, trace, ErrUnknown)
	}
	return []Holder{}, nil
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

// traceOfKubelet returns a path that exists only while a kubelet runs or after it has given devices to pods, or "".
func (s *Source) traceOfKubelet() (string, error) {
	socket := filepath.Join(s.PluginDir, "kubelet.sock")
	if _, err := os.Lstat(socket); err == nil {
		return socket, nil
	}
	path := filepath.Join(s.PluginDir, kubelet.CheckpointName)
	data, err := fileio.ReadFile(path, maxCheckpoint)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	ids, damaged := kubelet.DeviceIDs(data)
	if damaged == nil && len(ids) == 0 {
		return "", nil
	}
	return path, nil // a damaged file may have had some
}

// maxCheckpoint bounds a checkpoint, in bytes. A pod's entry has a few kilobytes.
const maxCheckpoint = 64 << 20

// rootDir returns the --root-dir of a running kubelet, or "".
func rootDir(h host.Host) string { return Option(RunningKubelet(h), "root-dir") }

// RunningKubelet returns the command line of a running kubelet, or nil. Only a process of root counts, in the mount
// namespace of the host's first process or of this process: any user, and any container, can have a process of this
// name. If this process does not see the host's processes, the result is nil.
func RunningKubelet(h host.Host) []string {
	if proc.SeesAll(h.Proc()) != nil {
		return nil
	}
	trusted := append(mountsOf(proc.Open(h.Proc(), 1)), mountsOf(proc.Self(h.Proc()))...)
	pids, err := proc.PIDs(h.Proc())
	if err != nil {
		return nil
	}
	for _, pid := range pids {
		if args := commandLine(h, pid, trusted); args != nil {
			return args
		}
	}
	return nil
}

// mountsOf returns the name of a process's mount namespace, or nothing if it cannot be read.
func mountsOf(p *proc.Process, err error) []string {
	if err != nil {
		return nil
	}
	defer p.Close()
	name, err := p.Namespace("mnt")
	if err != nil {
		return nil
	}
	return []string{name}
}

// commandLine returns the command line of a process that is a kubelet in one of the mount namespaces, or nil.
func commandLine(h host.Host, pid int, trusted []string) []string {
	p, err := proc.Open(h.Proc(), pid)
	if err != nil {
		return nil
	}
	defer p.Close()
	if p.Command() != "kubelet" {
		return nil
	}
	if own, err := p.Namespace("mnt"); err != nil || !slices.Contains(trusted, own) {
		return nil
	}
	if s, err := p.Status(); err != nil || s.UIDs[0] != "0" {
		return nil
	}
	args, err := p.Arguments()
	if err != nil {
		return nil
	}
	return args
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
