package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
)

// devices shows the last preparation of each device, of this serve and of the ones before, and none of a device that is
// no longer offered.
func TestDevicesShowsTheLastPreparations(t *testing.T) {
	t.Parallel()
	s := newServed(t, "pcie-quad", "prestart: {policy: clean}")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	shown := func(want ...string) {
		t.Helper()
		out := ""
		defer func() {
			if t.Failed() {
				t.Log(out)
			}
		}()
		waitFor(t, "the last preparations", func() bool {
			out = s.devices("-o", "wide", "--no-headers")
			for i, line := range strings.Split(strings.TrimSpace(out), "\n") {
				if ok, err := regexp.MatchString("  "+want[i]+"$", line); err != nil || !ok {
					return false
				}
			}
			return true
		})
	}
	const when, took = `\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`, ` [0-9.]+m?s`
	shown("-", "-", "-", "-")
	s.wantReady(e, s.uuids()[0])
	testenv.Must(t, s.node.Set(1, map[string]string{"memory-used": "2GiB"}))
	s.wantRefused(e, s.uuids()[1], "2048 MiB are in use")
	ok, failed := when+" clean ok"+took, when+` clean failed \(memory\)`+took
	shown(ok, failed, "-", "-")

	// The next serve goes on from there.
	testenv.Must(t, s.end(syscall.SIGTERM))
	s.configure("prestart: {policy: check}")
	s.start()
	e = s.kubelet.WaitListed(gpuResource, 4, 0)
	s.wantReady(e, s.uuids()[2])
	shown(ok, failed, when+" check ok"+took, "-")
	testenv.Must(t, s.end(syscall.SIGTERM))
	s.configure("gpus: {exclude: [1]}\nprestart: {policy: check}")
	s.start()
	e = s.kubelet.WaitListed(gpuResource, 3, 0)
	s.wantReady(e, s.uuids()[0])
	shown(when+" check ok"+took, "-", when+" check ok"+took, "-")

	// A damaged file is replaced.
	for _, damaged := range []string{"{", "null"} {
		testenv.Must(t, os.WriteFile(filepath.Join(s.dir, "state", "prestart.json"), []byte(damaged), 0o644))
		shown("-", "-", "-", "-")
		s.wantReady(e, s.uuids()[3])
		shown("-", "-", "-", when+" check ok"+took)
	}

	// What cannot be written is written with the next preparation.
	path := filepath.Join(s.dir, "state", "prestart.json")
	testenv.Must(t, os.Remove(path))
	testenv.Must(t, os.Mkdir(path, 0o755))
	s.wantReady(e, s.uuids()[0])
	s.logs("the record of device preparations cannot be written; the next preparation tries again")
	testenv.Must(t, os.Remove(path))
	s.wantReady(e, s.uuids()[2])
	shown(when+" check ok"+took, "-", when+" check ok"+took, "-")
}

// devices runs the verb devices and returns what it prints.
func (s *served) devices(args ...string) string {
	s.t.Helper()
	exe, err := os.Executable()
	testenv.Must(s.t, err)
	cmd := exec.Command(exe)
	cmd.Args = append([]string{"gpu-cdi-plugin", "--root", s.node.Root(), "devices"}, args...)
	cmd.Env = append(os.Environ(), insecure, "GPU_CDI_STATE_DIR="+filepath.Join(s.dir, "state"))
	out, err := cmd.Output()
	testenv.Must(s.t, err)
	return string(out)
}

// A preparation that goes on when serve is told to end is recorded.
func TestServeRecordsAPreparationThatEndsAfterSIGTERM(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "program")
	testenv.Must(t, os.WriteFile(program, []byte("#!/bin/sh\ntouch $0.began\nsleep 1\n"), 0o755))
	s := newServed(t, "pcie-quad", "prestart: {exec: "+program+"}")
	s.start()
	e := s.kubelet.WaitListed(gpuResource, 4, 0)
	prepared := make(chan error, 1)
	go func() { prepared <- s.tryPreStart(e, s.uuids()[1]) }()
	waitFor(t, "the preparation", func() bool { _, err := os.Stat(program + ".began"); return err == nil })
	testenv.Must(t, s.end(syscall.SIGTERM))
	testenv.Must(t, <-prepared)
	if lines := strings.Split(s.devices("-o", "wide", "--no-headers"), "\n"); !strings.Contains(lines[1], " check ok ") {
		t.Errorf("%q has no preparation", lines[1])
	}
}
