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
	"gpu-cdi-plugin/internal/exit"
	"gpu-cdi-plugin/test/lib/proc"
)

// checker is the state of one run. Steps fill it in for those after them.
type checker struct {
	options
	dir string // temporary

	gpus struct {
		DriverVersion string       `json:"driverVersion"`
		CUDAVersion   string       `json:"cudaVersion"`
		Devices       []gpu.Device `json:"devices"`
	}
	spec *cdispecs.Spec
	// image is the root file system. built is the CUDA program, if there is one; it is in the image as cudaPath.
	image, built string
	// runtime is nil until a container without a GPU ran.
	runtime *runtime
}

// steps are done in this order, each whether or not those before it went well.
var steps = []struct {
	name string
	do   func(context.Context, *checker) (saw string, err error)
}{
	{"GPUs", func(_ context.Context, c *checker) (string, error) { return c.describeGPUs() }},
	{"cdi generate", func(ctx context.Context, c *checker) (string, error) { return c.generate(ctx) }},
	{"cdi validate", func(ctx context.Context, c *checker) (string, error) {
		return c.plugin(ctx, "cdi", "validate", "--no-headers", c.specFile())
	}},
	{"cdi diff", func(ctx context.Context, c *checker) (string, error) {
		return c.plugin(ctx, "cdi", "diff", c.specFile())
	}},
	{"nvidia-smi -L on the host", func(ctx context.Context, c *checker) (string, error) { return c.listOnHost(ctx) }},
	{"a CUDA program is built", func(ctx context.Context, c *checker) (string, error) { return c.buildCUDA(ctx) }},
	{"a container without a GPU", func(ctx context.Context, c *checker) (string, error) { return c.startWithout(ctx) }},
	{"nvidia-smi -L in a container with all GPUs", func(ctx context.Context, c *checker) (string, error) { return c.listAll(ctx) }},
	{"nvidia-smi -L in a container with one", func(ctx context.Context, c *checker) (string, error) { return c.listOne(ctx) }},
	{"a GPU that was not given", func(ctx context.Context, c *checker) (string, error) { return c.notGiven(ctx) }},
	{"the CUDA program in a container", func(ctx context.Context, c *checker) (string, error) { return c.runCUDA(ctx) }},
	{"start of a container, medians", func(ctx context.Context, c *checker) (string, error) { return c.measure(ctx) }},
}

func (c *checker) program(name string) string { return filepath.Join(c.bin, name) }

func (c *checker) cdiDir() string { return filepath.Join(c.dir, "cdi") }

func (c *checker) specFile() string { return filepath.Join(c.cdiDir(), "nvidia.json") }

// plugin runs gpu-cdi-plugin on the node. Its exit status is on the error. That some GPUs cannot be read is no error
// here: it is a finding of the first step.
func (c *checker) plugin(ctx context.Context, args ...string) (string, error) {
	// The programs are those of a source tree, and the specs are under /tmp.
	cmd := []string{c.program("gpu-cdi-plugin"), "--root", c.root, "--cdi-dir", c.cdiDir(), "--insecure-paths"}
	res, err := proc.Run(ctx, proc.Cmd{Args: append(cmd, args...)})
	if err != nil {
		return "", err
	}
	if code := exit.Code(res.Code); code != exit.OK && code != exit.Partial {
		return "", exit.With(code, "", fmt.Errorf("%s: %s", strings.Join(args, " "), strings.TrimSpace(res.Stdout+res.Stderr)))
	}
	return res.Stdout, nil
}

