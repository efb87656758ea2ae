package conformance

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	naming "gpu-cdi-plugin/internal/kubelet"
)

// registers waits for the first registration, which all other checks need.
func registers(ctx context.Context, s *session) verdict {
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	if s.command != nil {
		go func() { // if the plugin ends, it cannot register any more
			select {
			case <-s.command.done:
				cancel()
			case <-waiting.Done():
			}
		}()
	}
	list, ok := s.kubelet.await(waiting, nil)
	s.plugins = list
	if !ok && waiting.Err() != nil && ctx.Err() == nil {
		return failed("the plugin ended before it registered (%s)", s.command.state)
	}
	if !ok {
		return failed("no plugin registered at %s within %s", s.kubelet.socket(), s.opts.Timeout)
	}
	return passed("%s after %s", strings.Join(names(s.plugins), ", "), s.kubelet.took())
}

func servesFirst(_ context.Context, _ *session, p *plugin) verdict {
	if p.refused != nil {
		return failed("when Register was called, %s", p.refused)
	}
	return passed("%s accepted connections when Register was called", filepath.Base(p.socket))
}

func registersVersion(_ context.Context, _ *session, p *plugin) verdict {
	if got := p.request.GetVersion(); got != v1beta1.Version {
		return failed("version %q", got)
	}
	return passed("%s", v1beta1.Version)
}

func registersName(_ context.Context, _ *session, p *plugin) verdict {
	if err := naming.CheckResourceName(p.resource); err != nil {
		return failed("%q: %v", p.resource, err)
	}
	return passed("%s", p.resource)
}

func registersEndpoint(_ context.Context, _ *session, p *plugin) verdict {
	endpoint := p.request.GetEndpoint()
	switch {
	case endpoint == "" || endpoint == "." || endpoint == ".." || strings.Contains(endpoint, "/"):
		return failed("endpoint %q", endpoint)
	case endpoint == socketName:
		return failed("endpoint %q is the kubelet's own", endpoint)
	}
	return passed("%s", endpoint)
}

func optionsAnswered(_ context.Context, _ *session, p *plugin) verdict {
	if p.optionsErr != nil {
		return failed("%s", reason(p.optionsErr, p.timeout))
	}
	return passed("%s", describe(p.options))
}

func optionsAgree(_ context.Context, _ *session, p *plugin) verdict {
	registered := p.request.GetOptions()
	switch {
	case p.optionsErr != nil:
		return skipped("GetDevicePluginOptions was not answered")
	case registered == nil:
		return skipped("Register was called without options")
	case !proto.Equal(registered, p.options):
		return failed("%s by Register, %s by GetDevicePluginOptions", describe(registered), describe(p.options))
	}
	return passed("%s", describe(p.options))
}

func describe(o *v1beta1.DevicePluginOptions) string {
	return fmt.Sprintf("PreStartContainer %t, GetPreferredAllocation %t",
		o.GetPreStartRequired(), o.GetGetPreferredAllocationAvailable())
}

// Restarts of the kubelet.

// registersAgain stops the kubelet's side, calls `between`, and starts the kubelet's side again. All resources must
// then register again.
func (s *session) registersAgain(ctx context.Context, between func() error) verdict {
	resources := names(s.plugins)
	if len(resources) == 0 {
		return skipped("the plugin has not registered")
	}
	if s.before == nil {
		s.before = map[string][]*v1beta1.Device{}
		for _, p := range s.plugins {
			s.before[p.resource] = p.devices()
		}
	}
	if err := s.kubelet.stop(); err != nil {
		return failed("%v", err)
	}
	if err := between(); err != nil {
		return failed("%v", err)
	}
	if err := s.kubelet.start(ctx); err != nil {
		return failed("%v", err)
	}
	list, ok := s.kubelet.await(ctx, resources)
	if !ok {
		missing := slices.DeleteFunc(resources, func(name string) bool { return slices.Contains(names(list), name) })
		return failed("%s did not register again within %s", strings.Join(missing, ", "), s.opts.Timeout)
	}
	s.plugins = list
	for _, p := range list {
		if err := p.watch.awaitFirst(ctx, p.timeout); err != nil {
			return failed("%s registered again, but its list: %v", p.resource, err)
		}
	}
	return passed("registered again after %s", s.kubelet.took())
}

func restarted(ctx context.Context, s *session) verdict {
	return s.registersAgain(ctx, func() error { return nil })
}

func restartedTwice(ctx context.Context, s *session) verdict {
	return s.registersAgain(ctx, func() error {
		if err := s.kubelet.start(ctx); err != nil {
			return err
		}
		return s.kubelet.stop()
	})
}

func restartedLater(ctx context.Context, s *session) verdict {
	return s.registersAgain(ctx, func() error {
		select {
		case <-time.After(s.opts.Timeout / 5):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

func restartedCleaning(ctx context.Context, s *session) verdict {
	return s.registersAgain(ctx, s.kubelet.removeSockets)
}

func restartedSame(_ context.Context, s *session, p *plugin) verdict {
	before, now := s.before[p.resource], p.devices()
	_, _, ended := p.watch.state()
	if ended != nil || len(before) == 0 || len(now) == 0 {
		return skipped("the plugin has not registered again with devices")
	}
	if diff := difference(before, now); diff != "" {
		return failed("after restarts %s", diff)
	}
	return passed("the same %d devices", len(now))
}

// The end of the plugin.

// goesOn is the ID of the rule about plugins that crash.
const goesOn = "plugin-goes-on"

func wentOn(ctx context.Context, _ *session, p *plugin) verdict {
	if err := p.answering(ctx); err != nil {
		return failed("%v", err)
	}
	return passed("GetDevicePluginOptions is answered after all calls")
}

func endsAtSignal(_ context.Context, s *session) verdict {
	if s.command == nil {
		return skipped("the plugin was not started by this program")
	}
	state, ok := s.command.terminate(s.opts.Timeout)
	switch {
	case !ok:
		return failed("the plugin still runs %s after SIGTERM", s.opts.Timeout)
	case state != "exit status 0":
		return failed("%s", state)
	}
	return passed("%s", state)
}

func removesSocket(_ context.Context, s *session) verdict {
	if s.command == nil {
		return skipped("the plugin was not started by this program")
	}
	if _, ended := s.command.ended(0); !ended {
		return skipped("the plugin still runs")
	}
	var left []string
	var err error
	if s.registry != nil {
		left = s.registry.sockets()
	} else {
		left, err = s.kubelet.sockets()
	}
	switch {
	case err != nil:
		return failed("%v", err)
	case len(left) > 0:
		return failed("the plugin left %s", strings.Join(left, ", "))
	}
	return passed("the directory has no socket of the plugin")
}
