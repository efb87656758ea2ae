package sim

import (
	"regexp"
	"testing"
)

var sequence = regexp.MustCompile(`seq=\d+`)

func TestEventsInTheStateFile(t *testing.T) {
	n := makeNode(t, "mig-h100", Options{PlainNodes: true})
	instance := n.Machine().GPUs[0].MIG[0]
	own := &Instance{instance.GPUInstance, instance.ComputeInstance}
	for name, c := range map[string]struct {
		do   func() error
		want string
	}{
		"an XID": {func() error { return n.XID(3, 79, nil) }, "event N gpu=3 type=8 data=79\n"},
		"an XID of a MIG device": {
			func() error { return n.XID(0, 31, own) },
			"event N gpu=0 type=8 data=31 gi=2 ci=0\n",
		},
		"an XID of a GPU instance": {
			func() error { return n.XID(0, 31, &Instance{own.GPU, -1}) },
			"event N gpu=0 type=8 data=31 gi=2\n",
		},
		"a repeated XID": {
			func() error { return first(n.XID(3, 45, nil), n.XID(3, 45, nil)) },
			"event N gpu=3 type=8 data=45\nevent N gpu=3 type=8 data=45\n",
		},
		"a recovery action": {
			func() error { return n.Report(Event{GPU: 1, Type: EventRecoveryAction, Data: 1}) },
			"event N gpu=1 type=32768 data=1\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.do(); err != nil {
				t.Fatal(err)
			}
			if got := sequence.ReplaceAllString(state(t, n), "N"); got != c.want {
				t.Errorf("state is %q, want %q", got, c.want)
			}
			if err := n.Clear(); err != nil {
				t.Fatal(err)
			}
		})
	}
	for name, err := range map[string]error{
		"a GPU behind the last":         n.XID(8, 79, nil),
		"a MIG device that is not":      n.XID(0, 31, &Instance{9, 9}),
		"a MIG device without MIG mode": n.XID(7, 31, own),
		"two types":                     n.Report(Event{Type: EventXID | EventMIGChange}),
		"too many":                      n.Report(make([]Event, maxEvents+1)...),
	} {
		if !isInvalid(err) {
			t.Errorf("%s: the error is %v, want an InvalidError", name, err)
		}
	}
	if got := state(t, n); got != "" {
		t.Errorf("invalid events changed the state to %q", got)
	}
}
