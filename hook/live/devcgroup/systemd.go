package devcgroup

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
)

// systemdTimeout limits all calls together. systemd answers in milliseconds, except while it reloads its units.
const systemdTimeout = 5 * time.Second

// Names of org.freedesktop.systemd1(5).
const (
	systemdName    = "org.freedesktop.systemd1"
	systemdObject  = "/org/freedesktop/systemd1"
	systemdManager = "org.freedesktop.systemd1.Manager"
	noSuchUnit     = "org.freedesktop.systemd1.NoSuchUnit"
	getProperty    = "org.freedesktop.DBus.Properties.Get"
)

// deviceAllow is an entry of a unit's DeviceAllow.
type deviceAllow struct{ Path, Access string }

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
	ctx, cancel := context.WithTimeout(ctx, systemdTimeout)
	defer cancel()
	s, err := dialSystemd(ctx, socket)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.Close()
	entries, err := s.entries(cgroup, rules)
	if err != nil || len(entries) == 0 {
		return err
	}
	type property struct {
		Name  string
		Value dbus.Variant
	}
	untilBoot, properties := true, []property{{"DeviceAllow", dbus.MakeVariant(entries)}}
	err = s.call(systemdObject, systemdManager+".SetUnitProperties", []any{scopeOf(cgroup), untilBoot, properties})
	if err != nil {
		return fmt.Errorf("set DeviceAllow: %w", err)
	}
	return nil
}

// systemd is a connection to the service manager through its private socket, which needs no message bus.
type systemd struct {
	net.Conn
	in     *bufio.Reader
	serial uint32 // of the last call
}

// dialSystemd connects to systemd. The context's deadline limits all calls.
func dialSystemd(ctx context.Context, socket string) (*systemd, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline) // it fails only on a closed connection
	s := &systemd{Conn: conn, in: bufio.NewReader(conn)}
	if err := s.authenticate(); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("connect to systemd at %s: %w", socket, err)
	}
	return s, nil
}

// authenticate authenticates by this process's user, which systemd gets from the kernel (the mechanism EXTERNAL).
//
// It writes the whole handshake at once, like systemd's own clients, and then waits for the answer: systemd does not
// notice a call that arrives together with BEGIN, and waits for more. The connections of godbus sometimes hang for
// this reason.
func (s *systemd) authenticate() error {
	user := hex.EncodeToString([]byte(strconv.Itoa(os.Geteuid())))
	if _, err := s.Write([]byte("\x00AUTH EXTERNAL " + user + "\r\nBEGIN\r\n")); err != nil {
		return err
	}
	answer, err := s.in.ReadSlice('\n')
	if err != nil {
		return err
	}
	if !bytes.HasPrefix(answer, []byte("OK ")) {
		return fmt.Errorf("authentication is refused: %q", answer)
	}
	return nil
}

// call calls a method of systemd and stores its results. If systemd refuses, the error is a dbus.Error.
func (s *systemd) call(object dbus.ObjectPath, method string, arguments []any, results ...any) error {
	dot := strings.LastIndexByte(method, '.')
	request := dbus.Message{
		Type: dbus.TypeMethodCall,
		Headers: map[dbus.HeaderField]dbus.Variant{
			dbus.FieldDestination: dbus.MakeVariant(systemdName),
			dbus.FieldPath:        dbus.MakeVariant(object),
			dbus.FieldInterface:   dbus.MakeVariant(method[:dot]),
			dbus.FieldMember:      dbus.MakeVariant(method[dot+1:]),
			dbus.FieldSignature:   dbus.MakeVariant(dbus.SignatureOf(arguments...)),
		},
		Body: arguments,
	}
	var out bytes.Buffer
	if err := request.EncodeTo(&out, binary.LittleEndian); err != nil {
		return err
	}
	s.serial++
	binary.LittleEndian.PutUint32(out.Bytes()[8:], s.serial) // godbus sets the serial number only in its connections
	if _, err := s.Write(out.Bytes()); err != nil {
		return err
	}
	for {
		reply, err := dbus.DecodeMessage(s.in)
		if err != nil {
			return err
		}
		if reply.Headers[dbus.FieldReplySerial].Value() != s.serial { // a signal
			continue
		}
		if reply.Type == dbus.TypeError {
			name, _ := reply.Headers[dbus.FieldErrorName].Value().(string)
			return dbus.Error{Name: name, Body: reply.Body}
		}
		return dbus.Store(reply.Body, results...)
	}
}

// entries returns the DeviceAllow entries that the scope of a cgroup needs for the devices.
func (s *systemd) entries(cgroup string, rules []Rule) ([]deviceAllow, error) {
	var scope dbus.ObjectPath
	err := s.call(systemdObject, systemdManager+".GetUnit", []any{scopeOf(cgroup)}, &scope)
	if reply := (dbus.Error{}); errors.As(err, &reply) && reply.Name == noSuchUnit {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the unit: %w", err)
	}
	var own, policy string
	var allowed []deviceAllow
	for _, property := range []struct {
		name  string
		value any
	}{{"ControlGroup", &own}, {"DevicePolicy", &policy}, {"DeviceAllow", &allowed}} {
		if err := s.call(scope, getProperty, []any{systemdName + ".Scope", property.name}, property.value); err != nil {
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
// access, since systemd replaces an entry with the same path. Like runc it names a device by its numbers. systemd 240
// and later parse the numbers from the name, even if no such link exists.
func extend(allowed []deviceAllow, rules []Rule) []deviceAllow {
	var entries []deviceAllow
	for _, r := range rules {
		directory := "char"
		if r.Type == 'b' {
			directory = "block"
		}
		entry := deviceAllow{fmt.Sprintf("/dev/%s/%d:%d", directory, r.Major, r.Minor), r.Access}
		for _, a := range allowed {
			if a.Path == entry.Path {
				entry.Access = union(a.Access, entry.Access)
			}
		}
		entries = append(entries, entry)
	}
	return entries
}
