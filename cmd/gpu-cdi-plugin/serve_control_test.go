package main

import (
	"bytes"
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// device runs a verb of an administrator and returns its exit status and what it prints.
func (s *served) device(args ...string) (code int, stdout, stderr string) {
	s.t.Helper()
	return s.deviceUntil(s.t.Context(), args...)
}

// deviceUntil is device that is interrupted when ctx ends.
func (s *served) deviceUntil(ctx context.Context, args ...string) (code int, stdout, stderr string) {
	s.t.Helper()
	exe, err := os.Executable()
	mustDo(s.t, err)
	cmd := exec.CommandContext(ctx, exe)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.Args = append([]string{
		"gpu-cdi-plugin", "--root", s.node.Root(), "device",
		"--runtime-dir", filepath.Join(s.dir, "run"), "--state-dir", filepath.Join(s.dir, "state"),
	}, args...)
	cmd.Env = append(os.Environ(), insecure)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	_ = cmd.Run()
	s.t.Logf("device %v: %s%s", args, out.String(), errs.String())
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// does runs a verb of an administrator that must succeed and print a text.
func (s *served) does(text string, args ...string) {
	s.t.Helper()
	if code, stdout, stderr := s.device(args...); code != 0 || !strings.Contains(stdout, text) {
		s.t.Errorf("device %v: exit %d, %q and %q, want %q", args, code, stdout, stderr, text)
	}
}

// fails runs a verb of an administrator that must fail with a status and a text.
func (s *served) fails(status int, text string, args ...string) {
	s.t.Helper()
	if code, _, stderr := s.device(args...); code != status || !strings.Contains(stderr, text) {
		s.t.Errorf("device %v: exit %d, %q, want %d and %q", args, code, stderr, status, text)
	}
}

func (s *served) awaitControl() {
	s.t.Helper()
	waitFor(s.t, "the control socket", func() bool {
		info, err := os.Stat(filepath.Join(s.dir, "run", "control.sock"))
		return err == nil && info.Mode() == fs.ModeSocket|0o600
	})
}

func TestServeKeepsACordonOverARestart(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "")
	s.start()
	e := s.listed(gpuResource, 4, 0)
	s.awaitControl()
	s.does("GPU 2 ("+s.uuids()[2]+") is cordoned", "cordon", "2", "--reason", "a fan is loud")
	s.onlyUnhealthy(2)
	s.logs("GPU 2 is cordoned: a fan is loud")
	s.logs("an administrator asks for: cordon 2")
	s.wantRefused(e, s.uuids()[2], "(cordoned: a fan is loud)")
	s.fails(1, `the driver of this host has no device`, "cordon", "7", "--reason", "x")

	// It was on record at once.
	_ = s.end(syscall.SIGKILL)
	s.start()
	s.onlyUnhealthy(2)
	mustDo(t, s.end(syscall.SIGTERM))
	s.kubelet.WaitGone(gpuResource)
	if _, err := os.Lstat(filepath.Join(s.dir, "run")); err == nil {
		left, _ := os.ReadDir(filepath.Join(s.dir, "run"))
		for _, f := range left {
			t.Errorf("serve left %s", f.Name())
		}
	}

	// Without serve the record is changed.
	s.does(s.uuids()[2]+" is uncordoned in ", "uncordon", s.uuids()[2])
	s.does(s.uuids()[1]+" is cordoned in ", "cordon", "1", "--reason", "maintenance")
	s.start()
	s.onlyUnhealthy(1)
	s.awaitControl()
	s.does("GPU 1 ("+s.uuids()[1]+") is uncordoned", "uncordon", s.uuids()[1])
	s.listed(gpuResource, 4, 0)
}

// A cordoned GPU takes its MIG devices along, also those that are made later.
func TestServeCordonsMIGDevices(t *testing.T) {
	t.Parallel()
	s := newServed(t, "mig-h100", "mig-strategy: mixed")
	s.start()
	const small = "nvidia.com/mig-1g.10gb"
	mustDo(t, s.node.SetMIG(0, []string{"1g.10gb", "1g.10gb"}))
	for i := 1; i < len(s.node.Machine().GPUs); i++ {
		mustDo(t, s.node.SetMIG(i, nil))
	}
	s.listed(small, 2, 0)
	s.awaitControl()
	s.does("MIG device 0:1", "cordon", "0:1", "--reason", "x")
	s.listed(small, 1, 1)
	s.does("GPU 0", "cordon", "0", "--reason", "x")
	s.listed(small, 0, 2)
	mustDo(t, s.node.SetMIG(0, []string{"1g.10gb", "1g.10gb", "1g.10gb"}))
	s.listed(small, 0, 3)
	s.does("GPU 0", "uncordon", "0")
	s.kubelet.WaitFor(small, func(list []*v1beta1.Device) bool {
		for _, d := range list {
			if d.GetHealth() != v1beta1.Healthy {
				return false
			}
		}
		return len(list) == 3
	})
}
