package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

var message = regexp.MustCompile(`(?m) msg=("(?:[^"\\]|\\.)*"|\S+)`)

// messages are the lines of the log without their times, levels and attributes.
func (s *served) messages() []string {
	var list []string
	for _, found := range message.FindAllStringSubmatch(s.log.String(), -1) {
		list = append(list, strings.ReplaceAll(strings.Trim(found[1], `"`), `\"`, `"`))
	}
	return list
}

// says waits until the log has said that so many times, and asks for another look at the node, after which it has not said
// it again so far.
func (s *served) says(text string, times int) {
	s.t.Helper()
	count := func() int {
		n := 0
		for _, m := range s.messages() {
			if strings.HasPrefix(m, text) {
				n++
			}
		}
		return n
	}
	waitFor(s.t, text, func() bool { return count() >= times })
	s.look()
	if n := count(); n != times {
		s.t.Errorf("the log says %d times, want %d: %s", n, times, text)
	}
}

// look has the plugin look at the node, and waits until it has.
func (s *served) look() {
	s.t.Helper()
	const again = "the configuration was read again"
	n := strings.Count(s.log.String(), again)
	s.signal(syscall.SIGHUP)
	waitFor(s.t, again, func() bool { return strings.Count(s.log.String(), again) > n })
}

// What lasts is logged when it begins and when it ends, and each line can be read without its attributes.
func TestServeLogsWhatLastsOnce(t *testing.T) {
	t.Parallel()
	s := newServed(t, "mig-h100", "mig-strategy: mixed")
	s.start()
	s.listed(gpuResource, 2, 0)
	s.says("GPU 3 is in MIG mode and has no MIG device", 1)
	s.says("the kubelet watches nvidia.com/mig-7g.80gb", 1)
	s.says("nvidia.com/mig-7g.80gb is registered with the kubelet", 1)

	mustDo(t, s.node.Lose(6))
	s.signal(syscall.SIGHUP)
	s.listed(gpuResource, 1, 1)
	s.says("GPU 6 is unhealthy: cannot be read: ", 1)
	mustDo(t, s.node.ClearGPU(6))
	s.signal(syscall.SIGHUP)
	s.listed(gpuResource, 2, 0)
	s.says("this is over: GPU 6 is unhealthy: cannot be read: ", 1)
	s.says("GPU 3 is in MIG mode and has no MIG device", 1)
	s.says("this is over: GPU 3", 0)

	// The spec cannot be written: the directory is a file.
	dir := filepath.Dir(s.spec)
	mustDo(t, os.RemoveAll(dir))
	mustDo(t, os.WriteFile(dir, nil, 0o600))
	s.signal(syscall.SIGHUP)
	s.says("the CDI spec is not what it should be, and devices that it concerns are unhealthy: ", 1)
	mustDo(t, os.Remove(dir))
	s.signal(syscall.SIGHUP)
	s.says("the CDI spec is what it should be again", 1)

	s.kubelet.Stop()
	s.says("nvidia.com/mig-7g.80gb is not connected to the kubelet any more: ", 1)
	s.says("nvidia.com/mig-7g.80gb is not registered with the kubelet: ", 1)
	s.kubelet.Start()
	s.says("the kubelet watches nvidia.com/mig-7g.80gb", 2)

	for _, m := range s.messages() {
		if !strings.Contains(m, " ") || strings.HasSuffix(m, ":") {
			t.Errorf("a line of the log says nothing without its attributes: %q", m)
		}
	}
}
