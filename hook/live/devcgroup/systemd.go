package devcgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/godbus/dbus/v5"

	"gpu-cdi-plugin/internal/systemd"
)

// scopeOf returns the name of a cgroup if it is that of a systemd scope, and otherwise "".
func scopeOf(cgroup string) string {
	if name := path.Base(cgroup); strings.HasSuffix(name, ".scope") {
		return name
	}
	return ""
}

// allowInScope adds the devices to the systemd scope of a cgroup. systemd writes the scope's list to the cgroup at
// once, and again at each daemon-reload. allowInScope does nothing if systemd does not run or does not know the scope.
// Programs other than systemd may use such a name for a cgroup, so it also does nothing if the scope's cgroup is
// another one.
func allowInScope(ctx context.Context, socket, cgroup string, rules []Rule) error {
	ctx, cancel := context.WithTimeout(ctx, systemd.Timeout)
	defer cancel()
	s, err := systemd.Dial(ctx, socket)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.Close()
	entries, err := entries(s, cgroup, rules)
	if err != nil || len(entries) == 0 {
		return err
	}
	untilBoot, properties := true, []systemd.Property{{Name: "DeviceAllow", Value: dbus.MakeVariant(entries)}}
	err = s.Call(systemd.Object, systemd.Manager+".SetUnitProperties", []any{scopeOf(cgroup), untilBoot, properties})
	if err != nil {
		return fmt.Errorf("set DeviceAllow: %w", err)
	}
	return nil
}

// entries returns the DeviceAllow entries that the scope of a cgroup needs for the devices.
func entries(s *systemd.Conn, cgroup string, rules []Rule) ([]systemd.DeviceAllow, error) {
	var scope dbus.ObjectPath
	err := s.Call(systemd.Object, systemd.Manager+".GetUnit", []any{scopeOf(cgroup)}, &scope)
	if reply := (dbus.Error{}); errors.As(err, &reply) && reply.Name == systemd.NoSuchUnit {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the unit: %w", err)
	}
	var own, policy string
	var allowed []systemd.DeviceAllow
	for _, property := range []struct {
		name  string
		value any
	}{{"ControlGroup", &own}, {"DevicePolicy", &policy}, {"DeviceAllow", &allowed}} {
		arguments := []any{systemd.Name + ".Scope", property.name}
		if err := s.Call(scope, systemd.GetProperty, arguments, property.value); err != nil {
			return nil, fmt.Errorf("read the unit's %s: %w", property.name, err)
		}
	}
	// With the policy "auto" and no list, the unit may use all devices. An entry would remove access to all others.
	if own != cgroup || policy == "auto" && len(allowed) == 0 {
		return nil, nil
	}
	return extend(allowed, rules), nil
}

// extend returns the entries for the rules. If the unit has access to the same device already, the entry includes that
// access, since systemd replaces an entry with the same path.
func extend(allowed []systemd.DeviceAllow, rules []Rule) []systemd.DeviceAllow {
	var entries []systemd.DeviceAllow
	for _, r := range rules {
		entry := systemd.DeviceAllow{Path: systemd.DevicePath(r.Type, r.Major, r.Minor), Access: r.Access}
		for _, a := range allowed {
			if a.Path == entry.Path {
				entry.Access = union(a.Access, entry.Access)
			}
		}
		entries = append(entries, entry)
	}
	return entries
}
