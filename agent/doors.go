package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"gpu-cdi-plugin/agent/apiserver"
	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/agent/dra"
	"gpu-cdi-plugin/agent/ledger"
	"gpu-cdi-plugin/gpu"
	"gpu-cdi-plugin/resource"
)

// claimRecords returns the directory of the records of prepared claims.
func claimRecords(c *config.Config) string { return filepath.Join(c.StateDir, "claims") }

const (
	// claimTimeout is how long a request to the API server may take. A pod waits for it.
	claimTimeout = 10 * time.Second
	// claimIdle is how long a connection to the API server is kept for the next claim.
	claimIdle = time.Minute
)

// servesClaims reports whether the DRA driver must run: the node is used by DRA, or was, and may have prepared claims
// from that time. They must be unprepared, since their pods cannot end otherwise.
func servesClaims(c *config.Config) bool {
	_, err := os.Lstat(claimRecords(c))
	return c.Door != config.PluginDoor || !errors.Is(err, fs.ErrNotExist)
}

// newDRA returns the DRA driver.
func newDRA(o *Options, held *ledger.Ledger, prep *preparer, obs observer) (*dra.Driver, error) {
	c := &o.Config
	api, err := apiserver.New(apiserver.Options{
		Credentials: c.ServiceAccountDir, Env: o.Env, Timeout: claimTimeout, KeepIdle: claimIdle,
	})
	leaving := c.Door == config.PluginDoor || c.Leaves()
	switch {
	case err != nil && !leaving:
		return nil, fmt.Errorf("door %s needs the API server: %w", c.Door, err)
	case err != nil:
		o.Log.Warn("this program was started without the credentials of a service account, so the ResourceSlices that it " +
			"may have published are not deleted until the kubelet does: " + err.Error())
	}
	return dra.New(dra.Options{
		Name: dra.DefaultDriver, API: api, Host: o.Host, Records: claimRecords(c), RegistryDir: c.PluginsRegistryDir,
		Leaving: leaving, Beside: c.TakeOver, Ledger: held,
		PreStart: prep.preStartClaim, Resets: prep.resetsForClaim,
		Changed: obs.wake, Observer: obs, Log: o.Log,
	}), nil
}

// split splits resources by the door through which the kubelet gets their devices. All resources stay those of the
// plugin, perhaps without devices, so that the kubelet and the scheduler know that there are none. A service that
// leaves has none for the plugin, and offers those for DRA to nobody.
func split(c *config.Config, s *gpu.Snapshot, resources []resource.Resource) (plugin, claimable []resource.Resource) {
	for _, r := range resources {
		byPlugin, byDRA := r, r
		byPlugin.Devices, byDRA.Devices = nil, nil
		for _, d := range r.Devices {
			if g := s.Find(d.Parent); c.Leaves() || g != nil && c.ByDRA(g) {
				byDRA.Devices = append(byDRA.Devices, d)
			} else {
				byPlugin.Devices = append(byPlugin.Devices, d)
			}
		}
		plugin = append(plugin, byPlugin)
		if len(byDRA.Devices) > 0 {
			claimable = append(claimable, byDRA)
		}
	}
	return plugin, claimable
}

// displacedBy returns the resources of which the plugin has no device any more, and DRA has.
func displacedBy(c *config.Config, resources []resource.Resource) []string {
	if c.Door != config.DRADoor {
		return nil
	}
	var names []string
	for i := range resources {
		names = append(names, resources[i].Name)
	}
	return names
}
