package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	pluginregistration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	naming "gpu-cdi-plugin/internal/kubelet"
)

// registry acts as the kubelet's plugin watcher: it finds the sockets in a directory and calls GetInfo on the plugins
// that serve them. Such plugins do not call Register.
type registry struct {
	dir     string
	timeout time.Duration
	took    time.Duration // from the start of the last search until the last plugin was found
}

// introduction is the registration of a plugin that has a socket in the registry.
type introduction struct {
	socket string
	conn   *grpc.ClientConn
	client pluginregistration.RegistrationClient
	info   *pluginregistration.PluginInfo
	// infoErr is the error of GetInfo. notifyErr is that of NotifyRegistrationStatus after a successful registration.
	infoErr, notifyErr error
}

// introduce calls GetInfo on the plugin at a socket, connects to the plugin's endpoint, and notifies the plugin that
// it is registered. It does so even if a kubelet would refuse the plugin, so that the other rules can be checked.
func (r *registry) introduce(ctx context.Context, socket string) (*plugin, error) {
	conn, err := newConn(socket)
	if err != nil {
		return nil, err
	}
	i := &introduction{socket: socket, conn: conn, client: pluginregistration.NewRegistrationClient(conn)}
	i.info, i.infoErr = i.getInfo(ctx, r.timeout)
	endpoint := cmp.Or(i.info.GetEndpoint(), socket)
	if !filepath.IsAbs(endpoint) {
		endpoint = socket
	}
	p, err := connect(i.info.GetName(), endpoint, r.timeout)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	p.intro = i
	p.open(ctx)
	i.notifyErr = i.notify(ctx, r.timeout, &pluginregistration.RegistrationStatus{PluginRegistered: true})
	return p, nil
}

func (i *introduction) getInfo(ctx context.Context, limit time.Duration) (*pluginregistration.PluginInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return i.client.GetInfo(ctx, &pluginregistration.InfoRequest{}, grpc.WaitForReady(true))
}

func (i *introduction) notify(
	ctx context.Context, limit time.Duration, status *pluginregistration.RegistrationStatus,
) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	_, err := i.client.NotifyRegistrationStatus(ctx, status)
	return err
}

// maxSockets is how many sockets of a plugin are checked.
const maxSockets = 64

// find waits until all the resources have a socket in the registry, or any resource if none are given. Then it waits
// until no socket follows for a while. The result says whether the resources were found within the time limit and
// before the plugin ended.
func (r *registry) find(ctx context.Context, ended <-chan struct{}, resources []string) ([]*plugin, bool) {
	begin := time.Now()
	last := begin
	found := map[string]*plugin{} // by socket
	for {
		for _, socket := range r.sockets() {
			if found[socket] != nil || len(found) == maxSockets || time.Since(begin) > r.timeout {
				continue
			}
			if p, err := r.introduce(ctx, socket); err == nil {
				found[socket] = p
				last = time.Now()
			}
		}
		list := slices.SortedFunc(maps.Values(found), byResource)
		complete := len(list) > 0 && subset(resources, names(list))
		r.took = last.Sub(begin).Round(time.Millisecond)
		if complete && time.Since(last) > r.timeout/20 || time.Since(begin) > r.timeout || ctx.Err() != nil {
			return list, complete
		}
		select {
		case <-time.After(dialPause):
		case <-ended:
			return list, false
		case <-ctx.Done():
		}
	}
}

// sockets returns the paths of the sockets that a kubelet would find: at any depth, but not hidden ones.
func (r *registry) sockets() []string {
	var list []string
	_ = filepath.WalkDir(r.dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // it was removed meanwhile, and the search goes on
		}
		switch {
		case path != r.dir && strings.HasPrefix(e.Name(), "."):
			if e.IsDir() {
				return fs.SkipDir
			}
		case e.Type() == fs.ModeSocket:
			list = append(list, path)
		}
		return nil
	})
	return list
}

// introducing returns a check of each plugin in the registry.
func introducing(f func(context.Context, *plugin) verdict) check {
	return watching(each(func(ctx context.Context, _ *session, p *plugin) verdict {
		if p.intro.infoErr != nil {
			return skipped("GetInfo was not answered")
		}
		return f(ctx, p)
	}))
}

