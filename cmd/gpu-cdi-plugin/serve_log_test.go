package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"gpu-cdi-plugin/test/lib/testenv"
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

// countMessages counts the messages that begin with the text.
func (s *served) countMessages(text string) int {
	n := 0
	for _, m := range s.messages() {
		if strings.HasPrefix(m, text) {
			n++
		}
	}
	return n
}

// logsOnce waits until the log has a message that begins with the text, and expects that further reconciliations do not
// log it again.
func (s *served) logsOnce(text string) {
	s.t.Helper()
	waitFor(s.t, text, func() bool { return s.countMessages(text) > 0 })
	s.reconcile()
	s.reconcile()
	n := s.countMessages(text)
	s.reconcile()
	s.reconcile()
	if again := s.countMessages(text); again != n {
		s.t.Errorf("a message is repeated, %d times and then %d: %s", n, again, text)
	}
}

// reconcile sends SIGHUP, after which the node is reconciled, and waits until the configuration was read again.
func (s *served) reconcile() {
	s.t.Helper()
	const again = "the configuration was read again"
	n := strings.Count(s.log.String(), again)
	s.signal(syscall.SIGHUP)
	waitFor(s.t, again, func() bool { return strings.Count(s.log.String(), again) > n })
}

var attribute = regexp.MustCompile(` ([a-z][a-z ]*|"[^"]+")=("(?:[^"\\]|\\.)*"|\S+)`)

// wantReadable expects that each line of the log can be read without its attributes: these are numbers or repeat a
// part of the message. A resource is named by its socket. The warning of --insecure-paths is the tests' own.
func (s *served) wantReadable() {
	s.t.Helper()
	numbers := regexp.MustCompile(`^\d+$`)
	for line := range strings.Lines(s.log.String()) {
		at := message.FindStringSubmatchIndex(line)
		if at == nil || strings.Contains(line, "--insecure-paths is given: ") {
			continue
		}
		text := line[at[2]:at[3]]
		if !strings.Contains(text, " ") || strings.HasSuffix(strings.Trim(text, `"`), ":") {
			s.t.Errorf("a line of the log is not readable without its attributes: %s", line)
		}
		for _, a := range attribute.FindAllStringSubmatch(line[at[1]:], -1) {
			if value := strings.Trim(a[2], `"`); a[1] != "resource" && !numbers.MatchString(value) &&
				!strings.Contains(text, value) {
				s.t.Errorf("only the attribute %s of this line has its value: %s", a[1], line)
			}
		}
	}
}

// What lasts is logged when it begins and when it ends, and each line can be read without its attributes.
func TestServeLogsWhatLastsOnce(t *testing.T) {
	t.Parallel()
	s := newServed(t, "mig-h100", "mig-strategy: mixed")
	s.start()
	s.kubelet.WaitListed(gpuResource, 2, 0)
	s.logsOnce("GPU 3 is in MIG mode and has no MIG device")
	s.logsOnce("the kubelet watches nvidia.com/mig-7g.80gb")

	testenv.Must(t, s.node.Lose(6))
	s.signal(syscall.SIGHUP)
	s.kubelet.WaitListed(gpuResource, 1, 1)
	s.logsOnce("GPU 6 is unhealthy: cannot be read: ")
	testenv.Must(t, s.node.ClearGPU(6))
	s.signal(syscall.SIGHUP)
	s.kubelet.WaitListed(gpuResource, 2, 0)
	s.logsOnce("no longer the case: GPU 6 is unhealthy: cannot be read: ")
	s.logsOnce("GPU 3 is in MIG mode and has no MIG device")
	if n := s.countMessages("no longer the case: GPU 3"); n != 0 {
		t.Errorf("%d lines say that GPU 3 has a MIG device", n)
	}

	// The spec cannot be written: the directory is a file.
	dir := filepath.Dir(s.spec)
	waitFor(t, "a file in the directory's place", func() bool { // the plugin makes the directory again
		return errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)) == nil
	})
	s.signal(syscall.SIGHUP)
	// A reconciliation that began before may find that the directory is gone, which is another cause.
	const lasting = "a CDI spec or descriptor is not up to date: engines do not read "
	s.logsOnce(lasting)
	testenv.Must(t, os.Remove(dir))
	s.signal(syscall.SIGHUP)
	s.logsOnce("no longer the case: " + lasting)

	s.kubelet.Stop()
	s.logsOnce("the kubelet no longer watches nvidia.com/mig-7g.80gb: ")
	s.logsOnce("nvidia.com/mig-7g.80gb is not registered with the kubelet: ")
	s.kubelet.Start()
	waitFor(t, "a new connection", func() bool {
		return s.countMessages("the kubelet watches nvidia.com/mig-7g.80gb") >= 2
	})

	s.wantReadable()
}
