package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"gpu-cdi-plugin/internal/wording"
)

// session is one run of the checks, on a plugin with one or several resources. It has the kubelet's side.
type session struct {
	opts Options
	// kubelet and registry are the two ways to register. One of them is set, or neither if Options.Socket is set.
	kubelet  *kubelet
	registry *registry
	command  *command // nil if there is no Options.Command
	own      string   // a temporary directory that is removed at the end, or empty

	plugins []*plugin // the current plugin of each resource, sorted by resource
	// before has the devices of each resource before the first restart of the kubelet. Before that restart it is nil.
	before map[string][]*v1beta1.Device
	// broken says why the plugin can no longer be checked.
	broken string
}

// verdict is the result of a check.
type verdict struct {
	outcome Outcome
	seen    string
}

func passed(format string, args ...any) verdict  { return saw(Pass, format, args...) }
func failed(format string, args ...any) verdict  { return saw(Fail, format, args...) }
func skipped(format string, args ...any) verdict { return saw(Skipped, format, args...) }

// Texts have parts that come from the plugin, which may have any length.
const (
	maxSeen   = 1000 // bytes of the text of a verdict
	maxQuoted = 250  // bytes of an error or a name in it
)

func saw(outcome Outcome, format string, args ...any) verdict {
	return verdict{outcome, wording.Shorten(fmt.Sprintf(format, args...), maxSeen)}
}

// check checks one rule.
type check func(context.Context, *session) verdict

// open starts the kubelet's side, and then the plugin.
func (s *session) open(ctx context.Context) error {
	if s.opts.Socket != "" {
		if _, err := os.Stat(s.opts.Socket); err != nil {
			return fmt.Errorf("find the socket of the plugin: %w", err)
		}
		p, err := connect("", s.opts.Socket, s.opts.Timeout)
		if err != nil {
			return err
		}
		s.plugins = []*plugin{p}
		p.open(ctx)
		return nil
	}
	dir := s.opts.KubeletDir
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "plugin-"); err != nil {
			return fmt.Errorf("make a directory for the plugin's socket: %w", err)
		}
		s.own = dir
		if err := os.Chmod(dir, 0o755); err != nil {
			return err
		}
	}
	if s.opts.usesRegistry() {
		// The registry is inside this directory, so that no other user can take its name while it is removed and made
		// again. The path is short, since paths of sockets have a limit.
		s.registry = &registry{dir: filepath.Join(dir, "reg"), timeout: s.opts.Timeout}
		if err := makeDir(s.registry.dir); err != nil {
			return err
		}
		return s.start(registryPlaceholder, s.registry.dir)
	}
	s.kubelet = &kubelet{dir: dir, timeout: s.opts.Timeout}
	if err := s.kubelet.prepare(); err != nil {
		return err
	}
	if err := s.kubelet.start(ctx); err != nil {
		return err
	}
	if len(s.opts.Command) == 0 {
		return nil
	}
	return s.start(dirPlaceholder, dir)
}

func (s *session) start(placeholder, dir string) (err error) {
	s.command, err = startCommand(s.opts.Command, placeholder, dir, s.opts.Output)
	return err
}

func (s *session) close() error {
	var err error
	if s.command != nil {
		s.command.kill()
	}
	if s.kubelet != nil {
		err = s.kubelet.stop()
	} else {
		for _, p := range s.plugins {
			p.close()
		}
	}
	if s.own != "" {
		err = errors.Join(err, os.RemoveAll(s.own))
	}
	return err
}

// apply checks a rule, and after that whether the plugin can be checked further.
func (s *session) apply(ctx context.Context, r Rule) verdict {
	if s.broken != "" {
		if r.ID == goesOn {
			return failed("%s", s.broken)
		}
		return skipped("%s", s.broken)
	}
	v := r.check(ctx, s)
	if s.command != nil && !strings.HasPrefix(r.ID, "end-") {
		// The connection may break before the process has ended.
		wait := time.Duration(0)
		if v.outcome == Fail {
			wait = s.opts.Timeout / 20
		}
		if state, ended := s.command.ended(wait); ended {
			s.broken = fmt.Sprintf("the plugin ended by itself (%s) while %s was checked", state, r.ID)
		}
	}
	return v
}

// each returns a check that runs for each resource of the plugin. The rule is broken if one resource breaks it. The
// function must not be inlined: the program would contain its code once for each rule, which takes 60 KB.
//
//go:noinline
func each(f func(context.Context, *session, *plugin) verdict) check {
	return func(ctx context.Context, s *session) verdict {
		if len(s.plugins) == 0 {
			return skipped("the plugin has not registered")
		}
		var verdicts []verdict
		for _, p := range s.plugins {
			v := f(ctx, s, p)
			if len(s.plugins) > 1 {
				v.seen = wording.Shorten(p.resource, maxQuoted) + ": " + v.seen
			}
			verdicts = append(verdicts, v)
		}
		return merge(verdicts)
	}
}

// merge combines verdicts. A failure counts more than a pass, and a pass more than a skip. The result has the outcome
// that counts most, and what all checks with that outcome have seen.
func merge(verdicts []verdict) verdict {
	for _, outcome := range []Outcome{Fail, Pass, Skipped} {
		var seen []string
		for _, v := range verdicts {
			if v.outcome == outcome {
				seen = append(seen, v.seen)
			}
		}
		if len(seen) > 0 {
			return verdict{outcome, strings.Join(seen, "; ")}
		}
	}
	return skipped("there was nothing to check")
}

// registering returns a check that needs calls of Register.
func registering(f check) check {
	return func(ctx context.Context, s *session) verdict {
		if s.registry != nil {
			return skipped("the plugin registers by a socket in the registry, and does not call Register")
		}
		if s.kubelet == nil {
			return skipped("the plugin was given by its socket: it registers with this host's kubelet, not here")
		}
		return f(ctx, s)
	}
}
