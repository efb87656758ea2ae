package conformance

import (
	"context"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// preStartLimit is how long the kubelet waits for PreStartContainer.
const preStartLimit = 30 * time.Second

// prestarting returns a check that needs a plugin that advertises PreStartContainer.
func prestarting(f func(context.Context, *plugin, []string) verdict) check {
	return func(ctx context.Context, s *session) verdict {
		if !s.opts.PreStart {
			return skipped("PreStartContainer may reset devices: it is called only with --pre-start")
		}
		return allocating(func(ctx context.Context, p *plugin, healthy []string) verdict {
			if !p.options.GetPreStartRequired() {
				return skipped("the plugin does not advertise PreStartContainer")
			}
			return f(ctx, p, healthy)
		})(ctx, s)
	}
}

func (p *plugin) preStart(ctx context.Context, ids ...string) error {
	ctx, cancel := context.WithTimeout(ctx, preStartLimit)
	defer cancel()
	_, err := p.client.PreStartContainer(ctx, &v1beta1.PreStartContainerRequest{DevicesIds: ids})
	return err
}

func preStartAnswers(ctx context.Context, p *plugin, healthy []string) verdict {
	begin := time.Now()
	if err := p.preStart(ctx, healthy[0]); err != nil {
		return failed("%q: %s", healthy[0], reason(err, preStartLimit))
	}
	return passed("%q after %s", healthy[0], time.Since(begin).Round(time.Millisecond))
}

func preStartUnknown(ctx context.Context, p *plugin, _ []string) verdict {
	err := p.preStart(ctx, unknownID)
	switch {
	case err == nil:
		return failed("%q was answered without an error", unknownID)
	case hung(err) || crashed(err):
		return failed("%q: %s", unknownID, reason(err, preStartLimit))
	}
	return passed("an error")
}
