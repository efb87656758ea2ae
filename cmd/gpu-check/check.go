package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/google/go-cmp/cmp"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/test/lib/proc"
)

// checker is the state of one run. Each step sets what later steps need.
type checker struct {
	options
	dir string // temporary

	gpus struct {
		DriverVersion string       `json:"driverVersion"`
		CUDAVersion   string       `json:"cudaVersion"`
		Devices       []gpu.Device `json:"devices"`
	}
	spec  *cdispecs.Spec
	image string // the root file system
	built string // the CUDA program, or empty; in the image it is cudaPath
	// runtime is nil until a container without a GPU has run.
	runtime *runtime
}

// steps are run in this order, also after one that failed. A step returns what it saw, for the report.
var steps = []struct {
	name string
	run  func(*checker, context.Context) (saw string, err error)
}{
	{"GPUs", (*checker).describeGPUs},
	{"cdi generate", (*checker).generate},
	{"cdi validate", (*checker).validate},
	{"cdi diff", (*checker).diff},
	{"nvidia-smi -L on the host", (*checker).listOnHost},
	{"a CUDA program is built", (*checker).buildCUDA},
	{"a container without a GPU", (*checker).startWithout},
	{"nvidia-smi -L in a container with all GPUs", (*checker).listAll},
	{"nvidia-smi -L in a container with one", (*checker).listOne},
	{"a GPU that the container was not given", (*checker).notGiven},
	{"the CUDA program in a container", (*checker).runCUDA},
	{"time to start a container, medians", (*checker).measure},
}

func (c *checker) program(name string) string { return filepath.Join(c.bin, name) }

func (c *checker) cdiDir() string { return filepath.Join(c.dir, "cdi") }

func (c *checker) specFile() string { return filepath.Join(c.cdiDir(), "nvidia.json") }

// plugin runs gpu-cdi-plugin on the node. The error has its exit status. GPUs that cannot be read are no error: the
// first step reports them.
func (c *checker) plugin(ctx context.Context, args ...string) (string, error) {
	// The programs are in a source tree and the specs under /tmp.
	cmd := []string{c.program("gpu-cdi-plugin"), "--root", c.root, "--cdi-dir", c.cdiDir(), "--insecure-paths"}
	res, err := proc.Run(ctx, proc.Cmd{Args: append(cmd, args...)})
	if err != nil {
		return "", err
	}
	if code := cli.Code(res.Code); code != cli.OK && code != cli.Partial {
		err := fmt.Errorf("%s: %s", strings.Join(args, " "), strings.TrimSpace(res.Stdout+res.Stderr))
		return "", cli.With(code, "", err)
	}
	return res.Stdout, nil
}

// findGPUs lists the GPUs. Without a driver or a GPU the error has that exit status.
func (c *checker) findGPUs(ctx context.Context) error {
	if err := os.MkdirAll(c.cdiDir(), 0o755); err != nil {
		return err
	}
	out, err := c.plugin(ctx, "devices", "-o", "json")
	if code := cli.CodeOf(err); code == cli.NoDriver || code == cli.NoGPU {
		return cli.With(code, "", fmt.Errorf("nothing to check here: %w", err))
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out), &c.gpus); err != nil {
		return fmt.Errorf("read the list of GPUs: %w", err)
	}
	if len(c.gpus.Devices) == 0 {
		return cli.With(cli.NoGPU, "", errors.New("nothing to check here: the driver lists no GPU"))
	}
	return nil
}

func (c *checker) describeGPUs(context.Context) (string, error) {
	var lines, bad []string
	for _, d := range c.gpus.Devices {
		if !d.Usable() {
			bad = append(bad, fmt.Sprintf("GPU %d: %s", d.Index, d.Error))
		}
		lines = append(lines, fmt.Sprintf(
			"%d: %s, %s, minor %d, NUMA node %d, %d MiB, compute capability %s, %d MIG devices",
			d.Index, d.Name, d.PCIBusID, d.Minor, d.NUMANode, d.MemoryBytes>>20, d.ComputeCapability, len(d.MIG)))
	}
	if len(bad) > 0 {
		return "", errors.New(strings.Join(bad, "; "))
	}
	return strings.Join(lines, "\n"), nil
}

