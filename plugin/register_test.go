package plugin

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/test/lib/kubelettest"
)

// bind makes a socket that refuses connections until it is listened on.
func bind(t *testing.T) (path string, fd int) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "kubelet.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	must(t, unix.Bind(fd, &unix.SockaddrUnix{Name: path}))
	return path, fd
}

// dialer returns a function that dials a socket and calls refused after each refusal.
func dialer(path string, refused func()) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
		if errors.Is(err, syscall.ECONNREFUSED) {
			refused()
		}
		return conn, err
	}
}

func TestRegisterWaitsForAKubeletThatIsAboutToListen(t *testing.T) {
	path, fd := bind(t)
	tries := 0
	conn, err := dialKubelet(t.Context(), dialer(path, func() {
		if tries++; tries == dialTries-1 {
			must(t, unix.Listen(fd, 1))
		}
	}))
	must(t, err)
	must(t, conn.Close())
}

func TestRegisterGivesUpOnAKubeletThatDoesNotListen(t *testing.T) {
	path, _ := bind(t)
	tries := 0
	if conn, err := dialKubelet(t.Context(), dialer(path, func() { tries++ })); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v, %v", conn, err)
	}
	if tries != dialTries {
		t.Errorf("%d tries, want %d", tries, dialTries)
	}
	if _, err := dialKubelet(t.Context(), dialer(path+"x", nil)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a socket: %v", err)
	}
}

func TestAPluginThatEndsDoesNotWaitForTheKubelet(t *testing.T) {
	path, _ := bind(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("the plugin ends")
	tries := 0
	_, err := dialKubelet(ctx, dialer(path, func() { tries++; cancel(why) }))
	if !errors.Is(err, why) || tries != 1 {
		t.Errorf("%v after %d tries", err, tries)
	}
}

// discover calls GetInfo, as a kubelet does with a socket that it discovers in plugins_registry.
func discover(t *testing.T, socket string) pluginregistration.RegistrationClient {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	client := pluginregistration.NewRegistrationClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	info, err := client.GetInfo(ctx, &pluginregistration.InfoRequest{}, grpc.WaitForReady(true))
	must(t, err)
	want := &pluginregistration.PluginInfo{Type: "DevicePlugin", Name: gpus, SupportedVersions: []string{"v1beta1"}}
	if diff := cmp.Diff(want, info, protocmp.Transform()); diff != "" {
		t.Errorf("the plugin's info (-want +got):\n%s", diff)
	}
	return client
}

func notify(t *testing.T, c pluginregistration.RegistrationClient, s *pluginregistration.RegistrationStatus) {
	t.Helper()
	_, err := c.NotifyRegistrationStatus(t.Context(), s)
	must(t, err)
}

func TestAKubeletDiscoversTheSocket(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	o := optionsFor(k)
	o.Dir, o.RegistryDir, o.StreamGrace = "", k.Dir, 100*time.Millisecond
	p := start(t, o, gpusOf(2))
	another := func(before socketID) func() bool {
		return func() bool { id, err := identify(ownSocket(k)); return err == nil && id != before }
	}
	eventually(t, "the socket is there", another(socketID{}))
	first, err := identify(ownSocket(k))
	must(t, err)
	k.Start() // it removes the socket, as a kubelet does in its own directory
	eventually(t, "the socket is back", another(first))

	c := discover(t, ownSocket(k))
	eventually(t, "the refusal is reported", func() bool {
		notify(t, c, &pluginregistration.RegistrationStatus{Error: "no room"})
		s := p.Status()[0]
		return strings.Contains(s.Problem, "no room") && !s.Watched
	})
	// A kubelet that does not connect is shown new sockets.
	for range 3 {
		before, err := identify(ownSocket(k))
		must(t, err)
		eventually(t, "a new socket", another(before))
	}

	eventually(t, "the kubelet connects", func() bool { return k.Connect(gpus, ownSocket(k)) == nil })
	notify(t, c, &pluginregistration.RegistrationStatus{PluginRegistered: true})
	k.WaitFor(gpus, func(d []*v1beta1.Device) bool { return len(d) == 2 })
	eventually(t, "the plugin is ready", func() bool { return p.Ready() == nil && p.Status()[0].Registrations == 1 })

	must(t, p.stop())
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
