package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"reflect"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/metrics"
	"gpu-cdi-plugin/node"
	"gpu-cdi-plugin/plugin"
	"gpu-cdi-plugin/resource"
)

// errRestart ends the service so that it starts again with another configuration.
var errRestart = errors.New("the configuration has changed")

// hangups are the SIGHUPs of the process.
type hangups struct{ c chan os.Signal }

// listenForHangups begins before the configuration is read: until then a SIGHUP would end the process, and from then on
// one means to read it again.
func listenForHangups() hangups {
	c := make(chan os.Signal, 1)
	signal.Notify(c, unix.SIGHUP)
	return hangups{c}
}

func (h hangups) stop() { signal.Stop(h.c) }

// reloads reads the configuration again at each SIGHUP. What is offered changes without anybody noticing but the
// kubelet; for everything else the service starts again, which is errRestart.
func (s *service) reloads(ctx context.Context, cmd *cobra.Command, hup <-chan os.Signal) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-hup:
		}
		if err := s.systemd.Reloading(); err != nil {
			s.app.log.Warn("systemd could not be told of the reload: " + err.Error())
		}
		fresh, err := s.app.reread(cmd) //nolint:contextcheck // no verb is run
		if err == nil {
			err = s.claimMPS(fresh)
		}
		if err == nil && !sameButRules(s.app, fresh) {
			err = cmp.Or(fresh.checkHook(), fresh.checkDirs(s.app.log))
		}
		switch {
		case err != nil:
			s.app.log.Error("the configuration is wrong, and the old one stays in use: " + inLine(err))
		case !sameButRules(s.app, fresh):
			return errRestart
		default:
			s.rules.Store(&fresh.plugin.Config)
			s.app.plugin.Config = fresh.plugin.Config
			s.app.log.Info("the configuration was read again")
		}
		s.inv.Kick()
		if err := s.systemd.Ready(s.summary()); err != nil {
			s.app.log.Warn("systemd could not be told of the reload's end: " + err.Error())
		}
	}
}

// reread is an app with the configuration as it is now: the flags are those of the command line still, the environment
// too, and the file is read again.
func (a *app) reread(cmd *cobra.Command) (*app, error) {
	fresh := newApp()
	fresh.env, fresh.stdin, fresh.stdout, fresh.stderr = a.env, a.stdin, a.stdout, a.stderr
	fresh.log, fresh.warned = a.log, a.warned
	flags := fresh.options(fresh.rootCommand())
	var errs []error
	a.options(cmd).VisitAll(func(f *pflag.Flag) {
		if a.sources[f.Name] == fromFlag {
			errs = append(errs, flags.Set(f.Name, f.Value.String()))
		}
	})
	return fresh, errors.Join(append(errs, fresh.resolve(flags))...)
}

// claimMPS refuses to share GPUs by MPS where another instance does so, which would end the service. Whether a directory
// for MPS is free that is not this one's yet is seen when the service has started again.
func (s *service) claimMPS(fresh *app) error {
	if len(fresh.plugin.Sharing.MPS.Resources) == 0 || fresh.mpsDir() != s.app.mpsDir() {
		return nil
	}
	return s.keeper.Claim()
}

// sameButRules reports whether two configurations differ in nothing but what is offered.
func sameButRules(a, b *app) bool {
	x, y := a.plugin, b.plugin
	x.Config, y.Config = resource.Config{}, resource.Config{}
	return a.globals == b.globals && reflect.DeepEqual(x, y)
}

// restart replaces the process by one that begins anew: the same program with the same arguments and the same process
// ID, so that who watches it sees no end. It returns only with an error.
func restart(env []string) error {
	// The new program inherits that, until it listens itself: it reads the configuration anew in any case.
	signal.Ignore(unix.SIGHUP)
	err := unix.Exec("/proc/self/exe", os.Args, env)
	return fmt.Errorf("start again: %w", err)
}

// actor runs until its context ends or it cannot go on.
type actor = func(context.Context) error

// runAll runs actors until ctx ends or the first of them does with an error, which is returned after all have ended.
func runAll(ctx context.Context, actors ...actor) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, run := range actors {
		g.Go(func() error { return run(ctx) })
	}
	return g.Wait()
}

// observer tells the metrics what the plugin does, and the service that its state may be another.
type observer struct {
	*metrics.Metrics
	service *service
}

var (
	_ plugin.Observer = observer{}
	_ node.Observer   = observer{}
)

func (o observer) Connected(resource string, connected bool) {
	o.Metrics.Connected(resource, connected)
	o.service.tell()
}

func (o observer) Registered(resource string, err error) {
	o.Metrics.Registered(resource, err)
	o.service.tell()
}

// Reconciled is told of each look at the node.
func (o observer) Reconciled(took time.Duration, written bool, err error) {
	o.Metrics.Reconciled(took, written, err)
	wake(o.service.looked)
}
