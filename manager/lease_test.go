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
	testenv.Must(t, n.m.SetLease(t.Context(), "l", lease))
	if err := n.m.SetLease(t.Context(), "p", lease); !errors.Is(err, manager.ErrConflict) {
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
