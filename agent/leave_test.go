package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/agent/podresources"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// fakeHolders is a ledger and a DRA driver.
type fakeHolders struct {
	mu       sync.Mutex
	err      error
	listed   []podresources.Holder
	holdings []ledger.Holding
	prepared []string
	left     bool
}

func (f *fakeHolders) Read(context.Context) ([]podresources.Holder, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.listed, f.err
}

func (f *fakeHolders) Holdings() []ledger.Holding {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.holdings
}

func (f *fakeHolders) Claims() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.prepared
}

func (f *fakeHolders) Left() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.left
}

func (f *fakeHolders) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

var (
	heldByPod = ledger.Holding{
		UUID: "GPU-1", Namespace: "ml", Containers: []ledger.Container{{Pod: "train", Container: "main"}},
	}
	heldByClaim = ledger.Holding{
		UUID: "GPU-2", Namespace: "ml", Claim: "c", Containers: []ledger.Container{{Pod: "infer", Container: "main"}},
	}
	listedPod = podresources.Holder{Namespace: "ml", Pod: "train", Container: "main", Devices: []string{"MIG-1", "MIG-1"}}
	otherPod  = podresources.Holder{Namespace: "ml", Pod: "nic", Container: "main", Devices: []string{"nic-1"}}
)

func TestLeaveWaitsForTheHolders(t *testing.T) {
	t.Parallel()
	const unused, unprepared = config.LeaveUnused, config.LeaveUnprepared
	for name, c := range map[string]struct {
		leave config.Leave
		held  *fakeHolders
		want  string // in the text; empty if the service ends
	}{
		"nobody has a device": {unused, &fakeHolders{left: true}, ""},
		"only devices of other plugins are held": {
			unused, &fakeHolders{left: true, listed: []podresources.Holder{otherPod}}, "",
		},
		"a container has one": {
			unused, &fakeHolders{left: true, holdings: []ledger.Holding{heldByPod}},
			"these have devices, so end their pods: container main of pod ml/train (GPU-1)",
		},
		"a container has one that the node does not have any more": {
			unused, &fakeHolders{left: true, listed: []podresources.Holder{listedPod}},
			"end their pods: container main of pod ml/train (MIG-1)",
		},
		"a claim has one": {
			unused, &fakeHolders{holdings: []ledger.Holding{heldByClaim}, prepared: []string{"ResourceClaim ml/c"}},
			"end their pods: ResourceClaim ml/c of pod ml/infer (GPU-2)",
		},
		"a claim has only admin access": {
			unused, &fakeHolders{prepared: []string{"ResourceClaim ml/admin"}}, "end their pods: ResourceClaim ml/admin",
		},
		"a claim can still be prepared": {unused, &fakeHolders{}, "can still be prepared, for a minute"},
		"the kubelet does not answer": {
			unused, &fakeHolders{left: true, err: errors.New("away")}, "it is unknown which containers have devices: away",
		},
		"containers and an unknown kubelet do not count": {
			unprepared, &fakeHolders{left: true, holdings: []ledger.Holding{heldByPod}, err: errors.New("away")}, "",
		},
		"claims always count": {
			unprepared,
			&fakeHolders{holdings: []ledger.Holding{heldByPod, heldByClaim}, prepared: []string{"ResourceClaim ml/c"}},
			"so end their pods: ResourceClaim ml/c of pod ml/infer (GPU-2)",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				l, done := leaving(t, c.leave, c.held, &testenv.Log{})
				time.Sleep(time.Hour)
				select {
				case <-done:
					if c.want != "" {
						t.Errorf("it ended, although %s", c.want)
					}
				default:
					if text := fmt.Sprint(l.ready()); c.want == "" || !strings.HasSuffix(text, c.want) {
						t.Errorf("it waits: %s, want %q", text, c.want)
					}
				}
			})
		})
	}
}

// leaving runs a leaver. The channel is closed when it ends the service.
func leaving(t *testing.T, leave config.Leave, held *fakeHolders, log *testenv.Log) (*leaver, <-chan struct{}) {
	done := make(chan struct{})
	l := &leaver{
		leave: leave, ledger: held, claims: held, end: func() { close(done) },
		log: slog.New(slog.NewTextHandler(log, nil)),
	}
	ended := make(chan error, 1)
	go func() { ended <- l.run(t.Context()) }()
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return l, done
}

func TestLeaveLogsTheHolders(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		held, log := &fakeHolders{left: true, holdings: []ledger.Holding{heldByPod}}, &testenv.Log{}
		_, done := leaving(t, config.LeaveUnused, held, log)
		logged := func(want int, text string) {
			t.Helper()
			if got := strings.Count(log.String(), text); got != want {
				t.Errorf("%q is logged %d times, want %d:\n%s", text, got, want, log)
			}
		}
		time.Sleep(51 * time.Second) // between two checks, as below
		logged(1, "train (GPU-1)")
		time.Sleep(time.Minute)
		logged(2, "train (GPU-1)")
		held.set(func() { held.holdings = append(held.holdings, heldByClaim) })
		time.Sleep(leaveInterval)
		logged(1, "infer (GPU-2), container main of pod ml/train (GPU-1)")

		// One answer without containers, as of a kubelet that has just started, does not count.
		held.set(func() { held.holdings = nil })
		time.Sleep(leaveInterval)
		held.set(func() { held.err = errors.New("away") })
		time.Sleep(leaveInterval)
		held.set(func() { held.err = nil })
		time.Sleep((leaveChecks-1)*leaveInterval - time.Second)
		select {
		case <-done:
			t.Error("it ended early")
		default:
		}
		<-done
		logged(1, "this program ends")
	})
}

func TestLeaveNamesWhomItDoesNotWaitFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		held, log := &fakeHolders{left: true, holdings: []ledger.Holding{heldByPod}}, &testenv.Log{}
		l, done := leaving(t, config.LeaveUnprepared, held, log)
		<-done
		if !strings.Contains(log.String(), "although containers have devices: container main of pod ml/train (GPU-1)") {
			t.Errorf("the log is\n%s", log)
		}
		testenv.Must(t, l.result())
		held.set(func() { held.prepared = []string{"ResourceClaim ml/late"} })
		wantError(t, l.result(), "claims were prepared when it was about to end: ResourceClaim ml/late")
	})
}

// The service offers nothing, and containers that have devices can restart.
func TestServeLeaves(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", func(c *config.Config) { c.Leave = config.LeaveUnused })
	f.kubelet.Pods.Set(kubelettest.Pod("ml", "train", "main", gpuResource, f.uuid(1)))
	f.start(Serve)
	e := f.kubelet.WaitListed(gpuResource, 0, 0)
	f.logs("container main of pod ml/train ("+f.uuid(1)+")", 1)
	testenv.Must(t, f.preStart(e, f.uuid(1)))
	if _, err := f.allocate(e, f.uuid(0)); err == nil {
		t.Error("a container gets a device")
	}
	f.runs()
}

// What claims have is in their records, also where the service has no credentials to offer devices for claims.
func TestServeLeavesAfterClaims(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", withRegistry(t), func(c *config.Config) {
		c.Door, c.Leave = config.DRADoor, config.LeaveUnprepared
	})
	f.claim(f.uuid(0))
	f.start(Serve)
	f.kubelet.WaitListed(gpuResource, 0, 0)
	f.logs("these have devices, so end their pods: ResourceClaim team/train ("+f.uuid(0)+")", 1)
	f.runs()
}
