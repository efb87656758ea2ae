package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/internal/proc"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/internal/yamlfile"
)

// kubeletFacts are the kubelet of the host and its device plugins.
type kubeletFacts struct {
	// present says that the host has a kubelet, and running that one runs.
	present, running bool
	version          []int
	configFile       string
	config           kubeletConfig
	configErr        error
	endpoint         string // of the container runtime
	// rootDir is the directory of a running kubelet's files if it is not the usual one, or empty.
	rootDir string
	// socket is the state of the socket at which plugins register.
	socket  socketState
	plugins []pluginSocket
	// process is a process that is another device plugin, or empty.
	process string
	// podSocket is the PodResources socket. podsErr says why it did not answer.
	podSocket   string
	podsErr     error
	allocatable map[string]map[string]bool
}

// kubeletConfig has the keys of a KubeletConfiguration that matter here.
type kubeletConfig struct {
	CgroupDriver             string          `yaml:"cgroupDriver"`
	ContainerRuntimeEndpoint string          `yaml:"containerRuntimeEndpoint"`
	PodPidsLimit             *int64          `yaml:"podPidsLimit"`
	FailCgroupV1             *bool           `yaml:"failCgroupV1"`
	FeatureGates             map[string]bool `yaml:"featureGates"`
}

// socketState is what a socket answers.
type socketState int

const (
	absent socketState = iota
	silent             // nothing listens
	live
	unknown // this process may not connect
)

// pluginSocket is the socket of a device plugin, in the directory of device plugins or in the registry.
type pluginSocket struct {
	path  string
	state socketState
	// resource is the resource that a plugin in the registry offers, or empty.
	resource string
}

// isOurs reports whether the socket is one of this program.
func (s pluginSocket) isOurs() bool { return strings.HasPrefix(filepath.Base(s.path), "gpu-cdi-") }

// isNVIDIAs reports whether the socket is one of another plugin for NVIDIA's GPUs.
func (s pluginSocket) isNVIDIAs() bool {
	base := filepath.Base(s.path)
	return !s.isOurs() && (strings.HasPrefix(base, "nvidia") || strings.HasPrefix(s.resource, "nvidia.com/"))
}

func (f *facts) readKubelet(ctx context.Context) {
	k := &f.kubelet
	args, _ := proc.FindKubelet(f.Host.Proc())
	k.running = args != nil
	k.socket = stateOf(filepath.Join(f.PluginDir, "kubelet.sock"))
	k.configFile = "/var/lib/kubelet/config.yaml"
	if file := podresources.Option(args, "config"); file != "" {
		k.configFile = file
	}
	program := f.program("kubelet")
	k.present = k.running || k.socket != absent || program != "" && f.exists(k.configFile)
	if !k.present {
		return
	}
	if data := f.read(k.configFile); data != nil {
		if _, k.configErr = yamlfile.Parse(data); k.configErr == nil {
			k.configErr = yaml.Unmarshal(data, &k.config)
		}
	}
	k.endpoint = k.config.ContainerRuntimeEndpoint
	if endpoint := podresources.Option(args, "container-runtime-endpoint"); endpoint != "" {
		k.endpoint = endpoint
	}
	if driver := podresources.Option(args, "cgroup-driver"); driver != "" {
		k.config.CgroupDriver = driver
	}
	k.rootDir = podresources.Option(args, "root-dir")
	if program != "" {
		k.version = f.versionOf("kubelet", program)
	}
	f.readPlugins(ctx)
	f.readPods(ctx)
}

// readPlugins finds the sockets of device plugins, and a process.
func (f *facts) readPlugins(ctx context.Context) {
	k := &f.kubelet
	for _, dir := range []string{f.PluginDir, f.RegistryDir} {
		entries, err := os.ReadDir(dir)
		if err != nil && !isAbsent(err) {
			f.unread(dir, err)
		}
		for _, e := range entries {
			if e.Type() != fs.ModeSocket || e.Name() == "kubelet.sock" {
				continue
			}
			s := pluginSocket{path: filepath.Join(dir, e.Name())}
			if s.state = stateOf(s.path); s.state == unknown {
				f.unread(s.path, errors.New("this process may not connect to it"))
			}
			if dir == f.RegistryDir && s.state == live {
				s.resource = resourceOf(ctx, s.path)
			}
			k.plugins = append(k.plugins, s)
		}
	}
	if pid := f.processes["nvidia-device-p"]; pid != 0 { // the kernel keeps 15 characters of nvidia-device-plugin
		k.process = fmt.Sprintf("nvidia-device-plugin (process %d)", pid)
	}
}

// askTime bounds a call to a socket.
const askTime = 2 * time.Second

// stateOf connects to a socket and closes the connection at once, which servers take for a client that has ended.
func stateOf(socket string) socketState {
	if _, err := os.Stat(socket); err != nil {
		if isAbsent(err) {
			return absent
		}
		return unknown
	}
	if len(socket) > unixsocket.MaxPath {
		return unknown
	}
	conn, err := net.DialTimeout("unix", socket, askTime)
	switch {
	case err == nil:
		_ = conn.Close()
		return live
	case unixsocket.IsEnd(err):
		return silent
	}
	return unknown
}

// resourceOf asks a plugin in the registry for the resource that it offers. It is empty for a plugin of another type,
// and for one that does not answer.
func resourceOf(ctx context.Context, socket string) string {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///plugin", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}))
	if err != nil {
		return ""
	}
	defer conn.Close()
	info, err := registration.NewRegistrationClient(conn).GetInfo(ctx, &registration.InfoRequest{})
	if err != nil || info.GetType() != registration.DevicePlugin {
		return ""
	}
	return info.GetName()
}

