// Package scope puts a process into a transient scope of systemd, whose processes can open some device nodes only,
// until that is revoked.
package scope

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/godbus/dbus/v5"

	"gpu-cdi-plugin/internal/systemd"
)

// Scope is a scope for a process.
type Scope struct {
	Name        string // of the unit, with .scope
	Description string
	PID         int
	UID         int // the user in whose slice the scope is, so that the limits of the user hold; 0 means none
	// Devices are all device nodes that the processes can open, besides those that systemd's policy "closed" allows:
	// terminals, and those that have no hardware, such as /dev/null.
	Devices []systemd.DeviceAllow
}

// interval is the time between two questions to systemd.
const interval = 5 * time.Millisecond

// Start makes a scope, and returns when the process is in it. If systemd does not run, the error wraps fs.ErrNotExist.
func Start(ctx context.Context, socket string, s Scope) error {
	ctx, cancel := context.WithTimeout(ctx, systemd.Timeout)
	defer cancel()
	conn, err := systemd.Dial(ctx, socket)
	if err != nil {
		return fmt.Errorf("start a scope: %w", err)
	}
	defer conn.Close()
	type auxiliary struct {
		Name       string
		Properties []systemd.Property
	}
	var job dbus.ObjectPath
	err = conn.Call(systemd.Object, systemd.Manager+".StartTransientUnit",
		[]any{s.Name, "fail", s.properties(), []auxiliary{}}, &job)
	if err != nil {
		return fmt.Errorf("start the scope %s: %w", s.Name, err)
	}
	if err := awaitActive(ctx, conn, s.Name); err != nil {
		return fmt.Errorf("start the scope %s: %w", s.Name, err)
	}
	return nil
}

// Revoke has the processes of a scope open no devices any more but those of the policy "closed". What they have open
// stays open. A scope that has ended is no error.
func Revoke(ctx context.Context, socket, name string) error {
	ctx, cancel := context.WithTimeout(ctx, systemd.Timeout)
	defer cancel()
	conn, err := systemd.Dial(ctx, socket)
	if err != nil {
		return fmt.Errorf("change the scope %s: %w", name, err)
	}
	defer conn.Close()
	none := []systemd.Property{{Name: "DeviceAllow", Value: dbus.MakeVariant([]systemd.DeviceAllow{})}}
	err = conn.Call(systemd.Object, systemd.Manager+".SetUnitProperties", []any{name, true, none})
	if answer, ok := errors.AsType[dbus.Error](err); ok && answer.Name == systemd.NoSuchUnit {
		return nil
	}
	if err != nil {
		return fmt.Errorf("change the scope %s: %w", name, err)
	}
	return nil
}

func (s *Scope) properties() []systemd.Property {
	list := []systemd.Property{
		{Name: "Description", Value: dbus.MakeVariant(s.Description)},
		{Name: "PIDs", Value: dbus.MakeVariant([]uint32{uint32(s.PID)})},
		{Name: "DevicePolicy", Value: dbus.MakeVariant("closed")},
		{Name: "DeviceAllow", Value: dbus.MakeVariant(s.Devices)},
		{Name: "CollectMode", Value: dbus.MakeVariant("inactive-or-failed")}, // it is not kept after its end
	}
	if s.UID != 0 {
		list = append(list, systemd.Property{Name: "Slice", Value: dbus.MakeVariant(fmt.Sprintf("user-%d.slice", s.UID))})
	}
	return list
}

// errEnded means that a scope did not start, or ended at once.
var errEnded = errors.New("it is not active: the process may have ended")

// awaitActive waits until a scope is active. systemd answers a start before that.
func awaitActive(ctx context.Context, conn *systemd.Conn, name string) error {
	var unit dbus.ObjectPath
	for {
		if err := conn.Call(systemd.Object, systemd.Manager+".GetUnit", []any{name}, &unit); err != nil {
			return err
		}
		var state string
		err := conn.Call(unit, systemd.GetProperty, []any{systemd.Name + ".Unit", "ActiveState"}, &state)
		switch {
		case err != nil:
			return err
		case state == "active":
			return nil
		case state != "activating" && state != "inactive":
			return fmt.Errorf("%w (%s)", errEnded, state)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%s)", errEnded, state)
		case <-time.After(interval):
		}
	}
}
