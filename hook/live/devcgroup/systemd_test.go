package devcgroup

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"github.com/google/go-cmp/cmp"

	"gpu-cdi-plugin/internal/systemd"
)

// manager stands in for systemd: it answers on a socket of its own as systemd does on /run/systemd/private.
type manager struct {
	units  map[string]*unit
	silent bool // does not answer any call
	mutex  sync.Mutex
}

type unit struct {
	controlGroup, policy string
	allow                []systemd.DeviceAllow
}

// serve returns the socket.
func (m *manager) serve(t *testing.T) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "private")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	group.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			group.Go(func() {
				defer conn.Close()
				if err := m.talk(conn); err != nil {
					t.Log(err)
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		group.Wait()
	})
	return socket
}

// talk authenticates a client and answers its calls until it closes the connection. Like systemd 252 it does not see
// what it has read together with BEGIN.
func (m *manager) talk(conn net.Conn) error {
	opening := make([]byte, 4096)
	n, err := conn.Read(opening)
	if err != nil {
		return err
	}
	const asRoot = "\x00AUTH EXTERNAL 30\r\nNEGOTIATE_UNIX_FD\r\nBEGIN\r\n" // the user "0" in hexadecimal
	if got := string(opening[:n]); got != asRoot {
		return fmt.Errorf("the client begins with %q", got)
	}
	if _, err := conn.Write([]byte("OK 0123456789abcdef0123456789abcdef\r\nAGREE_UNIX_FD\r\n")); err != nil {
		return err
	}
	return m.answer(bufio.NewReader(conn), conn)
}

func (m *manager) answer(in *bufio.Reader, conn net.Conn) error {
	for {
		request, err := dbus.DecodeMessage(in)
		if err != nil {
			return err
		}
		if m.silent {
			continue
		}
		reply := &dbus.Message{Type: dbus.TypeMethodReply, Headers: map[dbus.HeaderField]dbus.Variant{
			dbus.FieldReplySerial: dbus.MakeVariant(request.Serial()),
		}}
		body, err := m.call(request)
		if failed := (dbus.Error{}); errors.As(err, &failed) {
			reply.Type, body = dbus.TypeError, failed.Body
			reply.Headers[dbus.FieldErrorName] = dbus.MakeVariant(failed.Name)
		} else if err != nil {
			return err
		}
		reply.Body = body
		reply.Headers[dbus.FieldSignature] = dbus.MakeVariant(dbus.SignatureOf(body...))
		if err := reply.EncodeTo(conn, binary.LittleEndian); err != nil {
			return err
		}
	}
}

// call does what systemd does at a method call.
func (m *manager) call(request *dbus.Message) ([]any, error) {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	method := request.Headers[dbus.FieldMember].Value().(string)
	path := request.Headers[dbus.FieldPath].Value().(dbus.ObjectPath)
	const units = "/org/freedesktop/systemd1/unit/"
	switch method {
	case "GetUnit":
		name := request.Body[0].(string)
		if m.units[name] == nil {
			return nil, dbus.Error{Name: systemd.NoSuchUnit, Body: []any{"Unit " + name + " not loaded."}}
		}
		return []any{dbus.ObjectPath(units + strings.ReplaceAll(strings.ReplaceAll(name, ".", "_2e"), "-", "_2d"))}, nil
	case "Get":
		var value any
		switch name := strings.NewReplacer("_2e", ".", "_2d", "-").Replace(strings.TrimPrefix(string(path), units)); {
		case m.units[name] == nil || request.Body[0] != systemd.Name+".Scope":
			return nil, dbus.Error{
				Name: "org.freedesktop.DBus.Error.UnknownInterface",
				Body: []any{"Unknown interface"},
			}
		case request.Body[1] == "ControlGroup":
			value = m.units[name].controlGroup
		case request.Body[1] == "DevicePolicy":
			value = m.units[name].policy
		case request.Body[1] == "DeviceAllow":
			value = m.units[name].allow
		}
		return []any{dbus.MakeVariant(value)}, nil
	case "SetUnitProperties":
		var name string
		var runtime bool
		var properties []struct {
			Name  string
			Value dbus.Variant
		}
		if err := dbus.Store(request.Body, &name, &runtime, &properties); err != nil {
			return nil, err
		}
		var added []systemd.DeviceAllow
		if err := properties[0].Value.Store(&added); err != nil || !runtime || properties[0].Name != "DeviceAllow" {
			return nil, dbus.Error{Name: "org.freedesktop.DBus.Error.InvalidArgs", Body: []any{"Invalid arguments"}}
		}
		for _, a := range added {
			same := func(old systemd.DeviceAllow) bool { return old.Path == a.Path }
			m.units[name].allow = append(slices.DeleteFunc(m.units[name].allow, same), a)
		}
		return nil, nil
	}
	return nil, dbus.Error{Name: "org.freedesktop.DBus.Error.UnknownMethod", Body: []any{"Unknown method"}}
}

