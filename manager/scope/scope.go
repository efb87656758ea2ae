// Package scope puts a process into a transient scope of systemd, whose processes can open some device nodes only,
// until that is revoked.
package scope

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/systemd"
)

// Scope is a scope for a process.
type Scope struct {
	Name        string // of the unit, with .scope
	Description string
	PID         int
	PIDFD       *os.File // of the same process
	UID         int      // the user in whose slice the scope is, so that the limits of the user hold; 0 means none
	// Devices are all device nodes that the processes can open, besides those that systemd's policy "closed" allows:
	// terminals, and those that have no hardware, such as /dev/null.
	Devices []systemd.DeviceAllow
}

// interval is the time between two questions to systemd.
const interval = 5 * time.Millisecond

// Start makes a scope, and returns when the process is in it. systemd gets the process by its pidfd. systemd 254 and
// earlier know only PIDs: if the process has ended after that, another process with its PID may be in the scope, and
// all devices are allowed there again. If systemd does not run, the error wraps fs.ErrNotExist.
func Start(ctx context.Context, socket string, s Scope) error {
	ctx, cancel := context.WithTimeout(ctx, systemd.Timeout)
	defer cancel()
	conn, err := systemd.Dial(ctx, socket)
	if err != nil {
		return fmt.Errorf("start a scope: %w", err)
	}
	defer conn.Close()
	err = s.start(conn, s.PIDFD, systemd.Property{Name: "PIDFDs", Value: dbus.MakeVariant([]dbus.UnixFDIndex{0})})
	if answer, ok := errors.AsType[dbus.Error](err); ok && answer.Name == systemd.NoSuchProperty {
		if hasEnded(s.PIDFD) { // another process may have its PID
			return fmt.Errorf("start the scope %s: %w", s.Name, errEnded)
		}
		err = s.start(conn, nil, systemd.Property{Name: "PIDs", Value: dbus.MakeVariant([]uint32{uint32(s.PID)})})
	}
	if err == nil {
		err = awaitActive(ctx, conn, s.Name)
	}
	if err == nil && hasEnded(s.PIDFD) {
		all := []systemd.Property{
			{Name: "DevicePolicy", Value: dbus.MakeVariant("auto")},
			{Name: "DeviceAllow", Value: dbus.MakeVariant([]systemd.DeviceAllow{})},
		}
		err = errors.Join(errEnded, setProperties(conn, s.Name, all))
	}
	if err != nil {
		return fmt.Errorf("start the scope %s: %w", s.Name, err)
	}
	return nil
}

// start has systemd start the scope for a process.
func (s *Scope) start(conn *systemd.Conn, pidfd *os.File, process systemd.Property) error {
	type auxiliary struct {
		Name       string
		Properties []systemd.Property
	}
	var job dbus.ObjectPath
	// When the last scope of a user ends, systemd stops the user's slice. That job is replaced: with "fail" it would keep
	// a new scope from starting.
	return conn.CallWith(pidfd, systemd.Object, systemd.Manager+".StartTransientUnit",
		[]any{s.Name, "replace", append(s.properties(), process), []auxiliary{}}, &job)
}

// hasEnded reports whether a process, given by its pidfd, has ended.
func hasEnded(pidfd *os.File) bool {
	raw, err := pidfd.SyscallConn()
	if err != nil {
		return true
	}
	n := 0
	err = raw.Control(func(fd uintptr) {
		n, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	})
	return err != nil || n > 0
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
	err = setProperties(conn, name, none)
	if answer, ok := errors.AsType[dbus.Error](err); ok && answer.Name == systemd.NoSuchUnit {
		return nil
	}
	if err != nil {
		return fmt.Errorf("change the scope %s: %w", name, err)
	}
	return nil
}

// setProperties changes a scope until it ends.
func setProperties(conn *systemd.Conn, name string, list []systemd.Property) error {
	return conn.Call(systemd.Object, systemd.Manager+".SetUnitProperties", []any{name, true, list})
}

func (s *Scope) properties() []systemd.Property {
	list := []systemd.Property{
		{Name: "Description", Value: dbus.MakeVariant(s.Description)},
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
var errEnded = errors.New("the process has ended, or the scope is not active")

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
