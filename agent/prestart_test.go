package agent

import (
	"context"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/control"
	"gpu-cdi-plugin/agent/plugin"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/test/lib/kubelettest"
	"gpu-cdi-plugin/test/lib/testenv"
)

func policy(p prepare.Policy) func(*config.Config) {
	return func(c *config.Config) { c.PreStart.Policy = p }
}

func TestPreStartRefusesDevices(t *testing.T) {
	t.Parallel()
	healthy := func(*fixture) {}
	cordoned := func(f *fixture) {
		f.does("is cordoned", control.Request{Act: control.Cordon, Device: "1", Reason: "a fan is loud"})
		f.kubelet.WaitListed(gpuResource, 3, 1)
	}
	faulty := func(f *fixture) {
		f.driver.set(func() { f.driver.faults[1] = gpu.Probe{RemapPending: true} })
		f.kubelet.WaitListed(gpuResource, 3, 1)
	}
	unknown := func(f *fixture) { f.kubelet.StopPods() }
	released := func(f *fixture) { f.does("is released", toRelease) }
	const (
		notKnown = "it is unknown which containers hold the devices: "
		remapped = "a row of its memory is remapped at the next reset"
		noisy    = "UUID is not ready for a container: cordoned: a fan is loud"
	)
	for name, c := range map[string]struct {
		policy prepare.Policy
		given  func(*fixture)
		want   string // for GPU 1, where UUID is its UUID; empty if the container gets it
	}{
		"a healthy device": {prepare.Check, healthy, ""},
		"a fault that was not noticed": {
			prepare.Check,
			func(f *fixture) { f.driver.set(func() { f.driver.faults[1] = gpu.Probe{RemapPending: true} }) },
			remapped,
		},
		"a spec file of another program that has its name, without a policy": {
			prepare.None,
			func(f *fixture) {
				f.writeForeign(1)
				f.kubelet.WaitListed(gpuResource, 3, 1)
			},
			"UUID is not ready for a container: ",
		},
		"a fault":                                  {prepare.Check, faulty, remapped},
		"a fault, without a policy":                {prepare.None, faulty, ""},
		"a cordon":                                 {prepare.Check, cordoned, noisy},
		"a cordon, without a policy":               {prepare.None, cordoned, noisy},
		"unknown holders, only a check":            {prepare.Check, unknown, ""},
		"unknown holders, to be cleaned":           {prepare.Clean, unknown, notKnown},
		"unknown holders, to be reset":             {prepare.Reset, unknown, notKnown},
		"the driver is released":                   {prepare.Check, released, errReleased.Error()},
		"the driver is released, without a policy": {prepare.None, released, errReleased.Error()},
		"a container that got the GPU under another name since it was allocated": {
			prepare.Clean,
			func(f *fixture) { f.kubelet.Pods.Set(kubelettest.Pod("ns", "job", "main", "acme.com/gpu", f.uuid(1))) },
			"UUID is not ready for a container: container main of pod ns/job holds it as UUID of acme.com/gpu",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad", policy(c.policy))
			f.start(Serve)
			e := f.kubelet.WaitListed(gpuResource, 4, 0)
			c.given(f)
			wantError(t, f.preStart(e, f.uuid(1)), strings.ReplaceAll(c.want, "UUID", f.uuid(1)))
			if strings.Contains(c.want, "is not ready") {
				f.logs(strings.ReplaceAll(c.want, "UUID", f.uuid(1)), 1)
			}
			if strings.Contains(name, "not noticed") {
				f.kubelet.WaitListed(gpuResource, 3, 1) // now it is known
			}
		})
	}
}

