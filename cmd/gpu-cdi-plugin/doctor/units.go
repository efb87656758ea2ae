package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/godbus/dbus/v5"

	"gpu-cdi-plugin/internal/systemd"
	"gpu-cdi-plugin/internal/wording"
)

// unit is a unit of systemd that this product installs.
type unit struct {
	name string
	// installed says that the host has its file, and enabled that it starts at a boot.
	installed, enabled bool
	// blocked is the path that keeps the unit from starting, by a condition in its file, or empty. unless says that it may
	// not exist.
	blocked string
	unless  bool
	// active and sub are its states, such as "activating" and "auto-restart", and result says how it ended. They are empty
	// if systemd was not asked.
	active, sub, result string
	restarts            uint32
}

// watchingUnits write our spec at each boot, and otherUnits are the others of this product.
var (
	watchingUnits = []string{"gpu-cdi-watch.service", "gpu-cdi-plugin.service"}
	otherUnits    = []string{"device-manager.service", "device-manager.socket", "device-manager-leases.socket"}
)

// managerFile is the configuration of device-manager.
const managerFile = "/etc/device-manager/config.yaml"

// configFacts is a configuration file of this product, and what is wrong with it.
type configFacts struct {
	path string
	err  error
}

func (f *facts) readUnits(ctx context.Context) {
	for _, name := range slices.Concat(watchingUnits, otherUnits) {
		u := unit{name: name, enabled: f.isEnabled(name)}
		if file := f.firstOf(unitDirs, name); file != "" {
			u.installed = true
			u.blocked, u.unless = f.conditionOf(f.read(file))
		}
		f.units = append(f.units, u)
	}
	if slices.ContainsFunc(f.units, func(u unit) bool { return u.installed }) {
		f.askSystemd(ctx)
	}
	own := configFacts{f.ConfigFile, f.ConfigErr}
	if own.path == "" {
		own = f.readConfig(ownDir+"/config.yaml", f.CheckConfig)
	}
	f.configs = []configFacts{own, f.readConfig(managerFile, f.CheckManagerConfig)}
}

func (f *facts) readConfig(name string, check func([]byte) error) configFacts {
	c := configFacts{path: name}
	if data := f.read(name); data != nil {
		c.err = check(data)
	}
	return c
}

// conditionOf returns the path of the first condition in the file of a unit that does not hold.
func (f *facts) conditionOf(file []byte) (blocked string, unless bool) {
	for line := range strings.Lines(string(file)) {
		value, ok := strings.CutPrefix(strings.TrimSpace(line), "ConditionPathExists=")
		name, unless := strings.CutPrefix(value, "!")
		if ok && path.IsAbs(name) && f.exists(name) == unless {
			return name, unless
		}
	}
	return "", false
}

// askSystemd reads the states of the units. Without systemd, or without the right to ask it, they stay unknown.
func (f *facts) askSystemd(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, systemd.Timeout)
	defer cancel()
	conn, err := systemd.Dial(ctx, f.Systemd)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			f.unread("systemd", err)
		}
		return
	}
	defer conn.Close()
	for i := range f.units {
		u := &f.units[i]
		if !u.installed {
			continue
		}
		if err := u.ask(conn); err != nil {
			f.unread(u.name, err)
			return
		}
	}
}

func (u *unit) ask(conn *systemd.Conn) error {
	var object dbus.ObjectPath
	if err := conn.Call(systemd.Object, systemd.Manager+".LoadUnit", []any{u.name}, &object); err != nil {
		return err
	}
	get := func(kind, property string, into any) error {
		var value dbus.Variant
		if err := conn.Call(object, systemd.GetProperty, []any{systemd.Name + kind, property}, &value); err != nil {
			return err
		}
		return dbus.Store([]any{value.Value()}, into)
	}
	kind := "." + strings.ToUpper(path.Ext(u.name)[1:2]) + path.Ext(u.name)[2:] // .Service or .Socket
	err := errors.Join(get(".Unit", "ActiveState", &u.active), get(".Unit", "SubState", &u.sub),
		get(kind, "Result", &u.result))
	if kind == ".Service" {
		err = errors.Join(err, get(kind, "NRestarts", &u.restarts))
	}
	return err
}

// watches reports whether a unit should run since the last boot and keep our spec up to date. device-manager.service
// does so too, but only after a first request.
func (u *unit) watches() bool {
	return u.enabled && u.blocked == "" && slices.Contains(watchingUnits, u.name)
}

// fails reports whether a unit has failed or is started again and again.
func (u *unit) fails() bool {
	return u.active == "failed" || u.sub == "auto-restart" || u.sub == "auto-restart-queued"
}

func checkUnits(f *facts) []Finding {
	var list []Finding
	for _, c := range f.configs {
		if c.err != nil {
			list = append(list, newFinding("config-file", c.path, wording.OneLine(c.err)).fixed(
				"correct the file "+wording.Quote(c.path)+", then restart what reads it; config default prints all keys"))
		}
	}
	var blocked []string
	dir, active := "", false
	for i := range f.units {
		u := &f.units[i]
		isService := path.Ext(u.name) == ".service" // each of them writes the spec in the place of the others
		active = active || isService && (u.active == "active" || u.active == "activating")
		if u.unless && u.enabled {
			blocked, dir = append(blocked, u.name), u.blocked
		}
		if u.fails() {
			problem := fmt.Sprintf("systemd reports %s (%s, result %s), after %s", u.active, u.sub, u.result,
				wording.Count(int(u.restarts), "restart"))
			list = append(list, newFinding("service-failed", u.name, problem).fixed(whyItFails(u.name)))
		}
	}
	if blocked != nil && !f.kubelet.present {
		remove := "rmdir "
		if entries, err := os.ReadDir(f.at(dir)); err == nil && len(entries) > 0 {
			remove = "if no kubelet comes back, whose pods these are: rm -r "
		}
		problem := "no kubelet is here, and while it exists these units do not start: " + strings.Join(blocked, ", ")
		list = append(list, newFinding("kubelet-dir", dir, problem).fixed(remove+
			wording.Quote(filepath.Join(f.Host.Root(), dir))+" && systemctl start "+strings.Join(blocked, " ")))
	}
	for i := range f.units {
		if u := &f.units[i]; u.watches() && u.active == "inactive" && !active {
			list = append(list, newFinding("service-stopped", u.name, "it is enabled, and does not run"))
		}
	}
	return list
}

// whyItFails returns what to do about a unit that fails.
func whyItFails(name string) string {
	return "journalctl --lines=20 --unit=" + name + " has the reason; then: systemctl restart " + name
}

// failing returns the name of a unit that should write our spec and fails, or "".
func (f *facts) failing() string {
	for i := range f.units {
		if u := &f.units[i]; u.fails() {
			return u.name
		}
	}
	return ""
}
