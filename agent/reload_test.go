package agent

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/prepare"
	"gpu-cdi-plugin/internal/configfile"
	"gpu-cdi-plugin/resource"
	"gpu-cdi-plugin/test/lib/testenv"
)

// inReplicas shares devices of the default resource by time-slicing.
func inReplicas(replicas int, devices ...resource.Selector) func(*config.Config) {
	return func(c *config.Config) {
		c.Sharing.TimeSlicing.Resources = []resource.SharingRule{
			{Name: gpuResource, Devices: devices, Replicas: replicas},
		}
	}
}

func named(name string) func(*config.Config) {
	return func(c *config.Config) { c.Names.GPUs = []resource.NameRule{{Pattern: "*", Name: name}} }
}

func byVariable(c *config.Config) { c.Strategy = []resource.Strategy{resource.Envvar} }

const (
	readAgain = "the configuration was read again"
	invalid   = "the configuration is invalid, and the old one stays in use: "
	untilOpen = "the old configuration stays in use until the driver is no longer released"
)

func TestReloadChangesDevicesAndTheirPreparationAtOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change        func(*config.Config)
		want          map[string]int // healthy devices
		registrations int
	}{
		"replicas of a device": {inReplicas(3, "0"), map[string]int{gpuResource: 6}, 1},
		"a GPU less": {
			func(c *config.Config) { c.GPUs.Exclude = []resource.Selector{"1"} }, map[string]int{gpuResource: 3}, 1,
		},
		"another default name": {
			func(c *config.Config) { c.Resource = "acme.com/gpu" }, map[string]int{gpuResource: 0, "acme.com/gpu": 4}, 2,
		},
		"how devices are prepared": {
			func(c *config.Config) { c.PreStart.Policy = prepare.Clean }, map[string]int{gpuResource: 4}, 1,
		},
		"names by product": {named("nvidia.com/l40s"), map[string]int{gpuResource: 0, "nvidia.com/l40s": 4}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad")
			f.start(Serve)
			f.kubelet.WaitListed(gpuResource, 4, 0)
			// The directories are in use already, so they are not checked again.
			f.next.Trust = fakeTrust{hook: errors.New("not root's"), dirs: map[string]error{"cdi-dir": errors.New("not root's")}}
			f.reconfigure(c.change)
			for resource, healthy := range c.want {
				f.kubelet.WaitListed(resource, healthy, 0)
			}
			f.logs(readAgain, 1)
			if got := f.kubelet.Registrations(); got != c.registrations {
				t.Errorf("%d registrations, want %d", got, c.registrations)
			}
			f.runs()
		})
	}
}

// A resource whose devices all have other names is registered only if it had devices before: then the kubelet learns
// that there are none.
func TestReloadRegistersNoResourceThatNeverHadADevice(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad", named("nvidia.com/big"))
	f.start(Serve)
	f.kubelet.WaitListed("nvidia.com/big", 4, 0)
	// The resources of a reconciliation are registered together, so a second one shows that none is missing.
	f.reconfigure(named("nvidia.com/other"))
	f.kubelet.WaitListed("nvidia.com/other", 4, 0)
	f.kubelet.WaitListed("nvidia.com/big", 0, 0)
	if n := f.kubelet.Registrations(); n != 2 || f.kubelet.Lists(gpuResource) != 0 {
		t.Errorf("%d registrations, %d lists of %s; want 2 and none", n, f.kubelet.Lists(gpuResource), gpuResource)
	}
	f.reconfigure(func(c *config.Config) { c.Names.GPUs = nil })
	f.kubelet.WaitListed(gpuResource, 4, 0)
	f.reconfigure(named("nvidia.com/big"))
	f.kubelet.WaitListed("nvidia.com/big", 4, 0)
	f.kubelet.WaitListed(gpuResource, 0, 0)
}

func TestReloadOfOtherKeysNeedsARestart(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*config.Config){
		"the strategy":      byVariable,
		"the CDI kind":      func(c *config.Config) { c.CDIKind = "acme.com/gpu" },
		"a weight":          func(c *config.Config) { c.Allocation.Weights.Node++ },
		"a rule for an XID": func(c *config.Config) { c.Health.XIDs = []config.XIDRule{{XID: 95, Action: "ignore"}} },
		"a time limit":      func(c *config.Config) { c.GPUTimeout = configfile.Duration(time.Minute) },
		"the strategy with a new offer": func(c *config.Config) {
			byVariable(c)
			inReplicas(3)(c)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad")
			f.start(Serve)
			f.kubelet.WaitListed(gpuResource, 4, 0)
			f.reconfigure(change)
			if err := f.result(); !errors.Is(err, ErrRestart) {
				t.Errorf("it ends with %v, want ErrRestart", err)
			}
		})
	}
}

