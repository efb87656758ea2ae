package plugin

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestDevicesAreRegisteredAndAdvertised(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	k.Start()
	nowhere := gpuAt(2)
	nowhere.NUMANode = gpu.NoNUMANode
	lost := gpuAt(4)
	lost.Healthy, lost.Reason = false, "fell off the bus"
	devices := []resource.Device{gpuAt(0), nowhere, lost}
	p := start(t, optionsFor(k), resource.Resource{Name: gpus, Devices: devices}, migOf(1))
	e := k.WaitRegistered(gpus)
	want := []*v1beta1.Device{
		{ID: uuid(0), Health: "Healthy", Topology: &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: 0}}}},
		{ID: uuid(2), Health: "Healthy"},
		{ID: uuid(4), Health: "Unhealthy", Topology: &v1beta1.TopologyInfo{Nodes: []*v1beta1.NUMANode{{ID: 1}}}},
	}
	if diff := cmp.Diff(want, k.Devices(gpus), protocmp.Transform()); diff != "" {
		t.Errorf("the advertised devices (-want +got):\n%s", diff)
	}
	request := &v1beta1.RegisterRequest{
		Version: "v1beta1", Endpoint: "gpu-cdi-nvidia-com-gpu.sock", ResourceName: gpus,
		Options: &v1beta1.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	}
	if diff := cmp.Diff(request, e.Request, protocmp.Transform()); diff != "" {
		t.Errorf("the registration (-want +got):\n%s", diff)
	}
	k.WaitRegistered("nvidia.com/mig-1g.10gb")
	eventually(t, "the plugin is ready", func() bool { return p.Ready() == nil })
	info, err := os.Lstat(ownSocket(k))
	testenv.Must(t, err)
	if got := info.Mode().Perm(); got != 0o600 {
		t.Errorf("the socket's mode is %o, want 600", got)
	}
}

func TestAnUpdateIsAdvertised(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := start(t, optionsFor(k), gpusOf(2))
	k.WaitRegistered(gpus)
	testenv.Must(t, p.Update([]resource.Resource{gpusOf(3), migOf(1)}, nil))
	k.WaitFor(gpus, func(d []*v1beta1.Device) bool { return len(d) == 3 })
	k.WaitRegistered("nvidia.com/mig-1g.10gb")
	testenv.Must(t, p.Update([]resource.Resource{gpusOf(1)}, nil))
	k.WaitFor(gpus, func(d []*v1beta1.Device) bool { return len(d) == 1 })
	// A resource that is gone stays registered, with no devices.
	k.WaitFor("nvidia.com/mig-1g.10gb", func(d []*v1beta1.Device) bool { return len(d) == 0 })
	if n := k.Registrations(); n != 2 {
		t.Errorf("%d registrations, want 2", n)
	}
}

func TestAThousandKubeletRestarts(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	k.Start()
	p := start(t, optionsFor(k), gpusOf(8))
	k.WaitRegistered(gpus)
	for range 1000 {
		k.Restart()
		k.WaitFor(gpus, func(d []*v1beta1.Device) bool { return len(d) == 8 })
	}
	eventually(t, "the kubelet watches", func() bool { return p.Status()[0].Watched })
	// One for each kubelet, and no more: a needless registration closes the kubelet's connection.
	if got := k.Registrations(); got != 1001 {
		t.Errorf("%d registrations, want 1001", got)
	}
}

