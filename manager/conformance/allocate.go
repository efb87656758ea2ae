package conformance

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"google.golang.org/protobuf/proto"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"tags.cncf.io/container-device-interface/pkg/parser"
)

const (
	// unknownID is the ID of a device that no plugin has.
	unknownID = "conformance-no-such-device"
	// maxSingle is the largest number of devices that are allocated one at a time.
	maxSingle = 256
	// parallel is the number of concurrent calls.
	parallel = 64
)

// answer is a plugin's response to Allocate for one container.
type answer struct {
	ids  []string
	edit *v1beta1.ContainerAllocateResponse
}

// allocate calls Allocate with one container for each set of device IDs.
func (p *plugin) allocate(ctx context.Context, containers ...[]string) (*v1beta1.AllocateResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	request := &v1beta1.AllocateRequest{}
	for _, ids := range containers {
		request.ContainerRequests = append(request.ContainerRequests,
			&v1beta1.ContainerAllocateRequest{DevicesIds: ids})
	}
	return p.client.Allocate(ctx, request)
}

// allocating returns a check that needs a plugin with healthy devices.
func allocating(f func(context.Context, *plugin, []string) verdict) check {
	return each(func(ctx context.Context, _ *session, p *plugin) verdict {
		healthy := p.healthy()
		if len(healthy) == 0 {
			return skipped("the plugin has no healthy device")
		}
		return f(ctx, p, healthy)
	})
}

// keep stores the responses of a call, whose contents are checked later.
func (p *plugin) keep(r *v1beta1.AllocateResponse, ids []string) {
	for _, c := range r.GetContainerResponses() {
		p.answers = append(p.answers, answer{ids, c})
	}
}

func allocateEach(ctx context.Context, p *plugin, healthy []string) verdict {
	single := healthy[:min(len(healthy), maxSingle)]
	var broken []string
	for _, id := range single {
		response, err := p.allocate(ctx, []string{id})
		if err != nil {
			broken = append(broken, fmt.Sprintf("%q: %s", id, reason(err, p.timeout)))
			if hung(err) || crashed(err) {
				break
			}
		}
		p.keep(response, []string{id})
	}
	return passedUnless(broken, "%d of %d healthy devices", len(single), len(healthy))
}

func allocateAll(ctx context.Context, p *plugin, healthy []string) verdict {
	response, err := p.allocate(ctx, healthy)
	if err != nil {
		return failed("%d devices: %s", len(healthy), reason(err, p.timeout))
	}
	p.keep(response, healthy)
	return passed("%d devices", len(healthy))
}

func allocateCount(ctx context.Context, p *plugin, healthy []string) verdict {
	requests := [][][]string{{healthy[:1]}}
	if len(healthy) > 1 {
		requests = append(requests, [][]string{healthy[:1], healthy[1:]})
	}
	for _, request := range requests {
		response, err := p.allocate(ctx, request...)
		if err != nil {
			return failed("%d containers in a request: %s", len(request), reason(err, p.timeout))
		}
		if n := len(response.GetContainerResponses()); n != len(request) {
			return failed("%d answers to a request with %d containers", n, len(request))
		}
	}
	if len(requests) == 1 {
		return passed("one container in a request; the plugin has no devices for two")
	}
	return passed("one and two containers in a request")
}

func allocateUnknown(ctx context.Context, p *plugin, healthy []string) verdict {
	for _, ids := range [][]string{{unknownID}, {healthy[0], unknownID}} {
		_, err := p.allocate(ctx, ids)
		switch {
		case err == nil:
			return failed("%q was answered without an error", ids)
		case hung(err) || crashed(err):
			return failed("%q: %s", ids, reason(err, p.timeout))
		}
	}
	if err := p.answering(ctx); err != nil {
		return failed("%v", err)
	}
	return passed("an error, and the plugin keeps running")
}

func allocateUnhealthy(ctx context.Context, _ *session, p *plugin) verdict {
	unhealthy := p.withHealth(false)
	if len(unhealthy) == 0 {
		return skipped("the plugin has no unhealthy device")
	}
	_, err := p.allocate(ctx, unhealthy[:1])
	switch {
	case err == nil:
		return failed("%q was answered without an error", unhealthy[0])
	case hung(err) || crashed(err):
		return failed("%q: %s", unhealthy[0], reason(err, p.timeout))
	}
	return passed("%s", reason(err, p.timeout))
}

func allocateEmpty(ctx context.Context, _ *session, p *plugin) verdict {
	for _, containers := range [][][]string{{}, {{}}} {
		response, err := p.allocate(ctx, containers...)
		switch {
		case hung(err) || crashed(err):
			return failed("%d containers without devices: %s", len(containers), reason(err, p.timeout))
		case err == nil && len(response.GetContainerResponses()) != len(containers):
			return failed("%d answers to a request with %d containers without devices",
				len(response.GetContainerResponses()), len(containers))
		}
	}
	if err := p.answering(ctx); err != nil {
		return failed("%v", err)
	}
	return passed("an answer or an error, and the plugin keeps running")
}

