package inject

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/test/lib/testenv"
)

const (
	uid      = "5a3c1f0e-0c1d-4b52-9b6e-2f1a5f0a7b11"
	otherUID = "77777777-0c1d-4b52-9b6e-2f1a5f0a7b11"
)

// given is what the kubelet gave containers, as "gpu-cdi-plugin serve" reports.
type given map[string]string

// Handle implements control.Handler.
func (g given) Handle(_ context.Context, r control.Request, _ func(string)) (string, error) {
	if names := g[r.Namespace+"/"+r.Pod+"/"+r.Container]; r.Act == control.Allocation && names != "" {
		return names, nil
	}
	return "", errors.New("the kubelet gave the container no device of this plugin")
}

// serve answers at the control socket of the node.
func (n *node) serve(g given) {
	n.t.Helper()
	ctx, cancel := context.WithCancel(n.t.Context())
	log := &testenv.Log{}
	s := control.Server{Dir: n.RuntimeDir, Handler: g, Log: slog.New(slog.NewTextHandler(log, nil))}
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	n.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			n.t.Error(err)
		}
		if strings.Contains(log.String(), "administrator") {
			n.t.Errorf("a hook is taken for an administrator: %s", log)
		}
	})
	testenv.Eventually(n.t, "the socket", func() bool {
		c, err := net.Dial("unix", control.SocketPath(n.RuntimeDir))
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
}

// newPodNode is a node with two pods: team-a/job has GPU 0, and team-b/train GPU 1. In its spec the GPUs have names by
// UUID too, with the same edits.
func newPodNode(t *testing.T) *node {
	t.Helper()
	n := newNode(t)
	spec := ownSpec(n.dir + "/prestart-hook")
	for i := range 2 {
		d := spec.Devices[i]
		d.Name = fmt.Sprintf("GPU-%d", i)
		spec.Devices = append(spec.Devices, d)
	}
	all := spec.Devices[0]
	all.Name = "all"
	all.ContainerEdits.DeviceNodes = append(
		all.ContainerEdits.DeviceNodes[:1:1],
		spec.Devices[1].ContainerEdits.DeviceNodes...)
	spec.Devices = append(spec.Devices, all)
	n.must(cdi.WriteFile(n.dir+"/cdi/ours.json", spec))
	n.write("hook.yaml", "allocated: true")
	n.RuntimeDir, n.PodLogs = n.dir+"/run", n.dir+"/pods"
	for _, pod := range []string{"team-a_job_" + uid, "team-b_train_" + otherUID} {
		n.must(os.MkdirAll(filepath.Join(n.PodLogs, pod), 0o755))
	}
	return n
}

// podConfig is the config.json of container main of a pod, as containerd makes it. More are other annotations.
func podConfig(namespace, pod, uid, cgroup, more string) string {
	return fmt.Sprintf(`{"process": {"cwd": "/"}, "linux": {"cgroupsPath": %q}, "annotations": {
	"io.kubernetes.cri.sandbox-namespace": %q, "io.kubernetes.cri.sandbox-name": %q, "io.kubernetes.cri.sandbox-uid": %q,
	"io.kubernetes.cri.container-name": "main", %s}}`, cgroup, namespace, pod, uid, more)
}

// crio is a configuration as CRI-O makes it.
func crio(config string) string {
	return strings.NewReplacer(
		"io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace",
		"io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name",
		"io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid",
		"io.kubernetes.cri.container-name", "io.kubernetes.container.name",
		":cri-containerd:", ":crio:",
	).Replace(config)
}

const (
	cgroupfs = "/kubepods/burstable/pod" + uid + "/5f1c"
	systemd  = "kubepods-burstable-pod5a3c1f0e_0c1d_4b52_9b6e_2f1a5f0a7b11.slice:cri-containerd:5f1c"
)

func asks(devices string) string { return `"cdi.k8s.io/a": "` + devices + `"` }

// own is a container of the pod team-a/job that asks for devices.
func own(devices string) string { return podConfig("team-a", "job", uid, systemd, asks(devices)) }

// TestAllocated has what a container can have in its annotations that others have put there, as with a checkpoint that
// it is restored from (CVE-2026-53492): it gets what the kubelet gave it, or nothing.
func TestAllocated(t *testing.T) {
	n := newPodNode(t)
	n.serve(given{"team-a/job/main": "nvidia.com/gpu=GPU-0", "team-b/train/main": "nvidia.com/gpu=GPU-1"})
	for name, tc := range map[string]struct {
		config string
		want   string // of the error; empty if the container gets GPU 0
	}{
		"its own, by UUID":       {own("nvidia.com/gpu=GPU-0"), ""},
		"its own, by index":      {own("nvidia.com/gpu=0"), ""},
		"its own, with cgroupfs": {podConfig("team-a", "job", uid, cgroupfs, asks("nvidia.com/gpu=0")), ""},
		"its own, of CRI-O":      {crio(own("nvidia.com/gpu=0")), ""},
		"annotations of both, alike": {
			podConfig("team-a", "job", uid, systemd, asks("nvidia.com/gpu=0")+`, "io.kubernetes.pod.name": "job"`), "",
		},
		"the smuggled GPU of another": {
			own("nvidia.com/gpu=1"),
			"device nvidia.com/gpu=1 is not given: the kubelet gave container main of pod team-a/job only nvidia.com/gpu=GPU-0",
		},
		"by UUID":        {own("nvidia.com/gpu=GPU-1"), "device nvidia.com/gpu=GPU-1 is not given"},
		"beside its own": {own("nvidia.com/gpu=0,nvidia.com/gpu=1"), "device nvidia.com/gpu=1 is not given"},
		"all":            {own("nvidia.com/gpu=all"), "device nvidia.com/gpu=all is not given"},
		"in an annotation of its own": {
			podConfig("team-a", "job", uid, systemd, asks("nvidia.com/gpu=0")+`, "cdi.k8s.io/b": "nvidia.com/gpu=1"`),
			"device nvidia.com/gpu=1 is not given",
		},
		"a device that does not exist": {own("nvidia.com/gpu=9"), "device nvidia.com/gpu=9 is not given"},

		"the name of another pod": {
			podConfig("team-b", "train", uid, systemd, asks("nvidia.com/gpu=1")),
			"the kubelet has no pod team-b/train with the UID " + uid,
		},
		"the name and the UID of another pod": {
			podConfig("team-b", "train", otherUID, systemd, asks("nvidia.com/gpu=1")),
			"is not that of the pod with the UID " + otherUID,
		},
		"the same, with cgroupfs": {
			podConfig("team-b", "train", otherUID, cgroupfs, asks("nvidia.com/gpu=1")), "its cgroup",
		},
		"a cgroup that names both": {
			podConfig("team-b", "train", otherUID, cgroupfs+"/../../pod"+otherUID, asks("nvidia.com/gpu=1")), "its cgroup",
		},
		"the keys of another engine": {
			podConfig("team-a", "job", uid, systemd, asks("nvidia.com/gpu=1")+`, "io.kubernetes.pod.name": "train"`),
			"its annotations io.kubernetes.cri.sandbox-name and io.kubernetes.pod.name differ",
		},
		"of no pod": {
			`{"process": {"cwd": "/"}, "annotations": {` + asks("nvidia.com/gpu=0") + `}}`, "the container belongs to no pod",
		},
		"traversal in the name of a pod": {
			podConfig("../..", "x", uid, systemd, asks("nvidia.com/gpu=0")), `name the pod with "../.."`,
		},
		"a name with a hyphen below": {
			podConfig("team-a_job", "x", uid, systemd, asks("nvidia.com/gpu=0")), `name the pod with "team-a_job"`,
		},
		"a container without devices": {
			strings.Replace(own("nvidia.com/gpu=0"), `"main"`, `"side"`, 1),
			"what the kubelet gave container side of pod team-a/job is unknown: " +
				"gpu-cdi-plugin serve: the kubelet gave the container no device of this plugin",
		},
		"an answer for a name with another one in it": {
			strings.Replace(own("nvidia.com/gpu=0"), `"main"`, `"main,x"`, 1), `name the pod with "main,x"`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			n.must(os.WriteFile(dir+"/config.json", []byte(tc.config), 0o644))
			err := n.Bundle(dir)
			checkError(t, err, tc.want)
			after, _ := os.ReadFile(dir + "/config.json")
			if tc.want != "" && string(after) != tc.config {
				t.Errorf("config.json became %s", after)
			}
			if tc.want == "" &&
				(!bytes.Contains(after, []byte(`"/dev/nvidia0"`)) || bytes.Contains(after, []byte("nvidia1"))) {
				t.Errorf("config.json became %s", after)
			}
		})
	}
}

