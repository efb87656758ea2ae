package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
)

// runtime is the way to run runc on this machine.
type runtime struct {
	wrap []string // goes before the command line of runc
}

// withCgroups mounts cgroup v2 for a command, on a machine without mounted control groups.
var withCgroups = []string{
	"unshare", "--mount", "--propagation", "private",
	"sh", "-c", `mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"`, "sh",
}

// how describes what runc needed besides itself, or is empty.
func (r *runtime) how() string {
	if r.wrap != nil {
		return " with control groups mounted for it: the machine had none"
	}
	return ""
}

// startWithout starts a container without a GPU. If that fails, the later steps are not possible.
func (c *checker) startWithout(ctx context.Context) (string, error) {
	if err := c.makeImage(ctx); err != nil {
		return "", err
	}
	b, err := c.bundle(ctx, []string{"true"}, false)
	if err != nil {
		return "", err
	}
	var reasons []string
	for _, r := range []*runtime{{}, {wrap: withCgroups}} {
		res, err := proc.Run(ctx, proc.Cmd{Args: append(slices.Clone(r.wrap), b.Command()...)})
		if err != nil {
			return "", err
		}
		if res.Code == 0 {
			c.runtime = r
			return "runc starts it" + r.how(), nil
		}
		reasons = append(reasons, strings.TrimSpace(res.Stderr))
	}
	return "", &unavailable{"runc starts no container on this machine" + sandbox() + ": " + strings.Join(reasons, "\n")}
}

// sandbox names gVisor, whose kernel lacks most of what runc needs.
func sandbox() string {
	data, err := os.ReadFile("/proc/version")
	if err == nil && strings.Contains(strings.ToLower(string(data)), "gvisor") {
		return " (gVisor)"
	}
	return ""
}

func (c *checker) makeImage(ctx context.Context) error {
	c.image = filepath.Join(c.dir, "rootfs")
	if err := image.FromHost(ctx, c.image); err != nil {
		return err
	}
	if c.built == "" {
		return nil
	}
	if err := image.AddProgram(c.image, c.built, cudaPath); err != nil {
		return err
	}
	return image.Ldconfig(ctx, c.image)
}

// bundle makes a bundle with devices, by name.
func (c *checker) bundle(ctx context.Context, args []string, mknod bool, devices ...string) (*image.Bundle, error) {
	dir, err := os.MkdirTemp(c.dir, "bundle-")
	if err != nil {
		return nil, err
	}
	b, err := image.NewBundle(ctx, c.runc, dir, image.BundleOptions{Root: c.image, Args: args, Mknod: mknod})
	if err != nil {
		return nil, err
	}
	if len(devices) == 0 {
		return b, nil
	}
	inject := []string{"cdi", "inject", "--bundle", dir}
	for _, d := range devices {
		inject = append(inject, "nvidia.com/gpu="+d)
	}
	_, err = c.plugin(ctx, inject...)
	return b, err
}

// in runs a command in a container with devices and returns what it printed.
func (c *checker) in(ctx context.Context, args []string, mknod bool, devices ...string) (string, error) {
	if c.runtime == nil {
		return "", &unavailable{"no container starts here"}
	}
	b, err := c.bundle(ctx, args, mknod, devices...)
	if err != nil {
		return "", err
	}
	return c.start(ctx, b)
}

func (c *checker) start(ctx context.Context, b *image.Bundle) (string, error) {
	res, err := proc.Run(ctx, proc.Cmd{Args: append(slices.Clone(c.runtime.wrap), b.Command()...)})
	if err != nil {
		return "", err
	}
	if res.Code != 0 {
		return "", fmt.Errorf("%v", res)
	}
	return res.Stdout, nil
}

func (c *checker) listIn(ctx context.Context, devices ...string) (string, error) {
	smi, err := c.mounted("nvidia-smi")
	if err != nil {
		return "", err
	}
	return c.in(ctx, []string{smi.ContainerPath, "-L"}, false, devices...)
}

func (c *checker) listAll(ctx context.Context) (string, error) {
	return c.listAs(ctx, c.uuids(false), "all")
}

// listAs runs nvidia-smi -L in a container with devices and compares the UUIDs.
func (c *checker) listAs(ctx context.Context, want []string, devices ...string) (string, error) {
	got, err := c.listIn(ctx, devices...)
	if err != nil {
		return "", err
	}
	if diff := cmp.Diff(want, listedUUIDs(got)); diff != "" {
		return "", fmt.Errorf("a container that was given %s lists other devices (-want +got):\n%s",
			strings.Join(devices, ", "), diff)
	}
	return got, nil
}

// listOne gives one device at a time, by each of its names.
func (c *checker) listOne(ctx context.Context) (string, error) {
	var saw []string
	for _, r := range c.requests() {
		for _, name := range r.names {
			got, err := c.listAs(ctx, r.want, name)
			if err != nil {
				return "", err
			}
			saw = append(saw, name+": "+strings.TrimSpace(got))
		}
	}
	return strings.Join(saw, "\n"), nil
}

// notGiven checks that a container cannot open a GPU that it was not given, also when it makes the device node.
func (c *checker) notGiven(ctx context.Context) (string, error) {
	all := c.requests()
	if len(all) < 2 {
		return "", &unavailable{"there is only one GPU"}
	}
	given, other := all[0], all[1].gpu
	// NVIDIA's major number is registered: 195.
	script := fmt.Sprintf("mknod /dev/own c 195 %d && (: <>/dev/own) 2>&1; true", other.Minor)
	got, err := c.in(ctx, []string{"sh", "-c", script}, true, given.names[0])
	if err == nil && !strings.Contains(got, "Operation not permitted") {
		err = fmt.Errorf("opening a node of GPU %d in a container that was given GPU %d: want EPERM, got %q",
			other.Index, given.gpu.Index, got)
	}
	return strings.TrimSpace(got), err
}

// measure compares the times to start a container without a GPU, with device nodes and mounts only, and with the hook.
func (c *checker) measure(ctx context.Context) (string, error) {
	if c.runtime == nil {
		return "", &unavailable{"no container starts here"}
	}
	none, err1 := c.bundle(ctx, []string{"true"}, false)
	bare, err2 := c.bundle(ctx, []string{"true"}, false, "all")
	full, err3 := c.bundle(ctx, []string{"true"}, false, "all")
	if err := errors.Join(err1, err2, err3); err != nil {
		return "", err
	}
	if err := bare.Edit(func(s *specs.Spec) error { s.Hooks = nil; return nil }); err != nil {
		return "", err
	}
	const rounds = 21
	times := map[*image.Bundle][]time.Duration{}
	for range rounds {
		for _, b := range []*image.Bundle{none, bare, full} {
			start := time.Now()
			if _, err := c.start(ctx, b); err != nil {
				return "", err
			}
			times[b] = append(times[b], time.Since(start))
		}
	}
	return fmt.Sprintf("without a GPU %v, with device nodes and mounts only %v, with the hook %v",
		median(times[none]), median(times[bare]), median(times[full])), nil
}

func median(d []time.Duration) time.Duration {
	slices.Sort(d)
	return d[len(d)/2].Round(10 * time.Microsecond)
}
