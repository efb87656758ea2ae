// Package systemd calls systemd's D-Bus API (org.freedesktop.systemd1(5)) on its private socket, which is there without
// a message bus, and for root only.
package systemd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
)

// Socket is the path of systemd's private socket.
const Socket = "/run/systemd/private"

// Timeout limits all calls of one purpose together. systemd answers in milliseconds, except while it reloads its units.
const Timeout = 5 * time.Second

// Names of the API.
const (
	Name        = "org.freedesktop.systemd1"
	Object      = "/org/freedesktop/systemd1"
	Manager     = Name + ".Manager"
	NoSuchUnit  = Name + ".NoSuchUnit"
	GetProperty = "org.freedesktop.DBus.Properties.Get"
	// NoSuchProperty is the error for a property that systemd does not know.
	NoSuchProperty = "org.freedesktop.DBus.Error.PropertyReadOnly"
)

// Property is a property of a unit.
type Property struct {
	Name  string
	Value dbus.Variant
}

// DeviceAllow is an entry of a unit's DeviceAllow: the path of a device node, and some of the letters rwm.
type DeviceAllow struct{ Path, Access string }

// DevicePath names a character device ('c') or block device ('b') by its numbers, like runc. systemd 240 and later
// parse the numbers from the name, even if no such link exists.
func DevicePath(kind byte, major, minor uint32) string {
	directory := "char"
	if kind == 'b' {
		directory = "block"
	}
	return fmt.Sprintf("/dev/%s/%d:%d", directory, major, minor)
}

// Conn is a connection to systemd. One goroutine uses it at a time.
type Conn struct {
	*net.UnixConn

	in     *bufio.Reader
	serial uint32 // of the last call
}

// Dial connects to systemd. The context has a deadline, which limits all calls too. If systemd does not run, the error
// wraps fs.ErrNotExist.
func Dial(ctx context.Context, socket string) (*Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline) // it fails only on a closed connection
	s := &Conn{UnixConn: conn.(*net.UnixConn), in: bufio.NewReader(conn)}
	if err := s.authenticate(); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("connect to systemd at %s: %w", socket, err)
	}
	return s, nil
}

// authenticate authenticates by this process's user, which systemd gets from the kernel (the mechanism EXTERNAL), and
// asks for leave to send open files.
//
// It writes the whole handshake at once, like systemd's own clients, and then waits for the answer: systemd does not
// notice a call that arrives together with BEGIN, and waits for more. The connections of godbus sometimes hang for
// this reason.
func (s *Conn) authenticate() error {
	user := hex.EncodeToString([]byte(strconv.Itoa(os.Geteuid())))
	if _, err := s.Write([]byte("\x00AUTH EXTERNAL " + user + "\r\nNEGOTIATE_UNIX_FD\r\nBEGIN\r\n")); err != nil {
		return err
	}
	for _, want := range []string{"OK ", "AGREE_UNIX_FD"} {
		answer, err := s.in.ReadSlice('\n')
		if err != nil {
			return err
		}
		if !bytes.HasPrefix(answer, []byte(want)) {
			return fmt.Errorf("authentication is refused: %q", answer)
		}
	}
	return nil
}

// Call calls a method of systemd and stores its results. If systemd refuses, the error is a dbus.Error.
func (s *Conn) Call(object dbus.ObjectPath, method string, arguments []any, results ...any) error {
	return s.CallWith(nil, object, method, arguments, results...)
}

// CallWith is Call with an open file, which is dbus.UnixFDIndex(0) in the arguments.
func (s *Conn) CallWith(
	file *os.File, object dbus.ObjectPath, method string, arguments []any, results ...any,
) error {
	dot := strings.LastIndexByte(method, '.')
	request := dbus.Message{
		Type: dbus.TypeMethodCall,
		Headers: map[dbus.HeaderField]dbus.Variant{
			dbus.FieldDestination: dbus.MakeVariant(Name),
			dbus.FieldPath:        dbus.MakeVariant(object),
			dbus.FieldInterface:   dbus.MakeVariant(method[:dot]),
			dbus.FieldMember:      dbus.MakeVariant(method[dot+1:]),
			dbus.FieldSignature:   dbus.MakeVariant(dbus.SignatureOf(arguments...)),
		},
		Body: arguments,
	}
	if file != nil {
		request.Headers[dbus.FieldUnixFDs] = dbus.MakeVariant(uint32(1))
	}
	var out bytes.Buffer
	if err := request.EncodeTo(&out, binary.LittleEndian); err != nil {
		return err
	}
	s.serial++
	binary.LittleEndian.PutUint32(out.Bytes()[8:], s.serial) // godbus sets the serial number only in its connections
	if err := s.send(out.Bytes(), file); err != nil {
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

// send sends a message, and with it an open file, unless that is nil.
func (s *Conn) send(message []byte, file *os.File) error {
	if file != nil {
		raw, err := file.SyscallConn()
		if err != nil {
			return err
		}
		var n int
		var failed error
		err = raw.Control(func(fd uintptr) {
			n, _, failed = s.WriteMsgUnix(message, unix.UnixRights(int(fd)), nil)
		})
		if err = errors.Join(err, failed); err != nil {
			return err
		}
		message = message[n:]
	}
	_, err := s.Write(message)
	return err
}