func TestAnEndpointRegistersAgain(t *testing.T) {
	cases := map[string]func(t *testing.T, k *kubelettest.Kubelet, p *running){
		"the stream ends and the kubelet runs on": func(t *testing.T, k *kubelettest.Kubelet, p *running) {
			k.Drop(gpus)
		},
		"the kubelet is stopped for a while": func(t *testing.T, k *kubelettest.Kubelet, p *running) {
			k.Stop()
			eventually(t, "the plugin is not ready", func() bool { return p.Ready() != nil })
			k.Start()
		},
		"the kubelet has a new socket, and the stream stays": func(t *testing.T, k *kubelettest.Kubelet, p *running) {
			another := kubelettest.New(t)
			another.Start()
			testenv.Must(t, os.Remove(filepath.Join(k.Dir, kubelettest.Socket)))
			before := k.Registrations()
			// A rename puts another socket in the place.
			testenv.Must(t, os.Rename(
				filepath.Join(another.Dir, kubelettest.Socket), filepath.Join(k.Dir, kubelettest.Socket)))
			another.WaitRegistrations(1)
			if k.Registrations() != before {
				t.Error("the earlier kubelet was called")
			}
			another.Stop()
			_ = os.Remove(filepath.Join(k.Dir, kubelettest.Socket))
			k.Restart()
		},
		"the directory is replaced": func(t *testing.T, k *kubelettest.Kubelet, p *running) {
			k.Stop()
			testenv.Must(t, os.Rename(k.Dir, k.Dir+".old"))
			t.Cleanup(func() { _ = os.RemoveAll(k.Dir + ".old") })
			p.awaitProblem("no such file")
			testenv.Must(t, os.Mkdir(k.Dir, 0o755))
			k.Start()
		},
		"a kubelet that was killed left its socket": func(t *testing.T, k *kubelettest.Kubelet, p *running) {
			k.Stop()
			leaveSocket(t, filepath.Join(k.Dir, kubelettest.Socket))
			p.awaitProblem("connection refused")
			k.Start()
		},
		"a file is in the place of the kubelet's socket": func(t *testing.T, k *kubelettest.Kubelet, p *running) {
			k.Stop()
			path := filepath.Join(k.Dir, kubelettest.Socket)
			testenv.Must(t, os.WriteFile(path, nil, 0o600))
			p.awaitProblem(path + " is not a socket: remove it")
			testenv.Must(t, os.Remove(path))
			p.awaitProblem("there is no socket " + path)
			k.Start()
		},
		"the kubelet's socket is a link that leads to itself": func(t *testing.T, k *kubelettest.Kubelet, p *running) {
			k.Stop()
			path := filepath.Join(k.Dir, kubelettest.Socket)
			testenv.Must(t, os.Symlink(kubelettest.Socket, path))
			p.awaitProblem(path + ": too many levels of symbolic links")
			testenv.Must(t, os.Remove(path))
			k.Start()
		},
		"the kubelet refuses at first": func(t *testing.T, k *kubelettest.Kubelet, p *running) {
			k.Refuse(errors.New("device plugin already connected"))
			before := k.Registrations()
			k.Drop(gpus)
			k.WaitRegistrations(before + 4)
			p.awaitProblem("already connected")
			k.Refuse(nil)
		},
	}
	for name, disturb := range cases {
		t.Run(name, func(t *testing.T) {
			leaves(t)
			k := kubelettest.New(t)
			k.Start()
			p := start(t, optionsFor(k), gpusOf(2))
			k.WaitRegistered(gpus)
			eventually(t, "the plugin is ready", func() bool { return p.Ready() == nil })
			disturb(t, k, p)
			k.WaitRegistered(gpus)
			eventually(t, "the plugin is ready", func() bool { return p.Ready() == nil })
		})
	}
}

// awaitProblem waits until the problem of the first resource has a text.
func (r *running) awaitProblem(text string) {
	r.t.Helper()
	eventually(r.t, "the problem is reported", func() bool { return strings.Contains(r.Status()[0].Reason, text) })
}

// leaveSocket leaves a socket that no process listens on.
func leaveSocket(t *testing.T, path string) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	testenv.Must(t, err)
	l.SetUnlinkOnClose(false)
	testenv.Must(t, l.Close())
}

