package agent

import (
	"context"
	"fmt"
	"reflect"

	"gpu-cdi-plugin/agent/config"
	"gpu-cdi-plugin/internal/wording"
	"gpu-cdi-plugin/resource"
)

// reload reads the configuration again at each request. If it only changes which devices are offered and how they are
// prepared, that takes effect at once. Any other change needs a new process, so reload returns ErrRestart, after a wait
// for devices that are being prepared. But if the driver is closed, for a reset or because an administrator has
// released it, a new process would open it. So the configuration is read once more when the driver is open again. Until
// then the devices stay served.
func (d *daemon) reload(ctx context.Context) error {
	var opened <-chan struct{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.opts.Reload:
		case <-opened:
		}
		opened = nil
		d.logUnsent(d.systemd.Reloading())
		fresh, err := d.reread()
		switch {
		case err != nil:
			d.opts.Log.Error("the configuration is invalid, and the old one stays in use: " + wording.OneLine(err))
		case needsRestart(&d.opts.Config, &fresh.Config):
			d.opts.Log.Info("the new configuration needs a restart of this program: it waits for devices that are being " +
				"prepared")
			var until string
			if until, opened = d.role.keepOpen(ctx); opened == nil {
				return ErrRestart
			}
			d.opts.Log.Warn("the old configuration stays in use until " + until + ": the new one needs a restart of this " +
				"program, which would open the driver")
		default:
			d.role.use(&fresh.Config)
			d.opts.Log.Info("the configuration was read again")
		}
		d.node.Trigger()
		d.logUnsent(d.systemd.Ready(d.statusLine()))
	}
}

// reread returns the options for the current configuration, or why that configuration cannot be used.
func (d *daemon) reread() (*Options, error) {
	fresh, err := d.opts.Reread()
	if err != nil {
		return nil, err
	}
	if needsRestart(&d.opts.Config, &fresh.Config) {
		if err := fresh.Trust.CheckHook(); err != nil {
			return nil, err
		}
	}
	if err := d.checkOffer(&fresh.Config); err != nil {
		return nil, err
	}
	return fresh, d.role.check(fresh)
}

// checkOffer returns an error if the devices that a configuration offers do not fit the GPUs of the node.
func (d *daemon) checkOffer(c *config.Config) error {
	snapshot := d.node.State().Snapshot
	if snapshot == nil {
		return nil
	}
	_, _, err := resource.Build(snapshot, d.role.offer(c))
	if err == nil {
		return nil
	}
	if hint := d.opts.Hint(err); hint != "" {
		return fmt.Errorf("%w; %s", err, hint)
	}
	return err
}

// needsRestart reports whether two configurations differ in more than which devices are offered and how they are
// prepared for containers.
func needsRestart(a, b *config.Config) bool {
	x, y := *a, *b
	x.Config, y.Config = resource.Config{}, resource.Config{}
	x.PreStart, y.PreStart = config.PreStart{}, config.PreStart{}
	return !reflect.DeepEqual(x, y)
}
