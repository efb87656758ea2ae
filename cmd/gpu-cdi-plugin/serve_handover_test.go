package main

import (
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// firstLine closes a channel when a line of a log has a text.
type firstLine struct {
	text string
	seen chan struct{}
	once sync.Once
}

func (f *firstLine) Write(p []byte) (int, error) {
	if strings.Contains(string(p), f.text) {
		f.once.Do(func() { close(f.seen) })
	}
	return len(p), nil
}

// beside returns another instance on the same node.
func (s *served) beside() *served {
	other := *s
	other.log, other.watch = &testenv.Log{}, nil
	return &other
}

// Whichever instance is killed, and whenever, one serves in the end, and leaves nothing when it is stopped. The kubelet
// is one before 1.37, which loses the new plugin with the old one.
func TestKillsDuringAHandOver(t *testing.T) {
	t.Parallel()
	for moment, c := range map[string]struct {
		text  string // of the log
		ofOld bool   // whether it is in the old instance's log
	}{
		"the driver is held open":         {"request of another instance", true},
		"the hand-over begins":            {"another instance takes over: this one ends its service", true},
		"the old one has handed over":     {"another instance has handed over", false},
		"the new one is registered":       {gpuResource + " is registered with the kubelet", false},
		"the kubelet watches the new one": {"the kubelet watches " + gpuResource, false},
		"the old one stands by":           {"this one waits for its end", true},
	} {
		for victim, killsOld := range map[string]bool{"the old one": true, "the new one": false} {
			t.Run(moment+", and "+victim+" is killed", func(t *testing.T) {
				t.Parallel()
				s := newServed(t, "pcie-quad", "take-over: true\nlog-level: debug\n")
				s.kubelet.Loses = true
				at := &firstLine{text: c.text, seen: make(chan struct{})}
				next := s.beside()
				if c.ofOld {
					s.watch = at
				} else {
					next.watch = at
				}
				s.start()
				s.kubelet.WaitListed(gpuResource, 4, 0)
				next.start()
				<-at.seen
				killed, left := next, s
				if killsOld {
					killed, left = s, next
				}
				killed.signal(syscall.SIGKILL)
				if err := killed.ended(); err == nil {
					t.Error("it was killed and ended well")
				}
				left.serves("2")
				if err := left.end(syscall.SIGTERM); err != nil {
					t.Errorf("the instance that was left: %v", err)
				}
				s.leftNothing()
			})
		}
	}
}

// serves waits until the instance cordons a device and the kubelet knows it. An instance that has ended because its
// successor did is started again, as by its supervisor.
func (s *served) serves(device string) {
	s.t.Helper()
	waitFor(s.t, "one instance serves", func() bool {
		select {
		case err := <-s.done:
			if !strings.Contains(s.log.String(), "the instance that had taken over has ended") {
				s.t.Fatalf("it has ended with %v", err)
			}
			s.log = &testenv.Log{}
			s.start()
		default:
		}
		r := control.Request{Act: control.Cordon, Device: device, Reason: "a fan is loud"}
		_, err := control.Send(s.t.Context(), s.runtimeDir(), r, func(string) {})
		list := s.kubelet.Devices(gpuResource)
		bad := 0
		for _, d := range list {
			if d.GetHealth() != v1beta1.Healthy {
				bad++
			}
		}
		return err == nil && len(list) == 4 && bad == 1
	})
	// The devices may still be those of the instance that was about to end its service.
	waitFor(s.t, "a container gets a device", func() bool {
		_, err := s.tryAllocate(s.kubelet.WaitListed(gpuResource, 3, 1), s.node.Machine().GPUs[0].UUID)
		return err == nil
	})
}

// leftNothing checks that no socket and no lock is left.
func (s *served) leftNothing() {
	s.t.Helper()
	for _, dir := range []string{s.dir, s.kubelet.Dir} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.Name() != kubelettest.Socket && (d.Type() == fs.ModeSocket || strings.HasSuffix(path, ".lock")) {
				s.t.Errorf("%s is left", path)
			}
			return err
		})
		testenv.Must(s.t, err)
	}
}