func (c *checker) generate(ctx context.Context) (string, error) {
	_, err := c.plugin(ctx, "--hook-path", c.program("prestart-hook"), "cdi", "generate", "--file", c.specFile())
	if err != nil {
		return "", err
	}
	data, err := os.ReadFile(c.specFile())
	if err != nil {
		return "", err
	}
	spec := &cdispecs.Spec{}
	if err := json.Unmarshal(data, spec); err != nil {
		return "", fmt.Errorf("read %s: %w", c.specFile(), err)
	}
	c.spec = spec
	var names []string
	for _, d := range spec.Devices {
		names = append(names, d.Name)
	}
	var nodes []string
	for _, n := range spec.ContainerEdits.DeviceNodes {
		nodes = append(nodes, n.Path)
	}
	return fmt.Sprintf("cdiVersion %s, devices %s; for every container %d mounts and the nodes %s", spec.Version,
		strings.Join(names, ", "), len(spec.ContainerEdits.Mounts), strings.Join(nodes, " ")), nil
}

func (c *checker) validate(ctx context.Context) (string, error) {
	return c.plugin(ctx, "cdi", "validate", "--no-headers", c.specFile())
}

func (c *checker) diff(ctx context.Context) (string, error) {
	return c.plugin(ctx, "cdi", "diff", c.specFile())
}

// mounted returns the mount of a file of the driver, or of a library, which may have any version.
func (c *checker) mounted(name string) (*cdispecs.Mount, error) {
	if c.spec == nil {
		return nil, &unavailable{"there is no spec"}
	}
	i := slices.IndexFunc(c.spec.ContainerEdits.Mounts, func(m *cdispecs.Mount) bool {
		base := filepath.Base(m.ContainerPath)
		return base == name || strings.HasPrefix(base, name+".so.")
	})
	if i < 0 {
		return nil, fmt.Errorf("the spec has no mount of %s", name)
	}
	return c.spec.ContainerEdits.Mounts[i], nil
}

// listOnHost runs the driver's nvidia-smi outside of containers.
func (c *checker) listOnHost(ctx context.Context) (string, error) {
	smi, err := c.mounted("nvidia-smi")
	if err != nil {
		return "", err
	}
	lib, err := c.mounted("libnvidia-ml")
	if err != nil {
		return "", err
	}
	// The host's loader need not find the libraries of a simulated node, or those in /usr/local/nvidia.
	env := append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(lib.HostPath))
	res, err := proc.Run(ctx, proc.Cmd{Args: []string{smi.HostPath, "-L"}, Env: env})
	if err != nil {
		return "", err
	}
	if res.Code != 0 {
		return "", fmt.Errorf("%s -L: %v", smi.HostPath, res)
	}
	if diff := cmp.Diff(c.uuids(true), listedUUIDs(res.Stdout)); diff != "" {
		return "", fmt.Errorf("gpu-cdi-plugin and nvidia-smi list different devices (-gpu-cdi-plugin +nvidia-smi):\n%s",
			diff)
	}
	return res.Stdout, nil
}

// uuids returns those of all GPUs and MIG devices, in order. The host lists GPUs in MIG mode without MIG devices;
// containers cannot get them.
func (c *checker) uuids(onHost bool) (list []string) {
	for _, d := range c.gpus.Devices {
		if !d.Usable() || d.MIGEnabled && len(d.MIG) == 0 && !onHost {
			continue
		}
		list = append(list, d.UUID)
		for _, m := range d.MIG {
			list = append(list, m.UUID)
		}
	}
	return list
}

var uuid = regexp.MustCompile(`\(UUID: (\S+)\)`)

// listedUUIDs returns those in the output of nvidia-smi -L, in order.
func listedUUIDs(out string) (list []string) {
	for _, m := range uuid.FindAllStringSubmatch(out, -1) {
		list = append(list, m[1])
	}
	return list
}

// request is a device to give to a container.
type request struct {
	gpu   gpu.Device
	names []string // all names of the device
	want  []string // the UUIDs that nvidia-smi must list in the container
}

// requests returns one for each GPU that a container can get: for the GPU, or for the last of its MIG devices.
func (c *checker) requests() (list []request) {
	for _, d := range c.gpus.Devices {
		switch {
		case !d.Usable() || d.MIGEnabled && len(d.MIG) == 0:
		case d.MIGEnabled:
			m := d.MIG[len(d.MIG)-1]
			names := []string{m.UUID, fmt.Sprintf("%d:%d", d.Index, m.Index)}
			list = append(list, request{d, names, []string{d.UUID, m.UUID}})
		default:
			list = append(list, request{d, []string{d.UUID, strconv.Itoa(d.Index)}, []string{d.UUID}})
		}
	}
	return list
}