// findGPUs asks the driver. Without a driver or a GPU there is nothing to check, and the error's status says which.
func (c *checker) findGPUs(ctx context.Context) error {
	if err := os.MkdirAll(c.cdiDir(), 0o755); err != nil {
		return err
	}
	out, err := c.plugin(ctx, "devices", "-o", "json")
	if code := exit.CodeOf(err); code == exit.NoDriver || code == exit.NoGPU {
		return exit.With(code, "", fmt.Errorf("nothing to check here: %w", err))
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal([]byte(out), &c.gpus); err != nil {
		return fmt.Errorf("read the list of GPUs: %w", err)
	}
	if len(c.gpus.Devices) == 0 {
		return exit.With(exit.NoGPU, "", errors.New("nothing to check here: the driver lists no GPU"))
	}
	return nil
}

func (c *checker) describeGPUs() (string, error) {
	var lines, bad []string
	for _, d := range c.gpus.Devices {
		if !d.Usable() {
			bad = append(bad, fmt.Sprintf("GPU %d: %s", d.Index, d.Error))
		}
		lines = append(lines, fmt.Sprintf("%d: %s, %s, minor %d, NUMA node %d, %d MiB, compute capability %s, %d MIG devices",
			d.Index, d.Name, d.PCIBusID, d.Minor, d.NUMANode, d.MemoryBytes>>20, d.ComputeCapability, len(d.MIG)))
	}
	if len(bad) > 0 {
		return "", errors.New(strings.Join(bad, "; "))
	}
	return strings.Join(lines, "\n"), nil
}

func (c *checker) generate(ctx context.Context) (string, error) {
	if _, err := c.plugin(ctx, "--hook-path", c.program("prestart-hook"), "cdi", "generate", "--file", c.specFile()); err != nil {
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
	return fmt.Sprintf("cdiVersion %s, devices %s; for every container %d mounts and the nodes%s", spec.Version,
		strings.Join(names, ", "), len(spec.ContainerEdits.Mounts), nodes(spec.ContainerEdits.DeviceNodes)), nil
}

func nodes(list []*cdispecs.DeviceNode) string {
	var b strings.Builder
	for _, n := range list {
		b.WriteString(" " + n.Path)
	}
	return b.String()
}

// mounted is the mount of the driver's file of that name, or of a library of that name with any version.
func (c *checker) mounted(name string) (*cdispecs.Mount, error) {
	if c.spec == nil {
		return nil, &unavailable{"there is no spec"}
	}
	i := slices.IndexFunc(c.spec.ContainerEdits.Mounts, func(m *cdispecs.Mount) bool {
		base := filepath.Base(m.ContainerPath)
		return base == name || strings.HasPrefix(base, name+".so.")
	})
	if i < 0 {
		return nil, fmt.Errorf("the spec mounts no %s", name)
	}
	return c.spec.ContainerEdits.Mounts[i], nil
}

// listOnHost runs the driver's own nvidia-smi outside of any container.
func (c *checker) listOnHost(ctx context.Context) (string, error) {
	smi, err := c.mounted("nvidia-smi")
	if err != nil {
		return "", err
	}
	lib, err := c.mounted("libnvidia-ml")
	if err != nil {
		return "", err
	}
	// A simulated node's libraries, and those in /usr/local/nvidia, need not be where the host's loader looks.
	env := append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(lib.HostPath))
	res, err := proc.Run(ctx, proc.Cmd{Args: []string{smi.HostPath, "-L"}, Env: env})
	if err != nil {
		return "", err
	}
	if res.Code != 0 {
		return "", fmt.Errorf("%s -L: %v", smi.HostPath, res)
	}
	if diff := cmp.Diff(c.uuids(true), uuids(res.Stdout)); diff != "" {
		return "", fmt.Errorf("nvidia-smi lists other devices than gpu-cdi-plugin (-gpu-cdi-plugin +nvidia-smi):\n%s", diff)
	}
	return res.Stdout, nil
}

// uuids are those of all GPUs and MIG devices, in order. A GPU in MIG mode without MIG devices is of no use to a
// container and is among them only if idle is set.
func (c *checker) uuids(idle bool) (list []string) {
	for _, d := range c.gpus.Devices {
		if !d.Usable() || d.MIGEnabled && len(d.MIG) == 0 && !idle {
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

// uuids are those that nvidia-smi -L printed, in order.
func uuids(out string) (list []string) {
	for _, m := range uuid.FindAllStringSubmatch(out, -1) {
		list = append(list, m[1])
	}
	return list
}

// request is one device to ask for, by each of its names, and the UUIDs that a container has to see then.
type request struct {
	gpu   gpu.Device
	names []string
	want  []string
}

// requests has one for every GPU that a container can be given: the GPU, or the last of its MIG devices.
func (c *checker) requests() (list []request) {
	for _, d := range c.gpus.Devices {
		switch {
		case !d.Usable() || d.MIGEnabled && len(d.MIG) == 0:
		case d.MIGEnabled:
			m := d.MIG[len(d.MIG)-1]
			list = append(list, request{d, []string{m.UUID, fmt.Sprintf("%d:%d", d.Index, m.Index)}, []string{d.UUID, m.UUID}})
		default:
			list = append(list, request{d, []string{d.UUID, strconv.Itoa(d.Index)}, []string{d.UUID}})
		}
	}
	return list
}
