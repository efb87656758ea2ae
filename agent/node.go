package agent

import (
	"slices"
	"sync/atomic"

	specs "tags.cncf.io/container-device-interface/specs-go"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/metrics"
	"gpu-cdi-plugin/agent/mps"
	"gpu-cdi-plugin/cdi"
	"gpu-cdi-plugin/driver"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/resource"
)

// current is the effective configuration, which a reload replaces. Only what takes effect at once reads it: which
// devices are offered, and how they are prepared for containers.
type current = atomic.Pointer[config.Config]

// files has the paths of the files that the node writes. If a path is empty, that file is not written.
type files struct{ spec, descriptors, health string }

// nodeOptions returns the options of the node. The function `offer` selects the devices that are offered. The function
// `still` returns the GPUs that an earlier run of this program began to reset and that are still being reset.
func nodeOptions(
	o *Options, f files, offer func() resource.Config, m *metrics.Metrics, still func() ([]string, error),
) node.Options {
	c := &o.Config
	var search *driver.Search
	if !c.TakeOver { // it may wait for long
		search = driver.Begin(o.Host)
	}
	return node.Options{
		Host: o.Host, Source: o.Driver, Dirs: o.SpecDirs, Path: f.spec, DescriptorDir: f.descriptors,
		Spec:        cdi.Options{Kind: c.CDIKind, HookPath: o.HookPath, WithoutHooks: c.NoHook},
		WithoutCDI:  slices.Contains(c.Strategy, resource.DeviceSpecs),
		ByIndex:     c.DeviceIDStrategy == config.ByIndex,
		Extras:      Extras(c),
		Search:      search,
		AwaitDriver: !c.FailOnInitError,
		Interval:    o.PollInterval,
		MPSClient:   func(uuid string) specs.ContainerEdits { return mps.Grant(MPSDir(c), uuid) },
		Check:       func() error { return checkNode(o) },
		Build: func(s *gpu.Snapshot) ([]resource.Resource, []resource.Finding, error) {
			return resource.Build(s, offer())
		},
		Log: o.Log, Observer: m,
		Health: node.HealthOptions{
			Prober: o.Driver, Rules: c.Health.Rules(), Path: f.health, Observer: m, StillResetting: still,
		},
	}
}

// checkNode returns an error if containers must not get the hook or the driver's files.
func checkNode(o *Options) error {
	if err := o.Trust.CheckHook(); err != nil {
		return err
	}
	return o.Trust.CheckDir("the driver's root", o.Host.DriverRoot())
}

// Extras returns the features that containers get besides GPUs.
func Extras(c *config.Config) []node.Extra {
	var list []node.Extra
	for _, e := range c.Extras {
		list = append(list, node.Extra{Extra: driver.Extra(e)})
	}
	if x := c.IMEX; len(x.Channels) > 0 {
		list = append(list, node.Extra{Extra: driver.IMEX, Channels: x.Channels, Required: x.Required})
	}
	return list
}