func TestAKubeletThatNeverWatchesIsCalledAgain(t *testing.T) {
	k := kubelettest.New(t)
	k.Unwatch(true)
	k.Start()
	o := optionsFor(k)
	o.streamGrace = 20 * time.Millisecond
	log := &testenv.Log{}
	o.Log = slog.New(slog.NewTextHandler(log, nil))
	p := start(t, o, gpusOf(1))
	k.WaitRegistrations(4)
	p.awaitProblem("did not call ListAndWatch")
	logged := log.String()
	const line = gpus + " is not registered with the kubelet: the kubelet did not call ListAndWatch after the registration"
	if n := strings.Count(logged, `msg="`+line+`"`); n != 1 {
		t.Errorf("the line is logged %d times: %s\n%s", n, line, logged)
	}
	k.Unwatch(false)
	k.WaitRegistered(gpus)
	eventually(t, "it is logged", func() bool {
		return strings.Contains(log.String(), `msg="the kubelet watches `+gpus+`"`)
	})
}

func TestARegisterCallWithoutAnAnswerTimesOut(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	hung, err := net.Listen("unix", filepath.Join(k.Dir, kubelettest.Socket))
	testenv.Must(t, err)
	o := optionsFor(k)
	o.registerTimeout = 20 * time.Millisecond
	p := start(t, o, gpusOf(1))
	p.awaitProblem("no answer in time")
	testenv.Must(t, hung.Close())
	testenv.Must(t, p.stop())
}

// The kubelet connects to the plugin's socket before it answers, and one that hangs may be replaced.
func TestACallWithoutAnAnswerDelaysNothing(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	hung, err := net.Listen("unix", filepath.Join(k.Dir, kubelettest.Socket))
	testenv.Must(t, err)
	o := optionsFor(k)
	o.registerTimeout = time.Minute
	start(t, o, gpusOf(1))
	called, err := hung.Accept()
	testenv.Must(t, err)
	testenv.Must(t, os.Remove(ownSocket(k)))
	eventually(t, "the socket is back", func() bool { _, err := os.Lstat(ownSocket(k)); return err == nil })
	k.Start() // in the place of the socket that hangs
	k.WaitRegistered(gpus)
	testenv.Must(t, errors.Join(called.Close(), hung.Close()))
}

// A kubelet that ends may accept a registration and watch when the next kubelet has started. If the first call to the
// next one fails, it must be called again, although the earlier one watches.
func TestAnEarlierKubeletThatWatchesDoesNotHideTheNext(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	next, err := net.Listen("unix", filepath.Join(k.Dir, kubelettest.Socket))
	testenv.Must(t, err)
	start(t, optionsFor(k), gpusOf(1))
	called, err := next.Accept()
	testenv.Must(t, err)
	watchDevices(t, ownSocket(k))
	testenv.Must(t, called.Close())
	testenv.Must(t, next.(*net.UnixListener).SetDeadline(time.Now().Add(20*time.Second)))
	again, err := next.Accept()
	if err != nil {
		t.Fatalf("the next kubelet is not called again: %v", err)
	}
	testenv.Must(t, errors.Join(again.Close(), next.Close()))
}

// watchDevices holds a ListAndWatch stream open until the test ends.
func watchDevices(t testing.TB, socket string) {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	stream, err := v1beta1.NewDevicePluginClient(conn).ListAndWatch(t.Context(), &v1beta1.Empty{})
	testenv.Must(t, err)
	_, err = stream.Recv()
	testenv.Must(t, err)
}

func TestARemovedSocketIsRestored(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := start(t, optionsFor(k), gpusOf(2))
	e := k.WaitRegistered(gpus)
	for range 3 {
		testenv.Must(t, os.Remove(ownSocket(k)))
		eventually(t, "the socket is back", func() bool { _, err := os.Lstat(ownSocket(k)); return err == nil })
	}
	// The open connection is not disturbed.
	testenv.Must(t, p.Update([]resource.Resource{gpusOf(1)}, nil))
	if k.WaitFor(gpus, func(d []*v1beta1.Device) bool { return len(d) == 1 }) != e {
		t.Error("the kubelet has another connection")
	}
	if n := k.Registrations(); n != 1 {
		t.Errorf("%d registrations, want 1", n)
	}
	k.Restart()
	k.WaitRegistered(gpus)
}

