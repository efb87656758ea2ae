package sim

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"gpu-cdi-plugin/internal/yamlfile"
)

// machineFile is the form of a machine on disk. The keys are explained in sim/machines/dgx-h100.yaml.
type machineFile struct {
	Description string               `yaml:"description"`
	Driver      string               `yaml:"driver"`
	Models      map[string]modelFile `yaml:"models"`
	GPUs        []gpuFile            `yaml:"gpus"`
	NUMA        map[int]string       `yaml:"numa"`
	DRI         driFile              `yaml:"dri"`
	NVLink      *nvlinkFile          `yaml:"nvlink"`
}

type modelFile struct {
	Name         string `yaml:"name"`
	PCI          string `yaml:"pci"`
	Subsystem    string `yaml:"subsystem"`
	Display      bool   `yaml:"display"`
	Architecture string `yaml:"architecture"`
	Brand        string `yaml:"brand"`
	Compute      string `yaml:"compute"`
	Memory       string `yaml:"memory"`
	SMs          int    `yaml:"sms"`
	Power        int    `yaml:"power"`
	VBIOS        string `yaml:"vbios"`
	Board        string `yaml:"board"`
	MIG          string `yaml:"mig"`
}

type gpuFile struct {
	Model string    `yaml:"model"`
	Bus   string    `yaml:"bus"`
	NUMA  *int      `yaml:"numa"`
	PCIe  string    `yaml:"pcie"`
	Minor *int      `yaml:"minor"`
	MIG   *[]string `yaml:"mig"`
}

type driFile struct {
	Card   int `yaml:"card"`
	Render int `yaml:"render"`
}

type nvlinkFile struct {
	Version  int        `yaml:"version"`
	Speed    int        `yaml:"speed"`
	PerGPU   int        `yaml:"perGPU"`
	Switches [][]string `yaml:"switches"`
	Matrix   [][]int    `yaml:"matrix"`
}

// ParseMachine reads a machine file. The error has every problem, with its line where that is known.
func ParseMachine(name string, data []byte) (*Machine, error) {
	if len(data) > maxMachineFile {
		return nil, fmt.Errorf("larger than %d bytes", maxMachineFile)
	}
	var f machineFile
	document, err := yamlfile.Decode(data, &f)
	switch {
	case err != nil:
		return nil, err
	case document.Kind == 0:
		return nil, errors.New("the file is empty")
	}
	b := &builder{
		machine: &Machine{Name: name, Description: f.Description, Driver: f.Driver, CPUs: f.NUMA, source: bytes.Clone(data)},
		file:    &f, lines: lineNumbers(data),
	}
	b.build()
	if len(b.problems) > 0 {
		return nil, errors.Join(b.problems...)
	}
	return b.machine, nil
}

// lineNumbers maps the path of each node of a document ("gpus.3.bus") to its line.
func lineNumbers(data []byte) map[string]int {
	lines := map[string]int{}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil || len(doc.Content) == 0 {
		return lines
	}
	var walk func(path string, n *yaml.Node)
	walk = func(path string, n *yaml.Node) {
		lines[path] = n.Line
		if n.Kind == yaml.SequenceNode {
			for i, child := range n.Content {
				walk(fmt.Sprintf("%s.%d", path, i), child)
			}
		}
		for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
			walk(path+"."+n.Content[i].Value, n.Content[i+1])
		}
	}
	walk("", doc.Content[0])
	return lines
}

// builder turns a machine file into a machine and collects what is wrong with it.
type builder struct {
	file     *machineFile
	machine  *Machine
	lines    map[string]int
	problems []error
}

// problem records what is wrong at a path such as "gpus.3.bus".
func (b *builder) problem(path, format string, args ...any) {
	err := fmt.Errorf("%s: "+format, append([]any{path}, args...)...)
	for at := "." + path; at != ""; at = at[:strings.LastIndexByte(at, '.')] {
		if line, ok := b.lines[at]; ok {
			err = fmt.Errorf("line %d: %w", line, err)
			break
		}
	}
	b.problems = append(b.problems, err)
}

func (b *builder) build() {
	if d := b.file.Driver; d != "" && !driverPattern.MatchString(d) {
		b.problem("driver", "%q is not a driver version such as %s", d, DefaultDriver)
	}
	b.checkCPUs()
	models := b.models()
	b.gpus(models)
	if len(b.problems) > 0 {
		return // what follows would only repeat these
	}
	b.checkUnique()
	b.pairs()
	b.nvlinks()
	b.partitions()
}

func (b *builder) checkCPUs() {
	for _, node := range slices.Sorted(maps.Keys(b.file.NUMA)) {
		path := fmt.Sprintf("numa.%d", node)
		if node < 0 || node > 1023 {
			b.problem(path, "a NUMA node is 0 to 1023")
		}
		if list := b.file.NUMA[node]; list == "" || strings.Trim(list, "0123456789,-") != "" {
			b.problem(path, "%q is not a list of CPUs such as 0-15,32-47", list)
		}
	}
}
