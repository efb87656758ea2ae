package plugin

import (
	"time"

	"gpu-cdi-plugin/internal/exit"
)

// status is how the endpoint stands.
func (e *endpoint) status() Status {
	e.mu.Lock()
	s := e.public
	e.mu.Unlock()
	s.Resource = e.name
	l := e.server.list.Load()
	s.Devices, s.Healthy = len(l.devices), l.healthy
	if !s.Connected && s.Problem == "" {
		s.Problem = "not yet"
	}
	return s
}

// registered notes the end of an announcement.
func (e *endpoint) registered(o outcome) {
	e.attempt.cancel()
	e.attempt = nil
	e.life.ended(time.Now(), o)
	if o.err != nil {
		e.opts.Observer.Registered(e.name, o.err)
		e.problem(o.err)
		return
	}
	if !e.life.finds {
		e.accepted()
	}
}

// accepted notes that the kubelet took the registration.
func (e *endpoint) accepted() {
	e.opts.Observer.Registered(e.name, nil)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.public.Registrations++
	e.public.Problem = ""
	log := e.log.Info
	if e.logged != "" { // the kubelet does not read the list of what it registers: it takes each new try
		log = e.log.Debug
	}
	log(e.name+" is registered with the kubelet", "registrations", e.public.Registrations)
}

func (e *endpoint) connected() {
	e.mu.Lock()
	e.public.Connected, e.public.Problem, e.logged = true, "", ""
	e.mu.Unlock()
	e.opts.Observer.Connected(e.name, true)
	l := e.server.list.Load()
	e.log.Info("the kubelet watches "+e.name, "devices", len(l.devices), "healthy", l.healthy)
}

func (e *endpoint) disconnected(log func(string, ...any), why string) {
	e.mu.Lock()
	was := e.public.Connected
	e.public.Connected, e.public.Problem = false, why
	e.mu.Unlock()
	if was {
		e.opts.Observer.Connected(e.name, false)
		log(e.name + " is not connected to the kubelet any more: " + why)
	}
}

// problem notes why the kubelet does not have the resource. The same one is logged loudly once.
func (e *endpoint) problem(err error) {
	text := err.Error()
	message := e.name + " is not registered with the kubelet: " + text
	e.mu.Lock()
	e.public.Problem = text
	repeated := e.logged == text
	e.logged = text
	e.mu.Unlock()
	if repeated {
		e.log.Debug(message)
		return
	}
	if hint := exit.HintOf(err); hint != "" {
		message += "; " + hint
	}
	e.log.Warn(message)
}