func TestWithoutInotifyTheDirectoryIsPolled(t *testing.T) {
	cases := map[string]func() (*fsnotify.Watcher, error){
		"no instance is left": func() (*fsnotify.Watcher, error) {
			return nil, os.NewSyscallError("inotify_init1", syscall.EMFILE)
		},
		"the directory cannot be added": func() (*fsnotify.Watcher, error) {
			w, err := silentWatcher()
			if err != nil {
				return nil, err
			}
			return w, w.Close()
		},
	}
	for name, newWatcher := range cases {
		t.Run(name, func(t *testing.T) {
			leaves(t)
			k := kubelettest.New(t)
			o := optionsFor(k)
			log := &testenv.Log{}
			o.newWatcher, o.Log = newWatcher, slog.New(slog.NewTextHandler(log, nil))
			start(t, o, gpusOf(1))
			k.Start()
			k.WaitRegistered(gpus)
			k.Restart()
			k.WaitRegistered(gpus)
			if n := strings.Count(log.String(), "the kernel does not report changes"); n != 1 {
				t.Errorf("%d warnings, want 1:\n%s", n, log)
			}
		})
	}
}

func TestInotifyIsTriedAgain(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	o := optionsFor(k)
	var tries atomic.Int32
	o.newWatcher = func() (*fsnotify.Watcher, error) {
		if tries.Add(1) < 3 {
			return nil, os.NewSyscallError("inotify_init1", syscall.EMFILE)
		}
		return fsnotify.NewWatcher()
	}
	start(t, o, gpusOf(1))
	eventually(t, "a watcher is made", func() bool { return tries.Load() == 3 })
	k.Start()
	k.WaitRegistered(gpus)
	if n := tries.Load(); n != 3 {
		t.Errorf("%d watchers are made, want 3", n)
	}
}

func TestASecondInstanceEnds(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	k.Start()
	start(t, optionsFor(k), gpusOf(2))
	k.WaitRegistered(gpus)
	second := start(t, optionsFor(k), gpusOf(1), migOf(1))
	err := second.wait()
	if !errors.Is(err, fileio.ErrHeld) || !strings.Contains(err.Error(), gpus) {
		t.Errorf("the second instance: %v, want %v and the resource", err, fileio.ErrHeld)
	}
	// The first is not disturbed, and the second leaves nothing.
	k.WaitFor(gpus, func(d []*v1beta1.Device) bool { return len(d) == 2 })
	want := []string{".gpu-cdi-nvidia-com-gpu.sock.lock", "gpu-cdi-nvidia-com-gpu.sock", "kubelet.sock"}
	if diff := cmp.Diff(want, inDir(t, k.Dir)); diff != "" {
		t.Errorf("in the directory (-want +got):\n%s", diff)
	}
}

func TestTheLockIsRestoredAfterAKubeletRemovedAllFiles(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	start(t, optionsFor(k), gpusOf(2))
	k.WaitRegistered(gpus)
	// Kubelets before 1.36 do this when they start.
	testenv.Must(t, os.Remove(filepath.Join(k.Dir, ".gpu-cdi-nvidia-com-gpu.sock.lock")))
	k.Restart()
	k.WaitRegistered(gpus)
	if err := start(t, optionsFor(k), gpusOf(1)).wait(); !errors.Is(err, fileio.ErrHeld) {
		t.Errorf("a second instance: %v, want %v", err, fileio.ErrHeld)
	}
}

func TestAStoppedPluginLeavesNoFiles(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	k.Start()
	p := start(t, optionsFor(k), gpusOf(2), migOf(1))
	k.WaitRegistered(gpus)
	k.WaitRegistered("nvidia.com/mig-1g.10gb")
	testenv.Must(t, p.stop())
	k.WaitGone(gpus)
	if diff := cmp.Diff([]string{"kubelet.sock"}, inDir(t, k.Dir)); diff != "" {
		t.Errorf("in the directory (-want +got):\n%s", diff)
	}
	if err := p.Ready(); err == nil || !strings.Contains(err.Error(), "the plugin stopped") {
		t.Errorf("ready: %v", err)
	}
	start(t, optionsFor(k), gpusOf(2))
	k.WaitRegistered(gpus)
}