// watching returns a check that needs the registry.
func watching(f check) check {
	return func(ctx context.Context, s *session) verdict {
		if s.registry == nil {
			return skipped("the plugin was not given a registry ({registry} in --command)")
		}
		return f(ctx, s)
	}
}

func foundInTime(ctx context.Context, s *session) verdict {
	list, ok := s.registry.find(ctx, s.command.done, nil)
	s.plugins = list
	if ok {
		return passed("%s after %s", strings.Join(names(list), ", "), s.registry.took)
	}
	if state, ended := s.command.ended(0); ended {
		return failed("the plugin ended before it had a socket there (%s)", state)
	}
	return failed("no socket in %s within %s", s.registry.dir, s.opts.Timeout)
}

func infoAnswered(_ context.Context, _ *session, p *plugin) verdict {
	if p.intro.infoErr != nil {
		return failed("%s", reason(p.intro.infoErr, p.timeout))
	}
	return passed("an answer at %q", filepath.Base(p.intro.socket))
}

func infoType(_ context.Context, p *plugin) verdict {
	if got := p.intro.info.GetType(); got != pluginregistration.DevicePlugin {
		return failed("type %q", got)
	}
	return passed("%s", pluginregistration.DevicePlugin)
}

func infoName(_ context.Context, p *plugin) verdict {
	if err := naming.CheckResourceName(p.resource); err != nil {
		return failed("%q: %v", p.resource, err)
	}
	return passed("%s", p.resource)
}

func infoVersions(_ context.Context, p *plugin) verdict {
	versions := p.intro.info.GetSupportedVersions()
	if !slices.Contains(versions, v1beta1.Version) {
		return failed("versions %q", versions)
	}
	return passed("%q", versions)
}

func infoEndpoint(_ context.Context, p *plugin) verdict {
	endpoint := p.intro.info.GetEndpoint()
	switch {
	case endpoint == "":
		return passed("none: the plugin serves at its socket in the registry")
	case !filepath.IsAbs(endpoint):
		return failed("endpoint %q", endpoint)
	}
	return passed("%q", endpoint)
}

func notifyAnswered(_ context.Context, p *plugin) verdict {
	if p.intro.notifyErr != nil {
		return failed("%s", reason(p.intro.notifyErr, p.timeout))
	}
	return passed("an answer")
}

// infoAfterFailure notifies the plugin that the registration failed, and calls GetInfo again.
func infoAfterFailure(ctx context.Context, p *plugin) verdict {
	status := &pluginregistration.RegistrationStatus{Error: "conformance: the registration fails once"}
	if err := p.intro.notify(ctx, p.timeout, status); err != nil {
		return failed("%s", reason(err, p.timeout))
	}
	if _, err := p.intro.getInfo(ctx, p.timeout); err != nil {
		return failed("afterwards GetInfo: %s", reason(err, p.timeout))
	}
	return passed("an answer, and GetInfo is answered afterwards")
}

// registryAgain removes the registry with its content, makes it again after a short time, and searches for the plugins.
func registryAgain(ctx context.Context, s *session) verdict {
	resources := names(s.plugins)
	if len(resources) == 0 {
		return skipped("there was no plugin in the registry")
	}
	for _, p := range s.plugins {
		p.close()
	}
	gone := s.registry.dir + ".gone" // otherwise a fast plugin would make its socket again during the removal
	err := errors.Join(os.Rename(s.registry.dir, gone), os.RemoveAll(gone))
	select {
	case <-time.After(s.opts.Timeout / 20): // so that the plugin can notice the removal
	case <-ctx.Done():
	}
	if err := errors.Join(err, makeDir(s.registry.dir)); err != nil {
		return failed("%v", err)
	}
	list, ok := s.registry.find(ctx, s.command.done, resources)
	if !ok {
		for _, p := range list {
			p.close()
		}
		missing := slices.DeleteFunc(resources, func(name string) bool { return slices.Contains(names(list), name) })
		return failed("%s: no socket in the new registry within %s", strings.Join(missing, ", "), s.opts.Timeout)
	}
	s.plugins = list
	return passed("%s after %s", strings.Join(resources, ", "), s.registry.took)
}

// makeDir makes a directory that plugins of any user can search.
func makeDir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("make a directory for the plugin's socket: %w", err)
	}
	return os.Chmod(dir, 0o755) // whatever the umask
}