func allocateTwice(ctx context.Context, p *plugin, healthy []string) verdict {
	id := healthy[0]
	twice, err := p.allocate(ctx, []string{id, id})
	if hung(err) || crashed(err) {
		return failed("%q twice: %s", id, reason(err, p.timeout))
	}
	if err != nil {
		return passed("%s", reason(err, p.timeout))
	}
	once, err := p.allocate(ctx, []string{id})
	if err != nil {
		return skipped("%q alone: %s", id, reason(err, p.timeout))
	}
	nodes := func(r *v1beta1.AllocateResponse) int {
		n := 0
		for _, c := range r.GetContainerResponses() {
			n += len(c.GetDevices()) + len(c.GetMounts()) + len(c.GetCdiDevices())
		}
		return n
	}
	if nodes(twice) > nodes(once) {
		return failed(
			"%q twice gives %d device nodes, mounts and CDI devices, and once gives %d",
			id,
			nodes(twice),
			nodes(once),
		)
	}
	return passed("the same as once")
}

func allocateSame(ctx context.Context, p *plugin, healthy []string) verdict {
	first, err := p.allocate(ctx, healthy)
	if err != nil {
		return skipped("%s", reason(err, p.timeout))
	}
	second, err := p.allocate(ctx, healthy)
	switch {
	case err != nil:
		return failed("the second time %s", reason(err, p.timeout))
	case !proto.Equal(first, second):
		return failed("two answers differ for %d devices", len(healthy))
	}
	return passed("two answers for %d devices are equal", len(healthy))
}

func allocateConcurrently(ctx context.Context, p *plugin, healthy []string) verdict {
	errs := make([]error, parallel)
	var calls sync.WaitGroup
	for i := range parallel {
		calls.Go(func() { _, errs[i] = p.allocate(ctx, []string{healthy[i%len(healthy)]}) })
	}
	calls.Wait()
	var broken []string
	for _, err := range errs {
		if err != nil {
			broken = append(broken, reason(err, p.timeout))
		}
	}
	if len(broken) > 0 {
		return failed("%d of %d calls at a time: %s", len(broken), parallel, broken[0])
	}
	return passed("%d calls at a time", parallel)
}

// answered returns a check of the stored Allocate responses, one container at a time. The function f returns what
// breaks the rule, and how many items it has checked.
func answered(what string, f func(*session, *v1beta1.ContainerAllocateResponse) (broken []string, n int)) check {
	return each(func(_ context.Context, s *session, p *plugin) verdict {
		if len(p.answers) == 0 {
			return skipped("no Allocate call was answered")
		}
		var broken []string
		total := 0
		for _, a := range p.answers {
			b, n := f(s, a.edit)
			broken = append(broken, b...)
			total += n
		}
		if total == 0 {
			return skipped("the answers have no %s", what)
		}
		slices.Sort(broken)
		return passedUnless(slices.Compact(broken), "%d %s in %d answers", total, what, len(p.answers))
	})
}

func cdiNames(_ *session, r *v1beta1.ContainerAllocateResponse) (broken []string, n int) {
	for _, d := range r.GetCdiDevices() {
		if _, _, _, err := parser.ParseQualifiedName(d.GetName()); err != nil {
			broken = append(broken, fmt.Sprintf("%q: %v", d.GetName(), err))
		}
	}
	return broken, len(r.GetCdiDevices())
}

func mountPaths(_ *session, r *v1beta1.ContainerAllocateResponse) (broken []string, n int) {
	for _, m := range r.GetMounts() {
		for _, path := range []string{m.GetHostPath(), m.GetContainerPath()} {
			if !filepath.IsAbs(path) {
				broken = append(broken, fmt.Sprintf("%q", path))
			}
		}
	}
	return broken, len(r.GetMounts())
}

func nodePaths(_ *session, r *v1beta1.ContainerAllocateResponse) (broken []string, n int) {
	for _, d := range r.GetDevices() {
		for _, path := range []string{d.GetHostPath(), d.GetContainerPath()} {
			if !filepath.IsAbs(path) {
				broken = append(broken, fmt.Sprintf("%q", path))
			}
		}
	}
	return broken, len(r.GetDevices())
}

// nodesExist checks that the host paths in a response exist below the host's root. Links are followed only inside that
// root.
func nodesExist(s *session, r *v1beta1.ContainerAllocateResponse) (broken []string, n int) {
	root, err := os.OpenRoot("/" + strings.TrimPrefix(s.opts.Root, "/"))
	if err != nil {
		return []string{err.Error()}, len(r.GetDevices())
	}
	defer root.Close()
	for _, d := range r.GetDevices() {
		path := strings.TrimLeft(d.GetHostPath(), "/")
		info, err := root.Stat(path)
		switch {
		case !filepath.IsAbs(d.GetHostPath()):
			continue // nodePaths reports it
		case errors.Is(err, fs.ErrNotExist):
			broken = append(broken, d.GetHostPath()+" does not exist")
		case err != nil:
			broken = append(broken, err.Error())
		case info.Mode()&fs.ModeDevice == 0 && !info.IsDir(): // a directory stands for the device nodes in it
			broken = append(broken, d.GetHostPath()+" is not a device node")
		}
	}
	return broken, len(r.GetDevices())
}

func permissions(_ *session, r *v1beta1.ContainerAllocateResponse) (broken []string, n int) {
	for _, d := range r.GetDevices() {
		if p := d.GetPermissions(); p == "" || strings.Trim(p, "rwm") != "" {
			broken = append(broken, fmt.Sprintf("%s has %q", d.GetHostPath(), p))
		}
	}
	return broken, len(r.GetDevices())
}

func environment(_ *session, r *v1beta1.ContainerAllocateResponse) (broken []string, n int) {
	for name, value := range r.GetEnvs() {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.Contains(value, "\x00") {
			broken = append(broken, fmt.Sprintf("%q", name))
		}
	}
	return broken, len(r.GetEnvs())
}
