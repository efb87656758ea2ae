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
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

func TestAPluginThatStopsBeforeItIsWatchedSaysThatItStopped(t *testing.T) {
	k := kubelettest.New(t)
	p := start(t, optionsFor(k), gpusOf(1))
	p.awaitProblem("is the kubelet running, ")
	testenv.Must(t, p.stop())
	p.awaitProblem("the plugin stopped")
}

func TestAnAcceptedRegistrationIsReported(t *testing.T) {
	k := kubelettest.New(t)
	k.Unwatch(true)
	log := &testenv.Log{}
	o := optionsFor(k)
	o.streamGrace, o.Log = time.Minute, slog.New(slog.NewTextHandler(log, nil))
	p := start(t, o, gpusOf(1))
	p.awaitProblem("is the kubelet running, ")
	k.Start()
	p.awaitProblem("registered, but the kubelet has not called ListAndWatch yet")
	if want := `level=INFO msg="` + gpus + ` is registered with the kubelet"`; !strings.Contains(log.String(), want) {
		t.Errorf("the log has no %s:\n%s", want, log)
	}
}

// lateKubelet watches the devices and then answers the Register call with an error.
type lateKubelet struct {
	v1beta1.UnimplementedRegistrationServer

	t      *testing.T
	plugin string // its socket
	calls  atomic.Int64
}

// Register returns an error.
func (k *lateKubelet) Register(context.Context, *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	if k.calls.Add(1) == 1 {
		watchDevices(k.t, k.plugin)
	}
	return nil, errors.New("device plugin already connected")
}

// Another registration would end the watch of this one.
func TestAKubeletThatWatchesAndRefusesIsNotCalledAgain(t *testing.T) {
	k := kubelettest.New(t)
	l, err := net.Listen("unix", filepath.Join(k.Dir, kubelettest.Socket))
	testenv.Must(t, err)
	late := &lateKubelet{t: t, plugin: ownSocket(k)}
	server := grpc.NewServer()
	v1beta1.RegisterRegistrationServer(server, late)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	p := start(t, optionsFor(k), gpusOf(1))
	eventually(t, "the kubelet watches", func() bool { return p.Ready() == nil })
	time.Sleep(100 * firstPause)
	if n := late.calls.Load(); n != 1 {
		t.Errorf("%d Register calls, want 1", n)
	}
}

// A kubelet before 1.37 closes the connection of a plugin that has just registered when another plugin ends.
func TestAPluginThatIsLostBeforeItIsWatchedRegistersAtOnce(t *testing.T) {
	k := kubelettest.New(t)
	k.Unwatch(true)
	k.Start()
	o := optionsFor(k)
	o.streamGrace = time.Hour
	p := start(t, o, gpusOf(1))
	p.awaitProblem("the kubelet has not called ListAndWatch yet")
	k.Unwatch(false)
	k.Drop(gpus)
	k.WaitRegistered(gpus)
}

func TestAResourceIsRegisteredAgainOnDemand(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := start(t, optionsFor(k), gpusOf(1))
	k.WaitRegistered(gpus)
	eventually(t, "the plugin is ready", func() bool { return p.Ready() == nil })
	p.Reconnect(gpus)
	k.WaitRegistrations(2)
	k.WaitListed(gpus, 1, 0)
	eventually(t, "the plugin is ready again", func() bool { return p.Ready() == nil })
}

func TestAKubeletWithoutItsSocketStillWatches(t *testing.T) {
	k := kubelettest.New(t)
	k.Start()
	p := start(t, optionsFor(k), gpusOf(1))
	k.WaitRegistered(gpus)
	eventually(t, "the plugin is ready", func() bool { return p.Ready() == nil })
	testenv.Must(t, os.Remove(filepath.Join(k.Dir, kubelettest.Socket)))
	time.Sleep(100 * firstPause)
	testenv.Must(t, p.Ready())
}

func TestANewKubeletIsCalledAtOnceHoweverOftenTheLastRefused(t *testing.T) {
	k := kubelettest.New(t)
	k.Refuse(errors.New("no"))
	k.Start()
	start(t, optionsFor(k), gpusOf(1))
	const refusals = 10
	k.WaitRegistrations(refusals)
	pause := firstPause << (refusals - 1) // until the next call, at least
	k.Refuse(nil)
	begin := time.Now()
	k.Restart()
	k.WaitRegistered(gpus)
	if took := time.Since(begin); took > pause*3/4 {
		t.Errorf("it is registered after %s", took)
	}
}

func TestASocketWhoseServerEndedIsRestored(t *testing.T) {
	k := kubelettest.New(t)
	o := optionsFor(k)
	o.newWatcher = silentWatcher
	k.Start()
	p := start(t, o, gpusOf(1))
	k.WaitRegistered(gpus)
	testenv.Must(t, os.Remove(ownSocket(k)))
	begin := time.Now()
	p.endpoints[gpus].socket.Ended.Wake()
	eventually(t, "the socket is back", func() bool { return socketAt(ownSocket(k)) != unixsocket.ID{} })
	if took := time.Since(begin); took > pollWatched/2 {
		t.Errorf("it is back after %s", took)
	}
}

// As after a lack of space or of file descriptors, nothing reports that the socket can be made again.
func TestASocketThatCannotBeMadeIsSoonTriedAgain(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	o := optionsFor(k)
	o.newWatcher = silentWatcher
	k.Start()
	p := start(t, o, gpusOf(1))
	k.WaitRegistered(gpus)
	file := filepath.Join(t.TempDir(), "file")
	testenv.Must(t, os.WriteFile(file, nil, 0o600))
	testenv.Must(t, os.Rename(file, ownSocket(k))) // at once, or else the plugin could make its socket before
	p.wakeAll()
	p.awaitProblem("is not a socket")
	testenv.Must(t, os.Remove(ownSocket(k)))
	begin := time.Now()
	eventually(t, "the socket is back", func() bool { return socketAt(ownSocket(k)) != unixsocket.ID{} })
	if took := time.Since(begin); took > pollWatched/2 {
		t.Errorf("it is back after %s", took)
	}
}

// silentWatcher returns a watcher that reports nothing.
func silentWatcher() (*fsnotify.Watcher, error) {
	w, err := fsnotify.NewWatcher()
	if err == nil {
		w.Events, w.Errors = make(chan fsnotify.Event), make(chan error)
	}
	return w, err
}
