package endpoint

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"gpu-cdi-plugin/manager/model"
)

const (
	// MaxResources is the largest number of resources of a registry.
	MaxResources = 256
	maxInstances = 16 // per resource
)

var errClosed = errors.New("the device manager is stopping")

// resource is a resource with the instances of its plugin.
type resource struct {
	name string
	// order is held while the resource is changed and the callback for the change runs, so that callbacks are in
	// order.
	order sync.Mutex

	// Guarded by the registry's mutex.
	instances []*Endpoint // with open streams, in the order of their registrations
	last      *Endpoint   // the instance that ended last
	shown     model.Resource
	// advertised is set when a list has arrived, or a stream has ended without one. A kubelet does not know a resource
	// earlier either.
	advertised bool
	lost       time.Time // when the last instance ended
	expiry     *time.Timer
}

// knownResource returns a resource whose plugin has not registered since the restart.
func (r *Registry) knownResource(name string) *resource {
	res := &resource{name: name, last: stopped(name), shown: model.Resource{Name: name}, advertised: true}
	r.startGrace(res)
	return res
}

// current returns the newest instance that has sent a list; if there is none, the newest instance; and if there is
// none, the one that ended last.
func (res *resource) current() *Endpoint {
	for _, e := range slices.Backward(res.instances) {
		if e.listed {
			return e
		}
	}
	if n := len(res.instances); n > 0 {
		return res.instances[n-1]
	}
	return res.last
}

// close closes all instances and stops the timer of the grace period.
func (res *resource) close() {
	for _, e := range res.instances {
		e.close()
	}
	res.instances = nil
	if res.expiry != nil {
		res.expiry.Stop()
	}
}

// refresh computes the published state of the resource and reports whether it has changed. If the only instance has
// not sent a list yet, the earlier devices stay: otherwise their number would drop to 0 while a plugin restarts.
func (res *resource) refresh() bool {
	e := res.current()
	next := model.Resource{Name: res.name, Devices: res.shown.Devices, Connected: len(res.instances) > 0}
	switch {
	case !next.Connected:
		next.Devices = unhealthy(next.Devices)
	case e.listed:
		next.Devices = e.devices
	case !res.advertised:
		return false
	}
	changed := !res.advertised || next.Connected != res.shown.Connected || !equal(next.Devices, res.shown.Devices)
	res.shown, res.advertised = next, true
	return changed
}

// change changes a resource with the function f, and calls OnChange if the published state has changed. After Close it
// does nothing.
func (r *Registry) change(res *resource, f func()) {
	res.order.Lock()
	defer res.order.Unlock()
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return
	}
	f()
	changed, shown := res.refresh(), res.shown
	r.mu.Unlock()
	if changed && r.opts.OnChange != nil {
		r.opts.OnChange(shown)
	}
}

// adopt adds a connected plugin to the instances of its resource, and opens its stream.
func (r *Registry) adopt(e *Endpoint) error {
	for {
		res, err := r.find(e.resource)
		if err != nil {
			return err
		}
		err = errClosed
		expired := false
		r.change(res, func() {
			if expired = r.resources[e.resource] != res; !expired {
				err = r.add(res, e)
			}
		})
		if !expired {
			return err
		}
	}
}

// find returns a resource. If the resource does not exist, find creates it.
func (r *Registry) find(name string) (*resource, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	res := r.resources[name]
	if res == nil {
		if len(r.resources) >= MaxResources {
			return nil, fmt.Errorf("there are %d resources already, and no more are accepted", MaxResources)
		}
		res = &resource{name: name}
		r.resources[name] = res
	}
	return res, nil
}

// add adds an instance to a resource.
func (r *Registry) add(res *resource, e *Endpoint) error {
	twin := slices.IndexFunc(res.instances, func(i *Endpoint) bool { return i.socket == e.socket })
	switch {
	case twin >= 0:
		// The plugin was restarted, or registers twice. Its new stream replaces the old one.
		res.instances[twin].close()
		res.instances = slices.Delete(res.instances, twin, twin+1)
	case len(res.instances) >= maxInstances:
		return fmt.Errorf("%s has %d device plugins already, and no more are accepted", res.name, maxInstances)
	}
	if res.expiry != nil {
		res.expiry.Stop()
	}
	res.instances = append(res.instances, e)
	r.running.Go(func() { r.watch(res, e) })
	return nil
}

// watch receives lists until the stream ends, then removes the instance.
func (r *Registry) watch(res *resource, e *Endpoint) {
	err := e.watch(func(devices []model.Device) {
		r.change(res, func() { e.devices, e.listed = devices, true })
	})
	r.change(res, func() { r.end(res, e) })
	if r.ctx.Err() == nil {
		e.log.Warn("the device plugin is gone: its ListAndWatch stream has ended", "error", err)
	}
}

// end removes an instance whose stream has ended.
func (r *Registry) end(res *resource, e *Endpoint) {
	i := slices.Index(res.instances, e)
	if i < 0 {
		return
	}
	e.close()
	res.instances = slices.Delete(res.instances, i, i+1)
	if len(res.instances) == 0 {
		res.last = e
		r.startGrace(res)
	}
}

// startGrace removes the resource after the grace period, unless a plugin registers before that.
func (r *Registry) startGrace(res *resource) {
	res.lost = time.Now()
	res.expiry = time.AfterFunc(r.opts.Deadlines.Grace, func() { r.expire(res) })
}

// expire removes a resource that has no plugin. The resource stays in the map until OnGone has returned. If a plugin
// registers meanwhile, it waits for that.
func (r *Registry) expire(res *resource) {
	res.order.Lock()
	defer res.order.Unlock()
	r.mu.Lock()
	expired := !r.closed && len(res.instances) == 0 && time.Since(res.lost) >= r.opts.Deadlines.Grace
	r.mu.Unlock()
	if !expired {
		return
	}
	r.opts.Log.Info("no device plugin has registered the resource again: it is removed", "resource", res.name)
	if r.opts.OnGone != nil {
		r.opts.OnGone(res.name)
	}
	r.mu.Lock()
	delete(r.resources, res.name)
	r.mu.Unlock()
}
