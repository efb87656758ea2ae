package scope

import (
	"bufio"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/systemd"
	"gpu-cdi-plugin/test/lib/testenv"
)

// fake stands in for systemd: it notes what it is asked.
type fake struct {
	*net.UnixConn

	knows []string // how it lets a process be given
	onPut func()   // is called before the process is in the scope

	mu      sync.Mutex
	files   []int  // that came and were not used
	pidfd   string // what /proc/self/fdinfo says of the process that came as a file
	pid     uint32 // the process that came as a number
	policy  string // of the scope's devices
	devices int    // in its list
}

// serve answers one client, and returns the socket.
func (f *fake) serve(t *testing.T) string {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "private")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	testenv.Must(t, err)
	done := make(chan error, 1)
	go func() {
		conn, err := l.AcceptUnix()
		if err == nil {
			f.UnixConn = conn
			err = f.talk()
			_ = conn.Close()
		}
		done <- err
	}()
	t.Cleanup(func() {
		_ = l.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return socket
}

// Read implements io.Reader. It keeps the files that come with the bytes.
func (f *fake) Read(p []byte) (int, error) {
	control := make([]byte, 100)
	n, m, _, _, err := f.ReadMsgUnix(p, control)
	messages, _ := unix.ParseSocketControlMessage(control[:m])
	for _, one := range messages {
		files, _ := unix.ParseUnixRights(&one)
		f.files = append(f.files, files...)
	}
	return n, err
}

func (f *fake) talk() error {
	in := bufio.NewReader(f)
	for range 3 { // AUTH, NEGOTIATE_UNIX_FD, BEGIN
		if _, err := in.ReadString('\n'); err != nil {
			return err
		}
	}
	if _, err := f.Write([]byte("OK 0123456789abcdef0123456789abcdef\r\nAGREE_UNIX_FD\r\n")); err != nil {
		return err
	}
	for {
		request, err := dbus.DecodeMessage(in)
		if err != nil {
			return nil //nolint:nilerr // the client has gone
		}
		reply := &dbus.Message{Type: dbus.TypeMethodReply, Headers: map[dbus.HeaderField]dbus.Variant{
			dbus.FieldReplySerial: dbus.MakeVariant(request.Serial()),
		}}
		body, err := f.call(request)
		if failed, is := errors.AsType[dbus.Error](err); is {
			reply.Type, body = dbus.TypeError, failed.Body
			reply.Headers[dbus.FieldErrorName] = dbus.MakeVariant(failed.Name)
		} else if err != nil {
			return err
		}
		if reply.Body = body; len(body) > 0 {
			reply.Headers[dbus.FieldSignature] = dbus.MakeVariant(dbus.SignatureOf(body...))
		}
		if err := reply.EncodeTo(f.UnixConn, binary.LittleEndian); err != nil {
			return err
		}
	}
}

func (f *fake) call(request *dbus.Message) ([]any, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var name, mode string
	var runtime bool
	var properties []systemd.Property
	switch method := request.Headers[dbus.FieldMember].Value(); method {
	case "StartTransientUnit":
		if err := dbus.Store(request.Body[:3], &name, &mode, &properties); err != nil {
			return nil, err
		}
	case "SetUnitProperties":
		if err := dbus.Store(request.Body, &name, &runtime, &properties); err != nil {
			return nil, err
		}
	case "GetUnit":
		return []any{dbus.ObjectPath("/unit")}, nil
	case "Get":
		return []any{dbus.MakeVariant("active")}, nil
	}
	files := f.files
	f.files = nil
	defer func() {
		for _, file := range files {
			_ = unix.Close(file)
		}
	}()
	for _, p := range properties {
		if strings.HasPrefix(p.Name, "PID") && !slices.Contains(f.knows, p.Name) {
			return nil, dbus.Error{Name: systemd.NoSuchProperty, Body: []any{"Cannot set property " + p.Name}}
		}
	}
	for _, p := range properties {
		switch p.Name {
		case "PIDs":
			f.onPut()
			f.pid = p.Value.Value().([]uint32)[0]
		case "PIDFDs":
			f.onPut()
			file := files[p.Value.Value().([]dbus.UnixFDIndex)[0]]
			info, err := os.ReadFile(filepath.Join("/proc/self/fdinfo", strconv.Itoa(file)))
			if err != nil {
				return nil, err
			}
			f.pidfd = string(info)
		case "DevicePolicy":
			f.policy = p.Value.Value().(string)
		case "DeviceAllow":
			f.devices = len(p.Value.Value().([][]any))
		}
	}
	return []any{dbus.ObjectPath("/job")}, nil
}

// A scope is for the process of a pidfd, and no later process with its PID stays confined.
func TestTheProcessOfAScope(t *testing.T) {
	t.Parallel()
	const closed, auto = "closed", "auto"
	for name, c := range map[string]struct {
		knows          []string
		before, during bool // whether the process ends before or while systemd takes it
		byPID          bool
		policy         string // of the scope in the end, "" if there is none
	}{
		"by its pidfd":                                {knows: []string{"PIDFDs", "PIDs"}, policy: closed},
		"by its PID, for an older systemd":            {knows: []string{"PIDs"}, byPID: true, policy: closed},
		"it ends while systemd takes it":              {knows: []string{"PIDs"}, during: true, byPID: true, policy: auto},
		"it ends while systemd takes it by its pidfd": {knows: []string{"PIDFDs"}, during: true, policy: auto},
		"it has ended, with an older systemd":         {knows: []string{"PIDs"}, before: true, policy: ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pidfd := -1
			cmd := exec.CommandContext(t.Context(), "sleep", "1000")
			cmd.SysProcAttr = &syscall.SysProcAttr{PidFD: &pidfd, Pdeathsig: syscall.SIGKILL}
			testenv.Must(t, cmd.Start())
			process := os.NewFile(uintptr(pidfd), "pidfd")
			t.Cleanup(func() { _ = process.Close() })
			end := sync.OnceFunc(func() {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			})
			t.Cleanup(end)
			f := &fake{knows: c.knows, onPut: func() {
				if c.during {
					end()
				}
			}}
			if c.before {
				end()
			}
			allowed := []systemd.DeviceAllow{{Path: "/dev/char/195:0", Access: "rwm"}}
			err := Start(t.Context(), f.serve(t), Scope{
				Name: "x.scope", PID: cmd.Process.Pid, PIDFD: process, UID: 7, Devices: allowed,
			})
			if (err != nil) != (c.before || c.during) {
				t.Errorf("started: %v", err)
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			pid, inFile := 0, "\nPid:\t"+strconv.Itoa(cmd.Process.Pid)+"\n"
			if c.byPID {
				pid = cmd.Process.Pid
			}
			if byFile := !c.byPID && !c.before && !c.during; int(f.pid) != pid || strings.Contains(f.pidfd, inFile) != byFile {
				t.Errorf("systemd got the process %d, and the file\n%s", f.pid, f.pidfd)
			}
			if devices := map[string]int{closed: 1}[c.policy]; f.policy != c.policy || f.devices != devices {
				t.Errorf("the policy is %q with %d devices, want %q with %d", f.policy, f.devices, c.policy, devices)
			}
		})
	}
}
