package mps

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// checkName is the first argument of a test binary that checks its PID namespace.
const checkName = "check-pid-namespace"

// printPIDNamespaceCheck prints the result of checkPIDNamespace for a socket, on which it listens itself if nothing
// else does.
func printPIDNamespaceCheck(socket string) {
	if l, err := net.Listen("unix", socket); err == nil {
		defer l.Close()
	}
	fmt.Println(checkPIDNamespace(socket))
}

// A pod without hostPID has a PID namespace of its own. So has a node that is a container, with its kubelet in it.
func TestCheckPIDNamespace(t *testing.T) {
	testenv.Root(t)
	socket := filepath.Join(makeShortDir(t), "kubelet.sock")
	l, err := net.Listen("unix", socket)
	must(t, err)
	defer l.Close()
	if err := checkPIDNamespace(socket); err != nil {
		t.Errorf("in the kubelet's namespace: %v", err)
	}
	for path, want := range map[string]string{
		socket: ErrPIDNamespace.Error(), socket + ".node": "<nil>",
	} {
		cmd := exec.Command("/proc/self/exe", checkName, path)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
		out, err := cmd.Output()
		if got := strings.TrimSpace(string(out)); err != nil || got != want {
			t.Errorf("with %s in a namespace of its own: %q, %v; want %q", path, got, err, want)
		}
	}
	if err := checkPIDNamespace(socket + ".not"); err != nil {
		t.Errorf("without a kubelet: %v", err)
	}
	s := New(Options{Dir: filepath.Join(makeShortDir(t), "mps"), Check: allowUnsafe, KubeletSocket: socket})
	if err := errors.Join(s.Claim(), s.unlock()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(s.opts.Dir); err != nil {
		t.Error(err)
	}
}
