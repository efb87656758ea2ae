package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"reflect"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/cli"
	"gpu-cdi-plugin/resource"
)

// errRestart ends the service so that it starts again with another configuration.
var errRestart = errors.New("the configuration has changed")

// reload reads the configuration again at each SIGHUP. Another offer of devices takes effect at once; for any other
// change the program starts again, which is errRestart. While the driver is released that would open it, so the
// configuration is read again after the release.
func (d *daemon) reload(ctx context.Context) error {
	var released <-chan struct{}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.app.hangups:
		case <-released:
		}
		released = nil
		d.app.reported(d.systemd.Reloading())
		fresh, err := d.app.reread()
		if err == nil && !sameButOffer(d.app, fresh) {
			err = fresh.checkHook()
		}
		if err == nil {
			err = d.checkOffer(fresh)
		}
		if err == nil {
			err = d.admit(fresh)
		}
		switch {
		case err != nil:
			d.app.Log.Error("the configuration is invalid, and the old one stays in use: " + cli.OneLine(err))
		case !sameButOffer(d.app, fresh):
			if released = d.released(); released == nil {
				return errRestart
			}
			d.app.Log.Warn("the old configuration stays in use until the driver is no longer released: the new one needs " +
				"a restart of this program, which would open the driver (gpu-cdi-plugin device reopen)")
		default:
			offer := d.offerOf(fresh)
			d.offer.Store(&offer)
			d.app.plugin.Config = fresh.plugin.Config
			d.app.Log.Info("the configuration was read again")
		}
		d.node.Trigger()
		d.app.reported(d.systemd.Ready(d.statusLine()))
	}
}

// reread returns an app with the configuration as it is now: from the same flags and environment, and from the file,
// which is read again.
func (a *app) reread() (*app, error) {
	fresh := newApp() // a command would stay in cobra's list of completions for ever
	return fresh, fresh.Reread(a.Program)
}

// checkConfig returns an error if the service cannot use a configuration. If only the offer is another, the directories
// are in use already.
func (s *service) checkConfig(fresh *app) error {
	if fresh == s.app || !sameButOffer(s.app, fresh) {
		return fresh.checkDirs(s.app.Log)
	}
	return nil
}

// checkOffer returns an error if what a configuration offers does not fit the GPUs of the node.
func (d *daemon) checkOffer(fresh *app) error {
	snapshot := d.node.State().Snapshot
	if snapshot == nil {
		return nil
	}
	_, _, err := resource.Build(snapshot, d.offerOf(fresh))
	if hint := cli.HintOf(d.app.Classify(err)); hint != "" {
		return fmt.Errorf("%w; %s", err, hint)
	}
	return err
}

// sameButOffer reports whether two configurations differ in nothing but what is offered.
func sameButOffer(a, b *app) bool {
	x, y := *a.plugin, *b.plugin
	x.Config, y.Config = resource.Config{}, resource.Config{}
	return *a.Common == *b.Common && reflect.DeepEqual(x, y)
}

// restart re-executes the program with the same process ID, so that a supervisor sees no exit. It returns only with an
// error.
func restart(env []string) error {
	// SIGHUP is ignored until the new program handles it. None is missed, since it reads the configuration at its start.
	signal.Ignore(unix.SIGHUP)
	err := unix.Exec("/proc/self/exe", os.Args, env)
	return fmt.Errorf("start again: %w", err)
}
