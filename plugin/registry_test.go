package plugin

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/testing/protocmp"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"gpu-cdi-plugin/test/lib/kubelettest"
)

// found is what a kubelet does with a socket in plugins_registry, up to its word about it.
func found(t *testing.T, socket string) registration.RegistrationClient {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	client := registration.NewRegistrationClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	info, err := client.GetInfo(ctx, &registration.InfoRequest{}, grpc.WaitForReady(true))
	must(t, err)
	want := &registration.PluginInfo{Type: "DevicePlugin", Name: gpus, SupportedVersions: []string{"v1beta1"}}
	if diff := cmp.Diff(want, info, protocmp.Transform()); diff != "" {
		t.Errorf("the plugin's info (-want +got):\n%s", diff)
	}
	return client
}

func notify(t *testing.T, c registration.RegistrationClient, s *registration.RegistrationStatus) {
	t.Helper()
	_, err := c.NotifyRegistrationStatus(t.Context(), s)
	must(t, err)
}

// changed reports whether a socket is another: a new one may have the number of one that is gone, but not its time.
func changed(now, before os.FileInfo) bool {
	return !os.SameFile(now, before) || !now.ModTime().Equal(before.ModTime())
}

func TestAKubeletThatFindsTheSocket(t *testing.T) {
	leaves(t)
	k := kubelettest.New(t)
	o := optionsFor(k)
	o.Dir, o.RegistryDir, o.StreamGrace = "", k.Dir, 100*time.Millisecond
	p := start(t, o, gpusOf(2))
	eventually(t, "there", func() bool { _, err := os.Lstat(ownSocket(k)); return err == nil })
	first, err := os.Lstat(ownSocket(k))
	must(t, err)
	k.Start() // it makes room, as it does in its own directory; the socket comes back
	eventually(t, "back", func() bool { i, err := os.Lstat(ownSocket(k)); return err == nil && !os.SameFile(i, first) })

	c := found(t, ownSocket(k))
	notify(t, c, &registration.RegistrationStatus{Error: "no room"})
	eventually(t, "said", func() bool { s := p.Status()[0]; return strings.Contains(s.Problem, "no room") && !s.Connected })
	// A kubelet that does not connect sees another socket, and looks again, as often as it takes.
	for range 3 {
		before, err := os.Stat(ownSocket(k))
		must(t, err)
		eventually(t, "another socket", func() bool { i, err := os.Lstat(ownSocket(k)); return err == nil && changed(i, before) })
	}

	eventually(t, "connected", func() bool { return k.Connect(gpus, ownSocket(k)) == nil })
	notify(t, c, &registration.RegistrationStatus{PluginRegistered: true})
	k.WaitFor(gpus, func(d []*v1beta1.Device) bool { return len(d) == 2 })
	eventually(t, "ready", func() bool { return p.Ready() == nil && p.Status()[0].Registrations == 1 })

	must(t, p.stop())
	if _, err := os.Lstat(ownSocket(k)); err == nil {
		t.Error("the socket is left")
	}
	if _, err := os.Lstat(filepath.Join(k.Dir, kubelettest.Socket)); err != nil {
		t.Error("the kubelet's socket is gone")
	}
	if k.Total() != 0 {
		t.Error("it registered with the kubelet's socket too")
	}
}