// A device of another spec with the same edits is not the one that the kubelet gave.
func TestAllocatedFromAnotherSpec(t *testing.T) {
	n := newPodNode(t)
	n.serve(given{"team-a/job/main": "nvidia.com/gpu=GPU-0"})
	spec := ownSpec(n.dir + "/prestart-hook")
	spec.Kind, spec.ContainerEdits.Env = "their.com/disk", []string{"DISK=all"}
	n.must(cdi.WriteFile(n.dir+"/cdi/theirs.json", spec))
	_, err := n.Config([]byte(own("their.com/disk=0")))
	checkError(t, err, "device their.com/disk=0 is not given: the kubelet gave container main of pod team-a/job only")
}

// A user who writes config.json can write the cgroup of any pod.
func TestAllocatedInAUsersBundle(t *testing.T) {
	n := newPodNode(t)
	n.serve(given{"team-a/job/main": "nvidia.com/gpu=GPU-0"})
	n.must(os.Mkdir(n.dir+"/bundle", 0o755))
	n.write("bundle/config.json", own("nvidia.com/gpu=0"))
	n.must(errors.Join(os.Chown(n.dir+"/bundle", 1000, 1000), os.Chown(n.dir+"/bundle/config.json", 1000, 1000)))
	checkError(t, n.Bundle(n.dir+"/bundle"), "the container's bundle belongs to user 1000, who could name any pod")
	if after, err := n.Config([]byte(own("nvidia.com/gpu=0"))); err != nil || after == nil {
		t.Errorf("a precreate hook: %s, %v", after, err)
	}
}

