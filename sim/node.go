package sim

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// The simulation's own files, relative to the node's root.
const (
	ownDir          = "run/gpu-sim"
	nodeFile        = ownDir + "/node"
	machineFilePath = ownDir + "/machine.yaml"
	stateFile       = ownDir + "/state"
	mpsClientPath   = ownDir + "/" + builtMPSClient
)

// Node is a simulated node on disk. Several processes can use it at once.
type Node struct {
	root    string
	libDir  string
	binDir  string
	driver  string
	plain   bool
	machine *Machine
}

// Open returns the node that Create made in dir.
func Open(dir string) (*Node, error) {
	root, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open a node: %w", err)
	}
	n := &Node{root: root}
	if err := n.read(); err != nil {
		if _, statErr := os.Stat(filepath.Join(root, nodeFile)); errors.Is(statErr, fs.ErrNotExist) {
			return nil, fmt.Errorf("%s is %w: %w", dir, ErrNotNode, err)
		}
		return nil, fmt.Errorf("open the node %s: %w", dir, err)
	}
	return n, nil
}

func (n *Node) read() error {
	text, err := os.ReadFile(filepath.Join(n.root, nodeFile))
	if err != nil {
		return err
	}
	records, err := parseRecords(text)
	if err != nil {
		return fmt.Errorf("%s: %w", nodeFile, err)
	}
	var name string
	for _, r := range records {
		for key, to := range map[string]*string{
			"machine": &name, "driver": &n.driver, "libdir": &n.libDir, "bindir": &n.binDir,
		} {
			if *to, _ = r.get(key); *to == "" {
				return fmt.Errorf("%s: no %s", nodeFile, key)
			}
		}
		n.plain = r.has("plain", true)
	}
	source, err := os.ReadFile(filepath.Join(n.root, machineFilePath))
	if err != nil {
		return err
	}
	n.machine, err = parseMachine(name, source)
	return err
}

// Root returns the absolute path of the node's root directory.
func (n *Node) Root() string { return n.root }

// Machine returns the machine that the node was created from, without faults and MIG changes.
func (n *Node) Machine() *Machine { return n.machine }

// Driver returns the version of the installed driver.
func (n *Node) Driver() string { return n.driver }

// LibDir returns the directory of the libraries, relative to Root.
func (n *Node) LibDir() string { return n.libDir }

// Library returns the path of libnvidia-ml.so.1.
func (n *Node) Library() string { return filepath.Join(n.root, n.libDir, "libnvidia-ml.so.1") }

// MPSControl returns the path of nvidia-cuda-mps-control. It finds nvidia-cuda-mps-server in PATH, which finds the
// library in LD_LIBRARY_PATH.
func (n *Node) MPSControl() string { return filepath.Join(n.root, n.binDir, builtMPSControl) }

// MPSClient returns the path of a program that uses MPS like a CUDA program. The program does not belong to the driver,
// so a container needs a copy.
func (n *Node) MPSClient() string { return filepath.Join(n.root, mpsClientPath) }

// SMI returns the path of nvidia-smi. LD_LIBRARY_PATH must contain the directory of Library.
func (n *Node) SMI() string { return filepath.Join(n.root, n.binDir, builtSMI) }
