package dra

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// successor returns another instance on the same node, which serves beside this one.
func (n *claimNode) successor() *claimNode {
	n.t.Helper()
	next := &claimNode{
		t: n.t, server: n.server, root: n.root, state: n.state, ledger: newFakeLedger(),
		preStart: n.preStart, patience: n.patience, beside: true,
	}
	next.start()
	next.publish()
	return next
}

// retire ends the driver as after a hand-over. The channel is closed when it has ended.
func (n *claimNode) retire() (ended <-chan struct{}) {
	done := make(chan struct{})
	n.driver.Retire()
	go func() {
		defer close(done)
		n.stop()
	}()
	return done
}

// call has a claim prepared, without waiting for a connection, and cancels the call after a time.
func (n *claimNode) call(i int, limit time.Duration) error {
	ctx, cancel := context.WithCancel(n.t.Context())
	defer cancel()
	defer time.AfterFunc(limit, cancel).Stop()
	answer, err := drav1.NewDRAPluginClient(n.conn).NodePrepareResources(ctx,
		&drav1.NodePrepareResourcesRequest{Claims: []*drav1.Claim{named(i)}})
	if text := answer.GetClaims()[uid(i)].GetError(); text != "" {
		n.t.Errorf("claim %d: %s", i, text)
	}
	return err
}

func (n *claimNode) hasSocket() bool {
	_, err := os.Lstat(n.socket())
	return err == nil
}

// A call may come after the socket is gone. With GOAWAY on its connection the kubelet would dial that socket.
func TestAnInstanceThatIsReplacedAnswersUntilTheKubeletHasLeft(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 1)
	n.allocate(1, device("gpu-0"))
	n.mustPrepare(1)
	n.driver.socket.limit = time.Hour
	ended := n.retire()
	testenv.Eventually(t, "the socket is gone", func() bool { return !n.hasSocket() })
	for range 100 {
		if err := n.call(1, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-ended:
		t.Error("it has ended while the kubelet is connected")
	default:
	}
	testenv.Must(t, n.conn.Close())
	<-ended
	held, err := fileio.IsHeld(filepath.Join(filepath.Dir(n.socket()), "."+filepath.Base(n.socket())+".lock"))
	if held || err != nil {
		t.Errorf("its lock is held: %t, %v", held, err)
	}
}

func TestAnInstanceThatIsReplacedEndsWhenTheKubeletDoesNotLeave(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 1)
	n.allocate(1, device("gpu-0"))
	n.mustPrepare(1)
	n.driver.socket.limit = time.Millisecond
	<-n.retire()
	if err := n.call(1, time.Minute); status.Code(err) != codes.Unavailable {
		t.Errorf("a call after the end: %v", err)
	}
}

// The kubelet closes its connection when the socket is gone, and a call that runs then would fail.
func TestCallsEndBeforeTheSocketIsRemoved(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 1)
	n.allocate(1, device("gpu-0"))
	working, asked, proceed := n.driver.socket.busy, 0, make(chan struct{})
	n.driver.socket.busy = func() bool {
		switch asked++; {
		case !n.hasSocket():
			t.Error("the socket is removed while a call runs")
		case asked == 2:
			close(proceed)
		}
		return working()
	}
	began := make(chan struct{})
	n.preStart = func(string, []*resource.Device, PreStart) error {
		close(began)
		select {
		case <-proceed:
			return nil
		case <-time.After(time.Minute):
			return errors.New("the end does not wait for this call")
		}
	}
	n.unprepare(1) // which waits for the connection
	called := make(chan error)
	go func() { called <- n.call(1, time.Minute) }()
	<-began
	ended := n.retire()
	if err := <-called; err != nil {
		t.Error(err)
	}
	testenv.Must(t, n.conn.Close())
	<-ended
}

// Two instances serve claims for a moment when one takes the place of the other. Each has its own ledger, so the new
// one answers when the old one has ended, and then knows what that has prepared and unprepared.
func TestAnInstanceTakesTheClaimsOfAnother(t *testing.T) {
	t.Parallel()
	n := newClaimNode(t, 3)
	for i := range 2 {
		n.allocate(i, device(fmt.Sprint("gpu-", i)))
		n.mustPrepare(i)
	}
	next := n.successor()
	testenv.Eventually(t, "the socket beside", next.hasSocket)
	restored := make(chan error, 1)
	go func() { restored <- next.driver.RestoreAfter(t.Context()) }()
	n.allocate(2, device("gpu-2"))
	n.mustPrepare(2)
	if text := n.unprepare(0); text != "" {
		t.Error(text)
	}
	n.allocate(3, device("gpu-2"))
	n.allocate(4, device("gpu-0"))
	for _, i := range []int{3, 4} {
		if err := next.call(i, 50*time.Millisecond); status.Code(err) != codes.Canceled {
			t.Errorf("claim %d is answered while the old instance serves: %v", i, err)
		}
	}
	ended := n.retire()
	testenv.Must(t, n.conn.Close(), <-restored)
	<-ended
	next.wantHeld("GPU-1", "GPU-2")
	text, want := next.prepare(named(3))[uid(3)].GetError(), "the claim "+uid(2)+" holds it"
	if !strings.Contains(text, want) {
		t.Errorf("a claim on the device of another: %q, want %q", text, want)
	}
	next.mustPrepare(4)
}
