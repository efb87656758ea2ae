package dra

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	drahealthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/test/lib/testenv"
)

// healthText describes an answer in one line.
func healthText(r *drahealthv1.NodeWatchResourcesResponse) string {
	var list []string
	for _, d := range r.GetDevices() {
		text := d.GetDevice().GetPoolName() + "/" + d.GetDevice().GetDeviceName() + " " + d.GetHealth().String()
		if d.GetMessage() != "" {
			text += ": " + d.GetMessage()
		}
		list = append(list, text)
	}
	return strings.Join(list, ", ")
}

func TestTheHealthOfDevices(t *testing.T) {
	t.Parallel()
	for state, want := range map[health.State]string{
		health.Healthy:    "HEALTHY",
		health.Cordoned:   "HEALTHY",
		health.Suspect:    "UNKNOWN: XID 48",
		health.Recovering: "UNKNOWN: XID 48",
		health.Unhealthy:  "UNHEALTHY: XID 48",
		"":                "UNKNOWN",
	} {
		t.Run(fmt.Sprintf("%q", state), func(t *testing.T) {
			s := nodeOf(t, 1)
			reason := ""
			if strings.Contains(want, "XID") {
				reason = "XID 48"
			}
			s.Health = map[string]health.Status{"GPU-0": {UUID: "GPU-0", State: state, Reason: reason}}
			got := healthText(&drahealthv1.NodeWatchResourcesResponse{Devices: healthOf("n", s, time.Unix(1, 0))})
			if got != "n/gpu-0 "+want {
				t.Errorf("got %s, want %s", got, want)
			}
		})
	}
}

// The kubelet gets the health at once and at each change, and the stream does not delay the end of the driver.
func TestAKubeletWatchesTheHealth(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 2)
	stream, err := drahealthv1.NewDRAResourceHealthClient(n.conn).NodeWatchResources(
		t.Context(), &drahealthv1.NodeWatchResourcesRequest{}, grpc.WaitForReady(true))
	testenv.Must(t, err)
	const node = "gpu-node-1"
	next := func(want string) {
		t.Helper()
		answer, err := stream.Recv()
		testenv.Must(t, err)
		if got := healthText(answer); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	next(node + "/gpu-0 HEALTHY, " + node + "/gpu-1 HEALTHY")
	n.setHealth(1, health.Unhealthy, "XID 95")
	next(node + "/gpu-0 UNKNOWN, " + node + "/gpu-1 UNHEALTHY: XID 95")
	began := time.Now()
	n.stop()
	if _, err := stream.Recv(); err == nil {
		t.Error("the stream goes on after the end")
	}
	if took := time.Since(began); took >= drainTimeout {
		t.Errorf("the end took %v", took)
	}
}

// fakeStream is a stream of the health service.
type fakeStream struct {
	grpc.ServerStreamingServer[drahealthv1.NodeWatchResourcesResponse]

	t    *testing.T
	sent chan time.Time
}

func (s *fakeStream) Context() context.Context { return s.t.Context() }

func (s *fakeStream) Send(*drahealthv1.NodeWatchResourcesResponse) error {
	s.sent <- time.Now()
	return nil
}

// The kubelet takes what it has not heard of for a while for unknown.
func TestTheHealthIsSentAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, stopping := newPublished(), make(chan struct{})
		p.set(&node.State{Snapshot: nodeOf(t, 1).Snapshot})
		s := &server{claims: &claims{state: p}, stopping: stopping}
		stream := &fakeStream{t: t, sent: make(chan time.Time)}
		done := make(chan error)
		go func() { done <- s.NodeWatchResources(nil, stream) }()
		first := <-stream.sent
		if pause := (<-stream.sent).Sub(first); pause != healthInterval {
			t.Errorf("the health is sent again after %v", pause)
		}
		close(stopping)
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
