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
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
)

// systemdTimeout bounds all calls together. systemd answers in milliseconds, but not while it reloads its units.
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

// unitOf returns the unit that a cgroup is named after, or "".
func unitOf(cgroup string) string {
	if name := path.Base(cgroup); strings.HasSuffix(name, ".scope") || strings.HasSuffix(name, ".service") {
		return name
	}
	return ""
}

// allowInUnit adds the devices to the unit of a cgroup. systemd writes the unit's list to the cgroup at once, and again
// at each daemon-reload. Nothing is done if systemd does not run, does not know the unit, or has another cgroup for it:
// other programs may give cgroups such names.
func (c *Change) allowInUnit(ctx context.Context, host Host, cgroup string, rules []Rule) error {
	ctx, cancel := context.WithTimeout(ctx, systemdTimeout)
	defer cancel()
	s, err := dialSystemd(ctx, host.Systemd)
	if errors.Is(err, fs.ErrNotExist) {
		c.noteMissingSocket(host.Systemd, cgroup)
		return nil
	}
	if err != nil {
		return err
	}
	defer s.Close()
	missing, err := s.missing(cgroup, rules)
	if err != nil || len(missing) == 0 {
		return err
	}
	type property struct {
		Name  string
		Value dbus.Variant
	}
	untilBoot, properties := true, []property{{"DeviceAllow", dbus.MakeVariant(missing)}}
	err = s.call(systemdObject, systemdManager+".SetUnitProperties", []any{unitOf(cgroup), untilBoot, properties})
	if err != nil {
		return fmt.Errorf("set DeviceAllow: %w", err)
	}
	return c.noteMissingLinks(s, host.Dev, missing)
}

// noteMissingSocket notes that systemd runs nevertheless, by the directory that sd_booted(3) looks for.
func (c *Change) noteMissingSocket(socket, cgroup string) {
	if _, err := os.Stat(filepath.Join(filepath.Dir(socket), "system")); err == nil {
		c.Notes = append(c.Notes, fmt.Sprintf("systemd runs, but not at %s: if it manages cgroup %s, the next "+
			"`systemctl daemon-reload` takes the devices from the container", socket, cgroup))
	}
}

// systemd is a connection to the service manager by its own socket, which needs no message bus.
type systemd struct {
	net.Conn
	in     *bufio.Reader
	serial uint32 // of the last call
}

// dialSystemd connects to systemd. The context's deadline is that of all calls.
func dialSystemd(ctx context.Context, socket string) (*systemd, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	s := &systemd{Conn: conn, in: bufio.NewReader(conn)}
	err = conn.SetDeadline(deadline)
	if err == nil {
		err = checkPeer(conn.(*net.UnixConn))
	}
	if err == nil {
		err = s.authenticate()
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("connect to systemd at %s: %w", socket, err)
	}
	return s, nil
}

// authenticate asks systemd to take this process' user from the kernel (the mechanism EXTERNAL).
//
// All is written at once, as systemd's own clients do, and nothing else before the answer. systemd does not notice a
// call that it reads together with BEGIN: it waits for more. The connections of godbus run into this now and then.
func (s *systemd) authenticate() error {
	user := hex.EncodeToString([]byte(strconv.Itoa(os.Geteuid())))
	if _, err := s.Write([]byte("\x00AUTH EXTERNAL " + user + "\r\nBEGIN\r\n")); err != nil {
		return err
	}
	answer, err := s.in.ReadSlice('\n')
	if err == nil && !bytes.HasPrefix(answer, []byte("OK ")) {
		err = fmt.Errorf("authentication is refused: %q", answer)
	}
	return err
}

// checkPeer returns an error unless root listens at the other end.
func checkPeer(conn *net.UnixConn) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var peerErr error
	if err := raw.Control(func(fd uintptr) {
		peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return err
	}
	if peerErr != nil {
		return peerErr
	}
	if peer.Uid != 0 {
		return fmt.Errorf("user %d listens there, not root", peer.Uid)
	}
	return nil
}

// call calls a method of systemd, and stores what it returns. The error of systemd is a dbus.Error.
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

func (s *systemd) property(object dbus.ObjectPath, kind, name string, result any) error {
	return s.call(object, getProperty, []any{kind, name}, result)
}

// missing returns the entries that the unit of a cgroup needs for the devices and does not have.
func (s *systemd) missing(cgroup string, rules []Rule) ([]deviceAllow, error) {
	unit := unitOf(cgroup)
	var object dbus.ObjectPath
	err := s.call(systemdObject, systemdManager+".GetUnit", []any{unit}, &object)
	if reply := (dbus.Error{}); errors.As(err, &reply) && reply.Name == noSuchUnit {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find the unit: %w", err)
	}
	kind := systemdName + ".Scope"
	if strings.HasSuffix(unit, ".service") {
		kind = systemdName + ".Service"
	}
	var own, policy string
	var allowed []deviceAllow
	if err := errors.Join(
		s.property(object, kind, "ControlGroup", &own),
		s.property(object, kind, "DevicePolicy", &policy),
		s.property(object, kind, "DeviceAllow", &allowed),
	); err != nil {
		return nil, fmt.Errorf("read the unit's properties: %w", err)
	}
	// A unit with policy auto and no list may use all devices. An entry would take all others away.
	if own != cgroup || policy == "auto" && len(allowed) == 0 {
		return nil, nil
	}
	return lackingEntries(allowed, rules), nil
}

// lackingEntries returns the entries for the rules that are not in a unit's list. It names a device by the numbers, as
// runc does: systemd 240 and later take them from the name, whether there is such a link or not.
func lackingEntries(allowed []deviceAllow, rules []Rule) []deviceAllow {
	var entries []deviceAllow
	for _, r := range rules {
		directory := "char"
		if r.Type == 'b' {
			directory = "block"
		}
		entry := deviceAllow{fmt.Sprintf("/dev/%s/%d:%d", directory, r.Major, r.Minor), r.Access}
		present := false
		for _, a := range allowed {
			if a.Path == entry.Path { // systemd replaces the access of an entry with the same path
				present = without(entry.Access, a.Access) == ""
				entry.Access += without(a.Access, entry.Access)
			}
		}
		if !present {
			entries = append(entries, entry)
		}
	}
	return entries
}

// noteMissingLinks notes the entries that systemd before 240 ignores, since nothing is at their path.
func (c *Change) noteMissingLinks(s *systemd, dev string, entries []deviceAllow) error {
	var version string
	if err := s.property(systemdObject, systemdManager, "Version", &version); err != nil {
		return fmt.Errorf("read systemd's version: %w", err)
	}
	if parseVersion(version) >= 240 {
		return nil
	}
	for _, e := range entries {
		link := filepath.Join(dev, strings.TrimPrefix(e.Path, "/dev/"))
		if _, err := os.Stat(link); err != nil {
			c.Notes = append(c.Notes, fmt.Sprintf("systemd %s needs the link %s: without it, the next "+
				"`systemctl daemon-reload` takes the device from the container", version, link))
		}
	}
	return nil
}

// parseVersion returns the first number in systemd's version, such as 252 of "v252.38-1~deb12u1".
func parseVersion(version string) int {
	isNoDigit := func(r rune) bool { return r < '0' || r > '9' }
	digits := strings.TrimLeftFunc(version, isNoDigit)
	if end := strings.IndexFunc(digits, isNoDigit); end >= 0 {
		digits = digits[:end]
	}
	n, _ := strconv.Atoi(digits)
	return n
}
