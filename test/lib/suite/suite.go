// Package suite has what the tests under test/ share in one run: the programs under test, built from this tree, the
// programs to compare with, the images of containers, and simulated nodes. Each is created once, when it is first
// needed.
package suite

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"gpu-cdi-plugin/test/lib/engine"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Suite is what the tests of one package share.
type Suite struct {
	Images *engine.Images

	bin, peers   string
	buildProduct func() error
	buildPeers   func() error
	buildNode    map[string]func() error // by group of scripts/peers
}

// Run runs a package's tests with *s set to their suite, and returns the exit status.
func Run(m *testing.M, s **Suite) int {
	dir, err := os.MkdirTemp("", "gpu-test-")
	if err != nil {
		log.Print(err)
		return 1
	}
	if err := os.Chmod(dir, 0o755); err != nil { // for hooks in user namespaces
		log.Print(err)
		return 1
	}
	*s = newSuite(dir)
	// The programs and the nodes are under /tmp, where every user can write. Programs of the tests inherit this.
	// This host may have a configuration file of the device manager.
	for name, value := range map[string]string{
		"GPU_CDI_INSECURE_PATHS": "true", "DEVICE_MANAGER_INSECURE_PATHS": "true", "DEVICE_MANAGER_CONFIG": "",
	} {
		if err := os.Setenv(name, value); err != nil {
			log.Print(err)
			return 1
		}
	}
	code := m.Run()
	if err := errors.Join((*s).Images.Close(), os.RemoveAll(dir)); err != nil {
		log.Printf("clean up after the tests: %v", err)
		return 1
	}
	return code
}

func newSuite(dir string) *Suite {
	s := &Suite{
		Images: engine.NewImages(filepath.Join(dir, "images")),
		bin:    filepath.Join(dir, "bin"), peers: filepath.Join(dir, "peers"),
		buildNode: map[string]func() error{},
	}
	s.buildProduct = sync.OnceValue(func() error { return runInRoot("make", "-s", "build", "BIN="+s.bin) })
	s.buildPeers = sync.OnceValue(func() error { return runInRoot("scripts/peers", s.peers, "nvidia", "runc") })
	for _, group := range nodePrograms {
		s.buildNode[group] = sync.OnceValue(func() error { return runInRoot("scripts/peers", nodeDir, group) })
	}
	return s
}

// Program returns the path of a program of this project, built as it is shipped: gpu-cdi-plugin, device-manager,
// prestart-hook or gpu-sim.
func (s *Suite) Program(t testing.TB, name string) string {
	t.Helper()
	if err := s.buildProduct(); err != nil {
		t.Fatalf("build the programs under test: %v", err)
	}
	return filepath.Join(s.bin, name)
}

// Peer returns the path of a program of another project: nvidia-ctk, nvidia-cdi-hook, nvidia-container-runtime or a
// static runc.
func (s *Suite) Peer(t testing.TB, name string) string {
	t.Helper()
	failUnbuilt(t, name, s.buildPeers())
	return filepath.Join(s.peers, name)
}

// nodeDir has the programs of a Kubernetes node, relative to this module's directory. They are not rebuilt for each run
// of tests, since linking takes half a minute.
const nodeDir = "bin/peers"

// nodePrograms has, for each program of a Kubernetes node, for docker's, for podman 5, for CRI-O's, for a
// cluster's and for helm, the group of scripts/peers that builds it.
var nodePrograms = map[string]string{
	"containerd": "containerd", "containerd-shim-runc-v2": "containerd", "ctr": "containerd", "kubelet": "kubelet",
	"nvidia-device-plugin": "deviceplugin", "gpu-feature-discovery": "deviceplugin",
	"docker": "docker", "dockerd": "docker", "podman5": "podman5", "runc": "runc", "helm": "helm",
	"crio": "crio", "crictl": "crio", "pinns": "crio",
	"etcd": "controlplane", "kube-apiserver": "controlplane", "kubectl": "controlplane",
}

// NodePeers returns the directory of nodePrograms, built or not.
func (s *Suite) NodePeers(t testing.TB) string {
	t.Helper()
	root, err := Root()
	testenv.Must(t, err)
	return filepath.Join(root, nodeDir)
}

// NodePeer returns the path of one of nodePrograms.
func (s *Suite) NodePeer(t testing.TB, name string) string {
	t.Helper()
	failUnbuilt(t, name, s.buildNode[nodePrograms[name]]())
	return filepath.Join(s.NodePeers(t), name)
}

var errOffline = errors.New("needs modules that cannot be fetched; with a network, scripts/peers gets them")

// failUnbuilt fails a test whose peer could not be built. Without a network it skips the test.
func failUnbuilt(t testing.TB, name string, err error) {
	t.Helper()
	if errors.Is(err, errOffline) {
		testenv.Skip(t, err.Error())
	}
	if err != nil {
		t.Fatalf("build %s: %v", name, err)
	}
}

// statusOffline is the exit status of scripts/peers if modules are missing: EX_UNAVAILABLE of sysexits.h.
const statusOffline = 69

// runInRoot runs a program in the module's directory. It does not use a test's context, since several tests share the
// result.
func runInRoot(args ...string) error {
	root, err := Root()
	if err != nil {
		return err
	}
	// A make that runs the tests would pass its own options on to this one.
	env := slices.DeleteFunc(os.Environ(),
		func(v string) bool { return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS=") })
	res, err := proc.Run(context.Background(), proc.Cmd{Args: args, Dir: root, Env: env})
	if err != nil {
		return err
	}
	if res.Code == statusOffline && args[0] == "scripts/peers" {
		return errOffline
	}
	if res.Code != 0 {
		return fmt.Errorf("%s: %v", strings.Join(args, " "), res)
	}
	return nil
}

// Root returns the directory of this module.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for d := dir; ; d = filepath.Dir(d) {
		data, err := os.ReadFile(filepath.Join(d, "go.mod"))
		if err == nil && strings.HasPrefix(string(data), "module gpu-cdi-plugin\n") {
			return d, nil
		}
		if d == filepath.Dir(d) {
			return "", fmt.Errorf("%s is not in the module gpu-cdi-plugin", dir)
		}
	}
}