// readPods asks the kubelet which devices it gives to pods.
func (f *facts) readPods(ctx context.Context) {
	k := &f.kubelet
	source := podresources.Source{Host: f.Host, Socket: f.PodResources, PluginDir: f.PluginDir}
	k.podSocket = source.Path()
	k.allocatable, k.podsErr = source.Allocatable(ctx)
}

// failsOnV1 reports whether the kubelet does not start on control groups of version 1, which it does not by default
// since version 1.35.
func (k *kubeletFacts) failsOnV1() bool {
	if fail := k.config.FailCgroupV1; fail != nil {
		return *fail
	}
	return isSince(k.version, 1, 35)
}

func checkKubelet(f *facts) []Finding {
	k := &f.kubelet
	if !k.present {
		return nil
	}
	var list []Finding
	switch socket := filepath.Join(f.PluginDir, "kubelet.sock"); {
	case k.socket == unknown:
		list = append(list, newFinding("unchecked", socket, "this process may not connect to it"))
	case k.running && k.socket != live:
		list = append(list, newFinding("kubelet-socket", socket, "a kubelet runs, and nothing answers here"))
	case k.socket == silent:
		list = append(list, newFinding("kubelet-stopped", socket, "nothing answers here, so no kubelet runs"))
	case k.socket == absent:
		list = append(list, newFinding("kubelet-stopped", socket, "it does not exist, so no kubelet runs"))
	}
	if k.configErr != nil {
		list = append(list, newFinding("unchecked", k.configFile, "it cannot be read: "+wording.OneLine(k.configErr)))
	}
	if want := path.Join(k.rootDir, "plugins_registry"); k.rootDir != "" && f.Watcher && !isSameDir(want, f.RegistryDir) {
		problem := fmt.Sprintf("the kubelet has --root-dir %s, and plugins-registry-dir is %s", k.rootDir, f.RegistryDir)
		list = append(list, newFinding("kubelet-root-dir", f.RegistryDir, problem).fixed("--plugins-registry-dir "+want))
	}
	list = append(list, k.checkConfig()...)
	list = append(list, k.checkPlugins()...)
	if k.socket == live { // otherwise the finding about it is enough
		list = append(list, k.checkPods()...)
	}
	return list
}

// checkConfig checks the kubelet's own limits and features.
func (k *kubeletFacts) checkConfig() []Finding {
	var list []Finding
	on, set := k.config.FeatureGates["DevicePluginCDIDevices"]
	switch {
	case set && !on:
		problem := k.configFile + " turns the feature DevicePluginCDIDevices off"
		list = append(list, newFinding("kubelet-cdi", "kubelet", problem))
	case !set && before(k.version, 1, 29):
		problem := "version " + versionText(k.version) + " does not pass CDI devices of plugins on"
		list = append(list, newFinding("kubelet-cdi", "kubelet", problem))
	}
	if limit := k.config.PodPidsLimit; limit != nil && *limit > 0 && *limit < leastPIDs {
		problem := fmt.Sprintf("%s sets podPidsLimit to %d, and the hook needs %d", k.configFile, *limit, leastPIDs)
		list = append(list, newFinding("pids-limit", "kubelet", problem).fixed(
			fmt.Sprintf("set podPidsLimit in %s to %d or more, then: systemctl restart kubelet", k.configFile, leastPIDs)))
	}
	return list
}

// checkPlugins finds another plugin for NVIDIA's GPUs. That is a fault if ours runs too.
func (k *kubeletFacts) checkPlugins() []Finding {
	ours := slices.ContainsFunc(k.plugins, func(s pluginSocket) bool { return s.isOurs() && s.state == live })
	var others []string
	for _, s := range k.plugins {
		if s.isNVIDIAs() && s.state == live {
			others = append(others, s.path)
		}
	}
	if len(others) == 0 && k.process != "" {
		others = []string{k.process}
	}
	var list []Finding
	for _, other := range others {
		finding := newFinding("plugin-other", other, "another device plugin offers GPUs of this host")
		if !ours {
			finding.Severity = Note
			finding.Problem += ", and gpu-cdi-plugin serve does not run"
		}
		list = append(list, finding)
	}
	return list
}

// checkPods compares what the kubelet gives to pods with the plugins that run.
func (k *kubeletFacts) checkPods() []Finding {
	if errors.Is(k.podsErr, fs.ErrNotExist) {
		return []Finding{newFinding("kubelet-pods", k.podSocket, "the kubelet's PodResources socket does not exist")}
	}
	if k.podsErr != nil {
		return []Finding{newFinding("unchecked", k.podSocket, wording.OneLine(k.podsErr))}
	}
	var list []Finding
	for _, resource := range sortedKeys(k.allocatable) {
		vendor, _, _ := strings.Cut(resource, "/")
		if vendor != "nvidia.com" || len(k.allocatable[resource]) == 0 || k.hasPlugin() {
			continue
		}
		problem := fmt.Sprintf("the kubelet has %d of it, and no device plugin answers", len(k.allocatable[resource]))
		list = append(list, newFinding("plugin-gone", resource, problem))
	}
	return list
}

// hasPlugin reports whether a plugin runs, or may run, that offers NVIDIA's GPUs.
func (k *kubeletFacts) hasPlugin() bool {
	return slices.ContainsFunc(k.plugins, func(s pluginSocket) bool {
		return s.state != silent && s.state != absent
	})
}