// slowObserver holds up each call of Allocate.
type slowObserver struct {
	noObserver

	called  chan struct{}
	proceed chan struct{}
}

// Allocated waits.
func (o slowObserver) Allocated(string, codes.Code, int, time.Duration) {
	o.called <- struct{}{}
	<-o.proceed
}

func TestAStoppingPluginWaitsForCallsUnderWay(t *testing.T) {
	for name, c := range map[string]struct {
		drain time.Duration
		ok    bool
	}{
		"as long as they take":                    {30 * time.Second, true},
		"but no longer than the drain's time out": {10 * time.Millisecond, false},
	} {
		t.Run(name, func(t *testing.T) {
			k := kubelettest.New(t)
			k.Start()
			slow := slowObserver{called: make(chan struct{}), proceed: make(chan struct{})}
			o := optionsFor(k)
			o.Observer, o.drainTimeout = slow, c.drain
			p := start(t, o, gpusOf(1))
			e := k.WaitRegistered(gpus)
			answered := make(chan error, 1)
			go func() {
				_, err := e.Client.Allocate(context.Background(), allocate(uuid(0)))
				answered <- err
			}()
			<-slow.called
			p.cancel()
			if c.ok {
				k.WaitGone(gpus) // the stream has ended, the call has not
				close(slow.proceed)
			}
			if err := <-answered; (err == nil) != c.ok {
				t.Errorf("the call ended with %v", err)
			}
			if !c.ok {
				close(slow.proceed)
			}
			testenv.Must(t, p.wait())
		})
	}
}

func TestRunFailsWhereSocketsCannotBe(t *testing.T) {
	cases := map[string]struct {
		prepare func(t *testing.T, o *Options)
		want    error // or nil for any
		text    string
	}{
		"a directory that is a file": {func(t *testing.T, o *Options) {
			o.Dir = filepath.Join(o.Dir, "file")
			testenv.Must(t, os.WriteFile(o.Dir, nil, 0o600))
		}, ErrNoKubelet, "is not a directory"},
		"a link that leads to itself": {func(t *testing.T, o *Options) {
			o.Dir = filepath.Join(o.Dir, "loop")
			testenv.Must(t, os.Symlink("loop", o.Dir))
		}, ErrNoKubelet, "too many levels"},
		"a file where the socket should be": {func(t *testing.T, o *Options) {
			testenv.Must(t, os.WriteFile(filepath.Join(o.Dir, "gpu-cdi-nvidia-com-gpu.sock"), []byte("mine"), 0o600))
		}, nil, "is not a socket: remove it"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			leaves(t)
			k := kubelettest.New(t)
			o := optionsFor(k)
			c.prepare(t, &o)
			err := start(t, o, gpusOf(1)).wait()
			if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("%v, want %v with %q", err, c.want, c.text)
			}
			for _, name := range inDir(t, k.Dir) {
				if strings.HasSuffix(name, ".lock") {
					t.Errorf("%s is left", name)
				}
			}
		})
	}
}

// A plugin may start before a kubelet that has never run on this host: it waits, as it does for the kubelet's socket.
func TestRunWaitsForTheDirectory(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	dir := k.Dir + ".later"
	testenv.Must(t, os.Rename(k.Dir, dir))
	p := start(t, optionsFor(k), gpusOf(1))
	p.awaitProblem("there is no directory " + k.Dir + "; is the kubelet running, and is this its directory?")
	testenv.Must(t, os.Rename(dir, k.Dir))
	k.Start()
	k.WaitRegistered(gpus)
	testenv.Must(t, p.stop())
}

func TestRunEndsWhileItWaitsForTheDirectory(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	o := optionsFor(k)
	o.Dir = filepath.Join(k.Dir, "none")
	p := start(t, o, gpusOf(1))
	p.awaitProblem("there is no directory " + o.Dir)
	testenv.Must(t, p.stop())
}

