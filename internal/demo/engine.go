package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Patience of the demo with programs that it starts.
const (
	cleanupTime = 20 * time.Second // to remove a container
	stopTime    = 2 * time.Second  // between asking a program to end and ending it
)

// Find looks for a program, also where only root has it in PATH. The result is empty if it is not there.
func Find(names ...string) string {
	for _, name := range names {
		for _, file := range []string{name, "/usr/local/sbin/" + name, "/usr/sbin/" + name, "/sbin/" + name} {
			if path, err := exec.LookPath(file); err == nil {
				return path
			}
		}
	}
	return ""
}

// Runtime is an OCI runtime: runc, or crun, which takes the same arguments.
type Runtime struct {
	// Path is the program, State a directory for what it has to remember.
	Path, State string
}

// Run runs the container of a bundle and returns what it printed.
func (r *Runtime) Run(ctx context.Context, bundle string) (string, error) {
	id := "gpu-demo-" + filepath.Base(filepath.Dir(bundle))
	out, err := output(ctx, r.Path, "--root", r.State, "run", "--bundle", bundle, id)
	if err != nil { // a container that ended by itself is gone already
		err = errors.Join(err, r.remove(context.WithoutCancel(ctx), id))
	}
	return out, err
}

func (r *Runtime) remove(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	_, err := output(ctx, r.Path, "--root", r.State, "delete", "--force", id)
	return err
}

// Podman is podman with a storage and a state of its own in Dir.
type Podman struct {
	Path, Runtime string
	Dir           string
	// CDIDir takes the place of /var/run/cdi, for this podman alone.
	CDIDir string
}

// Run runs args in a root file system with devices and returns what the container printed.
func (p *Podman) Run(ctx context.Context, rootfs string, devices, args []string) (string, error) {
	cmd := []string{
		"run", "--rm", "--network=none", "--security-opt=label=disable", "--pids-limit=-1", "--cgroup-parent=" + p.cgroup(),
		// A machine without CAP_SYS_RESOURCE cannot raise limits; podman's own defaults would.
		"--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024",
	}
	for _, d := range devices {
		cmd = append(cmd, "--device="+d)
	}
	cmd = append(append(cmd, "--rootfs", rootfs), args...)
	var out string
	err := withCDIDir(p.CDIDir, func() (err error) {
		out, err = output(ctx, p.Path, append(p.flags(), cmd...)...)
		if err != nil {
			err = errors.Join(err, p.remove(context.WithoutCancel(ctx)))
		}
		return err
	})
	p.removeCgroups()
	return out, err
}

func (p *Podman) flags() []string {
	return []string{
		"--root", filepath.Join(p.Dir, "graph"), "--runroot", filepath.Join(p.Dir, "run"),
		"--tmpdir", filepath.Join(p.Dir, "tmp"), "--runtime", p.Runtime,
		"--storage-driver=vfs", "--cgroup-manager=cgroupfs", "--events-backend=none",
	}
}

func (p *Podman) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	_, err := output(ctx, p.Path, append(p.flags(), "rm", "--all", "--force", "--time=0")...)
	return err
}

func (p *Podman) cgroup() string { return fmt.Sprintf("/gpu-demo-%d", os.Getpid()) }

// removeCgroups removes the cgroups that podman leaves; a cgroup that is in use stays, as the kernel refuses.
func (p *Podman) removeCgroups() {
	for _, tree := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		left, _ := filepath.Glob(tree + p.cgroup())
		for _, dir := range left {
			_ = os.Remove(filepath.Join(dir, "conmon"))
			_ = os.Remove(dir)
		}
	}
}

// output is what a program prints. It has an environment of its own.
func output(ctx context.Context, path string, args ...string) (string, error) {
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root"}
	stdout, _, err := start(ctx, env, path, args...)
	return stdout, err
}

// start runs a program to its end, which it is asked for when ctx ends. What it says to stderr is in the error too.
func start(ctx context.Context, env []string, path string, args ...string) (stdout, stderr string, err error) {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = env
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = stopTime
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		err = fmt.Errorf("run %s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(errs.String()))
	}
	return out.String(), errs.String(), err
}