// Without an answer of the plugin nothing is given, and the time for it is bounded.
func TestAllocatedWithoutAnAnswer(t *testing.T) {
	listen := func(n *node, serve func(net.Conn)) {
		n.must(os.Mkdir(n.RuntimeDir, 0o755))
		l, err := net.Listen("unix", control.SocketPath(n.RuntimeDir))
		n.must(err)
		n.t.Cleanup(func() { _ = l.Close() })
		go func() {
			for c, err := l.Accept(); err == nil; c, err = l.Accept() {
				n.t.Cleanup(func() { _ = c.Close() }) // else the garbage collector closes it
				_, _ = c.Read(make([]byte, 4096))     // the request
				serve(c)
			}
		}()
	}
	for name, tc := range map[string]struct {
		make func(n *node)
		want string
	}{
		"no plugin": {func(*node) {}, "gpu-cdi-plugin serve does not run: no program answers at DIR/run/control.sock"},
		"a socket that was left": {func(n *node) {
			n.must(os.Mkdir(n.RuntimeDir, 0o755))
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			n.must(errors.Join(err, unix.Bind(fd, &unix.SockaddrUnix{Name: control.SocketPath(n.RuntimeDir)}), unix.Close(fd)))
		}, "gpu-cdi-plugin serve does not run"},
		"one that hangs": {
			func(n *node) { listen(n, func(net.Conn) {}) },
			"gpu-cdi-plugin serve did not answer at DIR/run/control.sock within 2s",
		},
		"one that never ends": {func(n *node) {
			listen(n, func(c net.Conn) {
				_, _ = c.Write([]byte("HTTP/1.0 200 OK\r\n\r\n"))
				go func() {
					for _, err := c.Write([]byte(" ")); err == nil; _, err = c.Write([]byte(" ")) {
						time.Sleep(time.Millisecond)
					}
				}()
			})
		}, "gpu-cdi-plugin serve did not answer"},
		"one that writes without a limit": {func(n *node) {
			listen(n, func(c net.Conn) {
				go func() {
					for data := bytes.Repeat([]byte("x"), 1<<20); ; {
						if _, err := c.Write(data); err != nil {
							return
						}
					}
				}()
			})
		}, "it answers"},
		"an older one": {func(n *node) {
			listen(n, func(c net.Conn) {
				_, _ = c.Write([]byte("HTTP/1.0 400 Bad Request\r\nX: y\r\n\r\nthere is no act \"allocation\"\n"))
				_ = c.Close()
			})
		}, `"HTTP/1.0 400 Bad Request": "there is no act \"allocation\""`},
		"another program": {func(n *node) {
			listen(n, func(c net.Conn) { _, _ = c.Write([]byte("220 mail\r\n")); _ = c.Close() })
		}, "gpu-cdi-plugin serve at DIR/run/control.sock"},
		"an empty answer": {func(n *node) {
			listen(n, func(c net.Conn) { _, _ = c.Write([]byte("HTTP/1.0 200 OK\r\n\r\n{}\n")); _ = c.Close() })
		}, "the answer of gpu-cdi-plugin serve is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newPodNode(t)
			tc.make(n)
			begin := time.Now()
			after, err := n.Config([]byte(own("nvidia.com/gpu=0")))
			checkError(t, err, strings.ReplaceAll(tc.want, "DIR", n.dir))
			if after != nil || time.Since(begin) > time.Minute {
				t.Errorf("after %v: %s", time.Since(begin), after)
			}
		})
	}
}