// After the lock's file was removed another instance may lock it. Two would take the kubelet's connection from each
// other.
func TestAnInstanceThatLostItsLockEnds(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	k.Start()
	first := start(t, optionsFor(k), gpusOf(1))
	k.WaitRegistered(gpus)
	path := filepath.Join(k.Dir, ".gpu-cdi-nvidia-com-gpu.sock.lock")
	var other *fileio.Lock
	eventually(t, "another instance has the lock", func() bool {
		_ = os.Remove(path) // the first may make it again before the other has it
		var err error
		other, err = fileio.AcquireLock(path)
		return err == nil
	})
	t.Cleanup(func() { testenv.Must(t, other.Release()) })
	if err := first.wait(); !errors.Is(err, fileio.ErrHeld) || !strings.Contains(err.Error(), "serve "+gpus) {
		t.Errorf("the first instance ends with %v", err)
	}
}

func TestAResourceThatCannotBeAdvertisedLeavesTheOthers(t *testing.T) {
	p, err := New(optionsFor(kubelettest.New(t)))
	testenv.Must(t, err)
	good := migOf(1)
	if err := p.Update([]resource.Resource{gpusOf(257), good}, nil); err == nil || !strings.Contains(err.Error(), gpus) {
		t.Errorf("%v, want an error about %s", err, gpus)
	}
	if s := p.Status(); len(s) != 1 || s[0].Resource != good.Name {
		t.Errorf("the resources %+v are served, want only the valid one", s)
	}
}

// The kubelet knows the plugin of a new instance before that of the old one ends. The next instance has the first
// socket again.
func TestAnInstanceBesideAnother(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	k.Start()
	beside := optionsFor(k)
	beside.Beside = true
	old := start(t, beside, gpusOf(2))
	k.WaitRegistered(gpus)
	for _, socket := range []string{"gpu-cdi-nvidia-com-gpu.2.sock", "gpu-cdi-nvidia-com-gpu.sock"} {
		before := k.Registrations()
		old.Retire()
		next := start(t, beside, gpusOf(3))
		k.WaitRegistrations(before + 1)
		e := k.WaitFor(gpus, func(d []*v1beta1.Device) bool { return len(d) == 3 })
		if got := e.Request.GetEndpoint(); got != socket {
			t.Errorf("the socket is %s, want %s", got, socket)
		}
		testenv.Must(t, old.stop())
		want := []string{"." + socket + ".lock", socket, "kubelet.sock"}
		if diff := cmp.Diff(want, inDir(t, k.Dir)); diff != "" {
			t.Errorf("in the directory (-want +got):\n%s", diff)
		}
		if n := k.Registrations(); n != before+1 {
			t.Errorf("%d registrations, want %d: the old instance registers too", n, before+1)
		}
		old = next
	}
}

// A kubelet that finds sockets in plugins_registry connects to each new one. One before 1.37 loses the new instance
// with the old one.
func TestAnInstanceBesideAnotherIsDiscovered(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	k.Loses = true
	k.Start()
	o := optionsFor(k)
	o.Beside, o.Dir, o.RegistryDir, o.streamGrace = true, "", k.Dir, time.Hour
	old := start(t, o, gpusOf(2))
	connect := func(path string) {
		t.Helper()
		eventually(t, "the kubelet connects to "+path, func() bool { return k.Connect(gpus, path) == nil })
	}
	connect(ownSocket(k))
	k.WaitListed(gpus, 2, 0)
	old.Retire()
	next := start(t, o, gpusOf(3))
	beside := besidePath(ownSocket(k), gpus)
	connect(beside)
	k.WaitListed(gpus, 3, 0)
	before := socketAt(beside)
	testenv.Must(t, old.stop())
	eventually(t, "a new socket", func() bool {
		id := socketAt(beside)
		return id != unixsocket.ID{} && id != before
	})
	connect(beside)
	k.WaitListed(gpus, 3, 0)
	eventually(t, "the plugin is ready", func() bool { return next.Ready() == nil })
}