func TestSystemd(t *testing.T) {
	null := systemd.DeviceAllow{Path: "/dev/char/1:3", Access: "rwm"}
	entry := systemd.DeviceAllow{Path: "/dev/char/195:7", Access: "rw"}
	for name, c := range map[string]struct {
		unit *unit // its cgroup is the container's unless it has one
		want []systemd.DeviceAllow
	}{
		"a list without the device": {
			&unit{policy: "strict", allow: []systemd.DeviceAllow{null}}, []systemd.DeviceAllow{null, entry},
		},
		"an empty list": {&unit{policy: "strict"}, []systemd.DeviceAllow{entry}},
		"a list with more access": {
			&unit{policy: "strict", allow: []systemd.DeviceAllow{{Path: "/dev/char/195:7", Access: "rwm"}}},
			[]systemd.DeviceAllow{{Path: "/dev/char/195:7", Access: "rwm"}},
		},
		"a list with less access": {
			&unit{policy: "strict", allow: []systemd.DeviceAllow{{Path: "/dev/char/195:7", Access: "rm"}}},
			[]systemd.DeviceAllow{{Path: "/dev/char/195:7", Access: "rmw"}},
		},
		// An entry would take all other devices away.
		"a unit that may use all devices": {&unit{policy: "auto"}, nil},
		"a unit with a list and the policy auto": {
			&unit{policy: "auto", allow: []systemd.DeviceAllow{null}}, []systemd.DeviceAllow{null, entry},
		},
		"a unit with another cgroup":     {&unit{policy: "strict", controlGroup: "/x.scope"}, nil},
		"a cgroup that is not of a unit": {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := makeBelow(t, makeCgroup(t, true), "runc-1.scope")
			restrict(t, dir, true)
			m := &manager{units: map[string]*unit{}}
			if c.unit != nil {
				m.units["runc-1.scope"] = c.unit
				if c.unit.controlGroup == "" {
					c.unit.controlGroup = strings.TrimPrefix(dir, hierarchy(t, true))
				}
			}
			h := Host{Proc: host.Proc, Cgroups: host.Cgroups, Systemd: m.serve(t)}
			if err := allow(t.Context(), h, sleeper(t, dir), gpu); err != nil {
				t.Fatal(err)
			}
			if c.unit != nil {
				if diff := cmp.Diff(c.want, c.unit.allow); diff != "" {
					t.Errorf("the unit's list (-want +got):\n%s", diff)
				}
			}
			if got := accesses(t, dir, 'c'); got != "rwb" {
				t.Errorf("access %q", got)
			}
		})
	}
}

// TestSystemdFaults: without systemd's answer nothing is allowed.
func TestSystemdFaults(t *testing.T) {
	for name, c := range map[string]struct {
		socket func(t *testing.T) string
		want   string
	}{
		"no answer": {func(t *testing.T) string { return (&manager{silent: true}).serve(t) }, "i/o timeout"},
		"no program listens": {func(t *testing.T) string {
			socket := filepath.Join(t.TempDir(), "private")
			listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			listener.SetUnlinkOnClose(false)
			_ = listener.Close()
			return socket
		}, "connection refused"},
		"no socket": {func(t *testing.T) string {
			file := filepath.Join(t.TempDir(), "private")
			write(t, file, "")
			return file
		}, "connection refused"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := makeBelow(t, makeCgroup(t, true), "runc-1.scope")
			restrict(t, dir, true)
			before := attached(t, dir)
			limit := time.Minute
			if c.want == "i/o timeout" {
				limit = time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			h := Host{Proc: host.Proc, Cgroups: host.Cgroups, Systemd: c.socket(t)}
			err := allow(ctx, h, sleeper(t, dir), gpu)
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "runc-1.scope") {
				t.Errorf("error %v, want %q", err, c.want)
			}
			if after := attached(t, dir); !slices.Equal(after, before) {
				t.Errorf("programs %v, want %v", after, before)
			}
		})
	}
}
