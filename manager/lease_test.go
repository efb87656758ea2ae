package manager_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"gpu-cdi-plugin/manager"
	"gpu-cdi-plugin/manager/model"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// Leases are no pods of a node: neither limits the number of the other.
func TestLeasesDoNotCountAsPods(t *testing.T) {
	n := newNode(t, func(o *manager.Options) { o.MaxPods = 2 })
	plugin := n.plugin(gpu, plugintest.Devices(8)...)
	lease := func(uid string) error {
		_, err := n.m.Lease(t.Context(), pod(uid, wants("main", gpu, 1)), model.Caller{}, model.Lease{Command: "x"})
		return err
	}
	for _, uid := range []string{"l1", "l2", "l3"} {
		testenv.Must(t, lease(uid))
	}
	n.admit(pod("a"))
	n.restart()
	n.back(plugin, 8)
	n.admit(pod("b"))
	testenv.Must(t, lease("l4"))
	_, err := n.m.Admit(t.Context(), pod("c"), model.Caller{})
	if rejection, ok := errors.AsType[*manager.RejectedError](err); !ok || rejection.Reason != manager.ReasonOutOfPods {
		t.Errorf("a pod too many: %v", err)
	}
}

// A lease gets some of the devices that may be chosen, and is what it was last set to after a restart.
func TestALeaseIsAPodWithAProcess(t *testing.T) {
	n := newNode(t)
	devices := plugintest.Devices(4)
	n.plugin(gpu, devices...)
	n.admit(pod("p", wants("main", gpu, 1)))
	p := pod("l", wants("main", gpu, 1))
	p.Among = []string{devices[3].GetID()}
	lease := model.Lease{Process: model.Process{PID: 7, Start: 1, Boot: "b"}, Command: "x"}
	placed, err := n.m.Lease(t.Context(), p, model.Caller{UID: 1}, lease)
	testenv.Must(t, err)
	if got := placed.Allocations[0].IDs; !slices.Equal(got, p.Among) {
		t.Errorf("it has %v, want %v", got, p.Among)
	}
	lease.Ends = time.Hour
	set := func(l *model.Lease) error {
		l.Ends = time.Hour
		return nil
	}
	refuses := func(l *model.Lease) error {
		l.Ends = 0
		return errors.ErrUnsupported
	}
	testenv.Must(t, n.m.ChangeLease(t.Context(), "l", set))
	if err := n.m.ChangeLease(t.Context(), "l", refuses); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a change that is refused: %v", err)
	}
	if err := n.m.ChangeLease(t.Context(), "p", set); !errors.Is(err, manager.ErrConflict) {
		t.Errorf("a pod of a manifest becomes a lease: %v", err)
	}
	for range 2 {
		if got, _ := n.m.Pod("l"); got.Lease == nil || *got.Lease != lease {
			t.Errorf("the lease is %+v, want %+v", got.Lease, lease)
		}
		if got, _ := n.m.Pod("p"); got.Lease != nil {
			t.Error("the other pod is a lease")
		}
		n.restart()
	}
}
