package main

import (
	"context"
	"errors"
	"fmt"

	"gpu-cdi-plugin/control"
	"gpu-cdi-plugin/health"
)

// administrator does what administrators ask serve for.
type administrator struct {
	*service
}

var _ control.Handler = (*administrator)(nil)

// newControl returns the server of the control socket.
func (s *service) newControl() *control.Server {
	return &control.Server{Dir: s.app.plugin.RuntimeDir, Handler: &administrator{s}, Log: s.app.log}
}

// Handle implements control.Handler.
func (a *administrator) Handle(ctx context.Context, r control.Request, progress func(string)) (string, error) {
	d, title, err := a.find(r.Device)
	if err != nil {
		return "", err
	}
	switch r.Act {
	case control.Cordon:
		return fmt.Sprintf("%s (%s) is cordoned", title, d.UUID), a.node.Cordon(d.UUID, r.Reason)
	case control.Uncordon:
		return fmt.Sprintf("%s (%s) is uncordoned", title, d.UUID), a.node.Uncordon(d.UUID)
	default:
		return "", fmt.Errorf("serve does not know the act %q", r.Act)
	}
}

// find finds a device of the last snapshot by its UUID or index.
func (a *administrator) find(name string) (health.Device, string, error) {
	s := a.node.State().Snapshot
	if s == nil {
		return health.Device{}, "", errors.New("the GPUs have not been read yet")
	}
	return findDevice(s, name)
}