// While one instance of the plugin takes over from another, nobody may answer for a moment.
func TestAllocatedWhileTheSocketChangesHands(t *testing.T) {
	// once serves one connection, after the socket has been removed.
	once := func(n *node, serve func(net.Conn)) {
		n.must(os.Mkdir(n.RuntimeDir, 0o755))
		l, err := net.Listen("unix", control.SocketPath(n.RuntimeDir))
		n.must(err)
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = l.Close()
			serve(c)
			_ = c.Close()
		}()
	}
	for name, first := range map[string]func(n *node){
		"nobody has made it yet": func(*node) {},
		"nobody listens": func(n *node) {
			n.must(os.Mkdir(n.RuntimeDir, 0o755))
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			n.must(errors.Join(err, unix.Bind(fd, &unix.SockaddrUnix{Name: control.SocketPath(n.RuntimeDir)}), unix.Close(fd)))
		},
		"the old instance ends before it reads the request": func(n *node) { once(n, func(net.Conn) {}) },
		"the old instance ends before it answers": func(n *node) {
			once(n, func(c net.Conn) { _, _ = c.Read(make([]byte, 4096)) })
		},
		"the old instance ends after the header": func(n *node) {
			once(n, func(c net.Conn) {
				_, _ = c.Read(make([]byte, 4096))
				_, _ = c.Write([]byte("HTTP/1.0 200 OK\r\n\r\n"))
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := newPodNode(t)
			first(n)
			done := make(chan error, 1)
			go func() { _, err := n.Config([]byte(own("nvidia.com/gpu=0"))); done <- err }()
			testenv.Eventually(t, "it is about to try again, or has failed", func() bool {
				buf := make([]byte, 1<<20)
				for g := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
					if strings.Contains(g, "inject.Injector.allocated") && strings.Contains(g, "time.Sleep") {
						return true
					}
				}
				return len(done) > 0
			})
			n.serve(given{"team-a/job/main": "nvidia.com/gpu=GPU-0"})
			n.must(<-done)
		})
	}
}

// Another user's program at the socket is not believed.
func TestAllocatedByAnotherUser(t *testing.T) {
	n := newPodNode(t)
	n.must(os.Mkdir(n.RuntimeDir, 0o755))
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	n.must(errors.Join(err, unix.Bind(fd, &unix.SockaddrUnix{Name: control.SocketPath(n.RuntimeDir)})))
	t.Cleanup(func() { _ = unix.Close(fd) })
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread, which alone becomes another user's, ends with the goroutine
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, 1000, 1000, 1000); errno != 0 {
			done <- errno
			return
		}
		done <- unix.Listen(fd, 1)
	}()
	n.must(<-done)
	_, err = n.Config([]byte(own("nvidia.com/gpu=0")))
	checkError(t, err, "user 1000 listens there, want root")
}
