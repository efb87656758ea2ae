package engine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Podman is podman with one runtime.
type Podman struct {
	Runtime string // "runc" or "crun"
	// Wrapper is the path of gpu-cdi-runtime, which podman runs in place of the runtime; empty means none.
	Wrapper string
	// Hooks is a directory whose files are added to /etc, together with the files of hook install podman; empty means
	// none.
	Hooks string
	// HooksDir is a directory of OCI hooks, the only one that podman then reads; empty means none.
	HooksDir string
	// Users gives containers a user namespace.
	Users bool
	// Edit returns the command line to execute in place of one of podman run; nil changes nothing.
	Edit   func(args []string) []string
	Cgroup Cgroup
	Images *Images
}

// String returns the names of the engine, its runtime and the control groups, like "podman with crun on cgroup v2".
func (p *Podman) String() string {
	name := runtimeName(p.Runtime, p.Wrapper)
	if p.Hooks != "" || p.HooksDir != "" {
		name += " and hooks"
	}
	return fmt.Sprintf("podman with %s on %s", name, p.Cgroup)
}

// Run runs a container with `podman run`.
func (p *Podman) Run(t testing.TB, c Container) proc.Result {
	t.Helper()
	store := p.Images.imported(t, c.Image)
	dir := t.TempDir()
	runtime, etc := testenv.Command(t, p.Runtime), p.Hooks
	if p.Wrapper != "" {
		runtime, etc = p.Wrapper, policyFor(t, p.Runtime)
	}
	args := append(podman(t, dir), "--storage-opt", "additionalimagestore="+filepath.Join(store, "graph"))
	if p.HooksDir != "" {
		args = append(args, "--hooks-dir", p.HooksDir)
	}
	args = append(args, "--runtime", runtime, "run", "--rm", "--network=none",
		"--log-driver=k8s-file", "--log-opt=path="+filepath.Join(dir, "log"),
		// A machine without CAP_SYS_RESOURCE cannot raise limits; podman's own defaults would.
		"--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024",
		"--cgroup-parent="+cgroupParent(),
		// cgroup v2 may have no pids controller.
		"--pids-limit=-1")
	for _, name := range c.Devices {
		args = append(args, "--device="+name)
	}
	for key, value := range c.Annotations {
		args = append(args, "--annotation", key+"="+value)
	}
	for _, variable := range c.Env {
		args = append(args, "--env", variable)
	}
	if p.Users {
		args = append(args, "--uidmap=0:100000:65536", "--gidmap=0:100000:65536")
	}
	if c.ReadOnly {
		args = append(args, "--read-only")
	}
	if c.Mknod {
		args = append(args, "--cap-add=MKNOD")
	}
	args = append(args, c.Options...)
	args = append(append(args, imageName(c.Image)), c.Args...)
	if p.Edit != nil {
		args = p.Edit(args)
	}
	res := execute(t, inNamespace(t, c.CDIDir, etc, p.Cgroup, args...))
	// podman 4 may lose the output of a container that ends at once. The log has it, because conmon writes the log
	// itself.
	if log, err := os.ReadFile(filepath.Join(dir, "log")); err == nil {
		res.Stdout = stdoutOf(string(log))
	}
	return res
}

// stdoutOf returns what a container has written to its standard output, from a log of the driver k8s-file. Its lines
// have the form "TIME stdout F TEXT", with P in place of F for a part of a line.
func stdoutOf(log string) string {
	var out strings.Builder
	for line := range strings.Lines(log) {
		fields := strings.SplitN(line, " ", 4)
		if len(fields) != 4 || fields[1] != "stdout" {
			continue
		}
		if fields[2] == "P" {
			fields[3] = strings.TrimSuffix(fields[3], "\n")
		}
		out.WriteString(fields[3])
	}
	return out.String()
}

// podman returns the first arguments of every command line.
func podman(t testing.TB, dir string) []string {
	t.Helper()
	return append([]string{testenv.Command(t, "podman")}, podmanOptions(dir)...)
}

// podmanOptions are a store in dir, and no use of systemd.
func podmanOptions(dir string) []string {
	return []string{
		"--root", filepath.Join(dir, "graph"),
		// These are in the namespace's own /run, because podman rejects long paths.
		"--runroot=/run/containers", "--tmpdir=/run/libpod", "--network-config-dir=/run/cni",
		"--storage-driver=overlay", "--cgroup-manager=cgroupfs", "--events-backend=none",
	}
}

// cgroupParent returns the parent cgroup of this process's podman containers.
func cgroupParent() string { return fmt.Sprintf("/gpu-test-%d", os.Getpid()) }

// Close removes podman's cgroups, which it leaves behind.
func (im *Images) Close() error { return RemoveCgroups(cgroupParent()) }

func imageName(kind image.Kind) string { return "localhost/" + string(kind) + ":test" }
