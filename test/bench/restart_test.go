package bench

import (
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// BenchmarkRestart is P4 of the targets: from the kubelet's new socket until a plugin has asked to be registered again, and
// until the kubelet has its list. The floor is a connection to our plugin on which its list is read; a registration takes
// one of these and one to the kubelet. The worst floor shows what of a late registration may be the machine's.
// The peer takes as long as in BenchmarkServe: it begins anew, with the driver's library and the spec, whenever the kubelet
// does.
func BenchmarkRestart(b *testing.B) {
	const (
		rounds = 250
		each   = 4 // of ours to one of the peer's, which takes longer
	)
	our, their := plugins(b, "dgx-h100")
	our.start()
	their.start()
	var ours, theirs restarts
	var floor []time.Duration
	for b.Loop() {
		for range rounds {
			for range each {
				ours.add(restart(our))
				floor = append(floor, connect(b, our))
			}
			theirs.add(restart(their))
		}
	}
	b.ReportMetric(0, "ns/op")
	ours.report(b, "")
	theirs.report(b, "peer-")
	b.ReportMetric(ms(median(floor)), "connect-ms")
	b.ReportMetric(ms(percentile(floor, 100)), "worst-connect-ms")
	b.ReportMetric(float64(median(ours.registered))/float64(median(floor)), "x-connect")
	b.ReportMetric(float64(median(ours.registered))/float64(median(theirs.registered)), "x-peer")
}

// restarts are how long registrations took after restarts of the kubelet.
type restarts struct{ registered, listed []time.Duration }

func (r *restarts) add(registered, listed time.Duration) {
	r.registered, r.listed = append(r.registered, registered), append(r.listed, listed)
}

func (r *restarts) report(b *testing.B, prefix string) {
	b.ReportMetric(ms(median(r.registered)), prefix+"p50-ms")
	b.ReportMetric(ms(percentile(r.registered, 99)), prefix+"p99-ms")
	b.ReportMetric(ms(percentile(r.registered, 100)), prefix+"worst-ms")
	b.ReportMetric(ms(median(r.listed)), prefix+"list-p50-ms")
	b.ReportMetric(ms(percentile(r.listed, 100)), prefix+"list-worst-ms")
}

// restart restarts a plugin's kubelet. The time begins when it makes its socket.
func restart(s *serving) (registered, listed time.Duration) {
	const down = 10 * time.Millisecond // a plugin may notice that the kubelet is gone
	s.kubelet.Stop()
	time.Sleep(down)
	begin := time.Now()
	s.kubelet.Start()
	return s.registered(begin)
}

// connect is how long it takes to connect to a plugin and to read its list.
func connect(b *testing.B, s *serving) time.Duration {
	b.Helper()
	begin := time.Now()
	conn, err := grpc.NewClient("unix:"+filepath.Join(s.kubelet.Dir, s.endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	stream, err := v1beta1.NewDevicePluginClient(conn).ListAndWatch(b.Context(), &v1beta1.Empty{})
	if err != nil {
		b.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		b.Fatal(err)
	}
	return time.Since(begin)
}