// A pod keeps its GPU when a reload renames it, and its containers can restart.
func TestAContainerRestartsAfterAReload(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", policy(prepare.Check))
	f.start(Serve)
	e := f.kubelet.WaitListed(gpuResource, 4, 0)
	_, err := f.allocate(e, f.uuid(1))
	testenv.Must(t, err)
	f.reconfigure(func(c *config.Config) {
		policy(prepare.Check)(c)
		inReplicas(2, "1")(c)
	})
	f.kubelet.WaitListed(gpuResource, 3, 2)
	testenv.Must(t, f.preStart(e, f.uuid(1))) // which the kubelet need not list yet
	f.kubelet.Pods.Set(kubelettest.Pod("ns", "job", "main", gpuResource, f.uuid(1)))
	f.does(f.uuid(1), allocationOf("ns/job/main")) // which reads the pods
	testenv.Must(t, f.preStart(e, f.uuid(1)))
	wantError(t, f.preStart(e, f.uuid(1)+"::0"), "is not ready for a container: container main of pod ns/job holds it")
	wantError(t, f.preStart(e, f.uuid(2)+"::0"), "no such device")
	f.does("is cordoned", control.Request{Act: control.Cordon, Device: "1", Reason: "a fan is loud"})
	wantError(t, f.preStart(e, f.uuid(1)), "cordoned: a fan is loud")
}

// A program that serves as a kubelet need not say which containers hold devices.
func TestAllocateGivesDevicesWhileTheHoldersAreUnknown(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.kubelet.StopPods()
	f.start(Serve)
	_, err := f.allocate(f.kubelet.WaitListed(gpuResource, 4, 0), f.uuid(1))
	testenv.Must(t, err)
	f.logs("it is unknown which containers hold devices", 1)
}

func TestPreStartPreparesTheReplicasOfADeviceOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", inReplicas(3, "1"))
	f.start(Serve)
	e := f.kubelet.WaitListed(gpuResource, 6, 0)
	testenv.Must(t, f.preStart(e, f.uuid(1)+"::0", f.uuid(1)+"::2", f.uuid(2)))
	for _, uuid := range []string{f.uuid(1), f.uuid(2)} {
		f.logs(uuid+" was prepared for a container of "+gpuResource, 1)
	}
}

// hangingState is a node where a probe of a device does not return before answer is closed.
type hangingState struct {
	prepare.State

	probing, answer chan struct{}
}

// Healthy implements prepare.State.
func (s *hangingState) Healthy(context.Context, string) error {
	close(s.probing)
	<-s.answer
	return nil
}

// Shared implements prepare.State.
func (s *hangingState) Shared(string) string { return "" }

// The plugin ends when the driver's calls for a container have returned, also those that are abandoned.
func TestTheEndOfTheServiceWaitsForPreparations(t *testing.T) {
	t.Parallel()
	f := newFixtureOn(t, sharedNode(t, "pcie-quad")) // without a kubelet, which synctest could not wait for
	testenv.Must(t, os.RemoveAll(f.kubelet.Dir))
	synctest.Test(t, func(t *testing.T) {
		state := &hangingState{probing: make(chan struct{}), answer: make(chan struct{})}
		runner := prepare.New(prepare.Options{Host: f.opts.Host, Driver: f.driver, State: state, Log: f.opts.Log})
		offered := func(string) bool { return true }
		p, err := plugin.New(plugin.Options{Dir: f.kubelet.Dir, Log: f.opts.Log})
		testenv.Must(t, err)
		s := &service{preparer: &preparer{
			runner: runner, record: prepare.NewRecordFile(Preparations(&f.opts.Config), offered, f.opts.Log),
		}}
		ctx, stop := context.WithCancel(t.Context())
		ended, prepared := make(chan error, 1), make(chan error, 1)
		go func() { ended <- s.runDoors(ctx, p.Run) }()
		go func() {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			defer cancel()
			_, err := runner.Run(ctx, []prepare.Device{{UUID: f.uuid(1), GPU: f.uuid(1)}}, prepare.Rules{Policy: prepare.Check})
			prepared <- err
		}()
		<-state.probing
		stop()
		if err := <-prepared; err == nil {
			t.Error("the device was prepared")
		}
		synctest.Wait()
		if len(ended) > 0 {
			t.Fatalf("the plugin has ended with %v", <-ended)
		}
		close(state.answer)
		testenv.Must(t, <-ended)
	})
}
