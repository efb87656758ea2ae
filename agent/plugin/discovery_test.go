package plugin

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/internal/unixsocket"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// discover calls GetInfo, as a kubelet does with a socket that it discovers in plugins_registry.
func discover(t *testing.T, socket string) pluginregistration.RegistrationClient {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	testenv.Must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	client := pluginregistration.NewRegistrationClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	info, err := client.GetInfo(ctx, &pluginregistration.InfoRequest{}, grpc.WaitForReady(true))
	testenv.Must(t, err)
	want := &pluginregistration.PluginInfo{Type: "DevicePlugin", Name: gpus, SupportedVersions: []string{"v1beta1"}}
	if diff := cmp.Diff(want, info, protocmp.Transform()); diff != "" {
		t.Errorf("the plugin's info (-want +got):\n%s", diff)
	}
	return client
}

func notify(t *testing.T, c pluginregistration.RegistrationClient, s *pluginregistration.RegistrationStatus) {
	t.Helper()
	_, err := c.NotifyRegistrationStatus(t.Context(), s)
	testenv.Must(t, err)
}

// acceptedObserver counts the registrations that were accepted.
type acceptedObserver struct {
	noObserver
	atomic.Int64
}

// Registered counts.
func (o *acceptedObserver) Registered(_ string, err error) {
	if err == nil {
		o.Add(1)
	}
}

func TestAKubeletDiscoversTheSocket(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	o := optionsFor(k)
	o.Dir, o.RegistryDir, o.streamGrace = "", k.Dir, 100*time.Millisecond
	var accepted acceptedObserver
	o.Observer = &accepted
	p := start(t, o, gpusOf(2))
	another := func(before unixsocket.ID) func() bool {
		return func() bool { id := socketAt(ownSocket(k)); return id != unixsocket.ID{} && id != before }
	}
	eventually(t, "the socket is there", another(unixsocket.ID{}))
	first := socketAt(ownSocket(k))
	k.Start() // it removes the socket, as a kubelet does in its own directory
	eventually(t, "the socket is back", another(first))

	c := discover(t, ownSocket(k))
	eventually(t, "the refusal is reported", func() bool {
		notify(t, c, &pluginregistration.RegistrationStatus{Error: "no room"})
		s := p.Status()[0]
		return strings.Contains(s.Reason, "no room") && !s.Watched
	})
	// A kubelet that does not connect is shown new sockets.
	for range 3 {
		eventually(t, "a new socket", another(socketAt(ownSocket(k))))
	}

	eventually(t, "the kubelet connects", func() bool { return k.Connect(gpus, ownSocket(k)) == nil })
	notify(t, c, &pluginregistration.RegistrationStatus{PluginRegistered: true})
	k.WaitFor(gpus, func(d []*v1beta1.Device) bool { return len(d) == 2 })
	eventually(t, "the plugin is ready", func() bool { return p.Ready() == nil })
	if n := accepted.Load(); n != 1 {
		t.Errorf("%d registrations are accepted, want 1", n)
	}

	testenv.Must(t, p.stop())
	if _, err := os.Lstat(ownSocket(k)); err == nil {
		t.Error("the socket is left")
	}
	if _, err := os.Lstat(filepath.Join(k.Dir, kubelettest.Socket)); err != nil {
		t.Error("the kubelet's socket is gone")
	}
	if k.Registrations() != 0 {
		t.Error("it registered with the kubelet's socket too")
	}
}

// gate is the output of a log. It blocks the program that writes a text.
type gate struct {
	text          string
	reached, pass chan struct{}
}

// Write blocks at the text.
func (g gate) Write(p []byte) (int, error) {
	if strings.Contains(string(p), g.text) {
		close(g.reached)
		<-g.pass
	}
	return len(p), nil
}

// A kubelet before 1.37 can end a watch before the plugin has seen that it began.
func TestAWatchThatEndsAtOnceIsFollowedByANewSocket(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	g := gate{"is restored", make(chan struct{}), make(chan struct{})}
	o := optionsFor(k)
	o.Dir, o.RegistryDir, o.streamGrace = "", k.Dir, time.Hour
	o.Log = slog.New(slog.NewTextHandler(g, nil))
	p := start(t, o, gpusOf(2))
	passed := sync.OnceFunc(func() { close(g.pass) })
	t.Cleanup(passed)
	eventually(t, "the socket is there", func() bool { return socketAt(ownSocket(k)) != unixsocket.ID{} })
	testenv.Must(t, os.Remove(ownSocket(k)))
	<-g.reached

	t.Run("watch", func(t *testing.T) { watchDevices(t, ownSocket(k)) })
	server := p.endpoints[gpus].server
	eventually(t, "the watch ended", func() bool { return !server.watched() })
	before := socketAt(ownSocket(k))
	passed()
	eventually(t, "a new socket", func() bool {
		id := socketAt(ownSocket(k))
		return id != unixsocket.ID{} && id != before
	})
}