func TestReloadKeepsTheOldConfigurationIfTheNewOneCannotBeUsed(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		make func(*fixture)
		want string
	}{
		"it cannot be read": {
			func(f *fixture) {
				f.mu.Lock()
				f.err = errors.New("mig-strategy: want none, single or mixed\nstrategy: want one")
				f.mu.Unlock()
				f.reload <- os.Interrupt
			},
			"mig-strategy: want none, single or mixed; strategy: want one",
		},
		"there would be too many devices with these GPUs": {
			func(f *fixture) { f.reconfigure(inReplicas(50000)) },
			"resource nvidia.com/gpu: a list of 200000 devices", // and a hint, see below
		},
		"the same, although it needs a restart": {
			func(f *fixture) { f.reconfigure(func(c *config.Config) { byVariable(c); inReplicas(50000)(c) }) },
			"resource nvidia.com/gpu: a list of 200000 devices",
		},
		"it needs a restart, and the hook is not root's": {
			func(f *fixture) {
				f.next.Trust = fakeTrust{hook: errors.New("the hook is not root's")}
				f.reconfigure(byVariable)
			},
			"the hook is not root's",
		},
		"it needs a restart, and a directory is not root's": {
			func(f *fixture) {
				f.next.Trust = fakeTrust{dirs: map[string]error{"state-dir": errors.New("state-dir: not root's")}}
				f.reconfigure(byVariable)
			},
			"state-dir: not root's",
		},
		"it needs a restart, and the new state directory is a file": {
			func(f *fixture) { f.reconfigure(func(c *config.Config) { c.StateDir = f.node.Library() }) },
			"state-dir: ",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "pcie-quad")
			f.opts.Hint = func(err error) string {
				if _, ok := errors.AsType[*resource.TooManyDevicesError](err); ok {
					return "lower replicas"
				}
				return ""
			}
			f.start(Serve)
			e := f.kubelet.WaitListed(gpuResource, 4, 0)
			c.make(f)
			f.logs(invalid+c.want, 1)
			if names, err := f.allocate(e, f.uuid(1)); err != nil || len(names) != 1 {
				t.Errorf("after that Allocate returns %v, %v", names, err)
			}
			if tooMany := f.logged("200000 devices") > 0; tooMany != (f.logged("; lower replicas") > 0) {
				t.Errorf("too many devices: %t, but the hint is logged %d times", tooMany, f.logged("; lower replicas"))
			}
			f.next.Trust = f.opts.Trust
			f.reconfigure(inReplicas(3, "0"))
			f.kubelet.WaitListed(gpuResource, 6, 0)
		})
	}
}

// A restart takes the plugin's sockets away, which would interrupt the start of a container. An administrator's program
// can take long.
func TestARestartWaitsForPreparations(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	fifo, program := filepath.Join(dir, "fifo"), filepath.Join(dir, "program")
	testenv.Must(t, unix.Mkfifo(fifo, 0o600))
	testenv.WriteProgram(t, program, []byte("#!/bin/sh\nread line < "+fifo+"\n"))
	f := newFixture(t, "pcie-quad", func(c *config.Config) {
		c.PreStart.Policy, c.PreStart.Exec = prepare.None, program
		c.PreStart.ExecTimeout = configfile.Duration(20 * time.Second)
	})
	f.start(Serve)
	e := f.kubelet.WaitListed(gpuResource, 4, 0)
	started := make(chan error, 1)
	go func() { started <- f.preStart(e, f.uuid(1)) }()
	end, err := os.OpenFile(fifo, os.O_WRONLY, 0) // waits for the program
	testenv.Must(t, err)
	f.reconfigure(byVariable)
	f.logs("it waits for devices that are being prepared", 1)
	time.Sleep(100 * time.Millisecond) // so that a restart that does not wait would be seen
	if _, err := f.allocate(e, f.uuid(2)); err != nil {
		t.Errorf("the plugin is not served: %v", err)
	}
	f.runs()
	_, err = end.WriteString("go on\n")
	testenv.Must(t, err, end.Close(), <-started)
	if err := f.result(); !errors.Is(err, ErrRestart) {
		t.Errorf("it ends with %v, want ErrRestart", err)
	}
}

// A new process would open the driver that an administrator has released.
func TestReloadWaitsWithARestartWhileTheDriverIsReleased(t *testing.T) {
	t.Parallel()
	f := newFixture(t, "pcie-quad")
	f.start(Serve)
	e := f.kubelet.WaitListed(gpuResource, 4, 0)
	f.does("is released", toRelease)
	for i := range 2 {
		f.reconfigure(byVariable)
		f.logs(untilOpen, i+1)
	}
	wantError(t, f.preStart(e, f.uuid(1)), errReleased.Error())

	// The configuration is read once more at the end of the release. If it is invalid by then, the old one stays.
	f.reconfigure(byVariable)
	f.logs(untilOpen, 3)
	f.mu.Lock()
	f.err = errors.New("strategy: unknown")
	f.mu.Unlock()
	f.does("is opened again", toReopen)
	f.logs(invalid+"strategy: unknown", 1)
	testenv.Must(t, f.preStart(e, f.uuid(1)))
	f.runs()

	f.does("is released", toRelease)
	f.reconfigure(byVariable)
	f.logs(untilOpen, 4)
	_, _ = f.send(toReopen) // which may be answered before the end or not
	if err := f.result(); !errors.Is(err, ErrRestart) {
		t.Errorf("it ends with %v, want ErrRestart", err)
	}
}
