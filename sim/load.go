package sim

import (
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gpu-cdi-plugin/internal/exit"
)

//go:embed machines/*.yaml
var machineFiles embed.FS

// maxMachineFile is the greatest size of a machine file in bytes. The largest that comes with the package has 2 KB.
const maxMachineFile = 1 << 20

// Machines lists the names of the machines that come with the package, sorted.
func Machines() []string {
	var names []string
	files, _ := fs.Glob(machineFiles, "machines/*.yaml") // the pattern is well-formed, so there is no error
	for _, f := range files {
		names = append(names, strings.TrimSuffix(filepath.Base(f), ".yaml"))
	}
	slices.Sort(names)
	return names
}

// LoadMachine returns the machine of that name, of Machines or Fabrics, or reads the machine file at that path if it has a slash or ends in
// ".yaml" or ".yml". An unknown name and a file that is not a machine have the exit status of wrong usage.
func LoadMachine(nameOrFile string) (*Machine, error) {
	ext := filepath.Ext(nameOrFile)
	if !strings.Contains(nameOrFile, "/") && ext != ".yaml" && ext != ".yml" {
		return builtIn(nameOrFile)
	}
	data, err := readMachineFile(nameOrFile)
	if err != nil {
		return nil, fmt.Errorf("read machine file: %w", err)
	}
	m, err := ParseMachine(strings.TrimSuffix(filepath.Base(nameOrFile), ext), data)
	if err != nil {
		return nil, exit.With(exit.Usage, "the files in sim/machines of the sources are examples; doc comments there explain every key",
			fmt.Errorf("machine file %s: %w", nameOrFile, err))
	}
	return m, nil
}

func builtIn(name string) (*Machine, error) {
	if i := slices.Index(Fabrics(), name); i >= 0 {
		return ParseMachine(name, fabricFile(i+1))
	}
	data, err := machineFiles.ReadFile("machines/" + name + ".yaml")
	if err != nil {
		return nil, exit.With(exit.Usage, "to use a machine file of your own, give its path, with a slash or .yaml",
			fmt.Errorf("unknown machine %q; there are %s and, of 16 to 128 GPUs, pcie-fabric-N", name, strings.Join(Machines(), ", ")))
	}
	return ParseMachine(name, data)
}

// readMachineFile reads a regular file, and not more of it than a machine file can have.
func readMachineFile(path string) (data []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(err, fmt.Errorf("%s is not a regular file", path))
	}
	data, err = io.ReadAll(io.LimitReader(f, maxMachineFile+1))
	if err == nil && len(data) > maxMachineFile {
		err = fmt.Errorf("%s is larger than %d bytes", path, maxMachineFile)
	}
	return data, err
}
