// Package bed is the test bed that the tests under test/ stand on: the programs under test, built from this tree, the
// images of containers, and simulated nodes. Each is made once for a run of tests, when it is first asked for.
package bed

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

// Bed is what the tests of one run share.
type Bed struct {
	Images *engine.Images

	bin, peers    string
	product, peer func() error
	nodePeer      map[string]func() error // by group of scripts/peers
}

// Run runs a package's tests with *b set to their bed, and returns the exit status.
func Run(m *testing.M, b **Bed) int {
	dir, err := os.MkdirTemp("", "gpu-test-")
	if err != nil {
		log.Print(err)
		return 1
	}
	*b = newBed(dir)
	// The programs and the nodes are under /tmp, where everybody can write; those that are run inherit this.
	if err := os.Setenv("GPU_CDI_INSECURE_PATHS", "true"); err != nil {
		log.Print(err)
		return 1
	}
	code := m.Run()
	if err := errors.Join((*b).Images.Close(), os.RemoveAll(dir)); err != nil {
		log.Printf("clean up after the tests: %v", err)
		return 1
	}
	return code
}

func newBed(dir string) *Bed {
	b := &Bed{Images: engine.NewImages(filepath.Join(dir, "images")), bin: filepath.Join(dir, "bin"), peers: filepath.Join(dir, "peers")}
	b.product = sync.OnceValue(func() error { return inRoot("make", "-s", "build", "BIN="+b.bin) })
	b.peer = sync.OnceValue(func() error { return inRoot("scripts/peers", b.peers, "nvidia", "runc") })
	b.nodePeer = map[string]func() error{}
	for _, group := range nodeGroups {
		b.nodePeer[group] = sync.OnceValue(func() error { return inRoot("scripts/peers", nodePeers, group) })
	}
	return b
}

// Program is the path of a program of this project, built as it is shipped: gpu-cdi-plugin, prestart-hook or gpu-sim.
func (b *Bed) Program(t testing.TB, name string) string {
	t.Helper()
	if err := b.product(); err != nil {
		t.Fatalf("build the programs under test: %v", err)
	}
	return filepath.Join(b.bin, name)
}

// Peer is the path of a program of another project: nvidia-ctk, nvidia-cdi-hook or a static runc.
func (b *Bed) Peer(t testing.TB, name string) string {
	t.Helper()
	if err := b.peer(); err != nil {
		unbuilt(t, "build the programs to compare with", err)
	}
	return filepath.Join(b.peers, name)
}

// nodePeers is where the programs of a Kubernetes node are, in this module's directory. Unlike the others they are not
// built anew for each run of tests: linking them alone takes half a minute.
const nodePeers = "bin/peers"

// nodeGroups has the group of scripts/peers that builds a program of a Kubernetes node.
var nodeGroups = map[string]string{
	"containerd": "containerd", "ctr": "containerd", "kubelet": "kubelet", "nvidia-device-plugin": "deviceplugin",
}

// NodePeer is the path of a program of a Kubernetes node: kubelet, containerd, ctr or nvidia-device-plugin.
func (b *Bed) NodePeer(t testing.TB, name string) string {
	t.Helper()
	if err := b.nodePeer[nodeGroups[name]](); err != nil {
		unbuilt(t, "build "+name, err)
	}
	root, err := Root()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(root, nodePeers, name)
}

// errOffline is that modules are missing and cannot be fetched.
var errOffline = errors.New("needs modules that are not here and cannot be fetched; with a network, scripts/peers gets them")

// unbuilt ends a test that needs programs which could not be built: skipped if it is for want of a network.
func unbuilt(t testing.TB, what string, err error) {
	t.Helper()
	if errors.Is(err, errOffline) {
		testenv.Skip(t, err.Error())
	}
	t.Fatalf("%s: %v", what, err)
}

// statusOffline is the exit status of scripts/peers where modules are missing: EX_UNAVAILABLE of sysexits.h.
const statusOffline = 69

// inRoot runs a program in the module's directory. It is not bound to one test: several share what it makes.
func inRoot(args ...string) error {
	root, err := Root()
	if err != nil {
		return err
	}
	// A make that runs the tests would pass its own options on to ours.
	env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "MAKE") || strings.HasPrefix(v, "MFLAGS=") })
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

// Root is the directory of this module.
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
