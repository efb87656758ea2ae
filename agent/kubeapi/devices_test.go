package kubeapi

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/health"
	"gpu-cdi-plugin/node"
)

func TestEventsAreThoseThatAPersonCaresAbout(t *testing.T) {
	t.Parallel()
	bad := at(0, health.Unhealthy, "XID 95 (uncontained ECC error)", health.Reset)
	worse := at(0, health.Unhealthy, "XID 79 (GPU has fallen off the bus)", health.Reboot)
	suspect := at(0, health.Suspect, "XID 74 (NVLink error)", health.Probe)
	recovering := at(0, health.Recovering, "XID 95 (uncontained ECC error)", health.Reset)
	cordoned := at(0, health.Cordoned, "cordoned: a fan is loud", health.None)
	lost := at(0, health.Unhealthy, "the driver has lost it", health.None)
	silent := at(0, health.Unhealthy, health.NotAnswering, health.None)
	unhealthy := event{warning, "GPUUnhealthy", "GPU 0 is unhealthy: XID 95 (uncontained ECC error); it needs a reset"}
	again := event{normal, "GPUHealthy", "GPU 0 is healthy again"}
	ofMIG := event{
		warning, "GPUUnhealthy", "MIG device 0:1 is unhealthy: XID 95 (uncontained ECC error); it needs a reset",
	}
	for name, c := range map[string]struct {
		states []node.State
		want   []event
	}{
		"a fault and its end": {
			[]node.State{stateOf(good), stateOf(bad), stateOf(recovering), stateOf(good)}, []event{unhealthy, again},
		},
		"a GPU that was unhealthy before the start": {
			[]node.State{stateOf(bad), stateOf(bad), stateOf(good)}, []event{again},
		},
		"a suspect GPU that is good": {[]node.State{stateOf(good), stateOf(suspect), stateOf(good)}, nil},
		"a suspect GPU that is not": {
			[]node.State{stateOf(good), stateOf(suspect), stateOf(bad)}, []event{unhealthy},
		},
		"a relapse is no news": {
			[]node.State{stateOf(good), stateOf(bad), stateOf(recovering), stateOf(bad)}, []event{unhealthy},
		},
		"a lost GPU does not answer for a moment while it comes back": {
			[]node.State{stateOf(good), stateOf(lost), stateOf(silent), stateOf(recovering), stateOf(good)},
			[]event{{warning, "GPUUnhealthy", "GPU 0 is unhealthy: the driver has lost it"}, again},
		},
		"a GPU that does not answer": {
			[]node.State{stateOf(good), stateOf(silent)},
			[]event{{warning, "GPUUnhealthy", "GPU 0 is unhealthy: it does not answer"}},
		},
		"another fault is": {[]node.State{stateOf(good), stateOf(bad), stateOf(worse)}, []event{unhealthy, {
			warning, "GPUUnhealthy", "GPU 0 is unhealthy: XID 79 (GPU has fallen off the bus); it needs a reboot of the node",
		}}},
		"a cordon": {[]node.State{stateOf(good), stateOf(cordoned), stateOf(good)}, []event{
			{normal, "GPUCordoned", "GPU 0 is cordoned: a fan is loud"},
			{normal, "GPUUncordoned", "GPU 0 is not cordoned any more: it is healthy"},
		}},
		"a cordon of an unhealthy GPU": {[]node.State{stateOf(bad), stateOf(cordoned), stateOf(bad)}, []event{
			{normal, "GPUCordoned", "GPU 0 is cordoned: a fan is loud"},
			{
				warning, "GPUUncordoned",
				"GPU 0 is not cordoned any more: it is unhealthy: XID 95 (uncontained ECC error); it needs a reset",
			},
		}},
		"MIG devices with their GPU": {
			[]node.State{
				withMIG(stateOf(good), good, good), withMIG(stateOf(bad), bad, bad), withMIG(stateOf(good), good, good),
			},
			[]event{unhealthy, again},
		},
		"a MIG device alone": {
			[]node.State{
				withMIG(stateOf(good), good, good), withMIG(stateOf(good), good, bad), withMIG(stateOf(good), good, good),
			},
			[]event{ofMIG, {normal, "GPUHealthy", "MIG device 0:1 is healthy again"}},
		},
		"a GPU that goes and comes back": {[]node.State{stateOf(good), stateOf(), stateOf(bad)}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reported := lastReported{}
			var got []event
			for _, s := range c.states {
				got = append(got, reported.events(devicesOf(&s))...)
			}
			if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(event{})); diff != "" {
				t.Error(diff)
			}
		})
	}
}
