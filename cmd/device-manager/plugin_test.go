package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/test/lib/plugintest"
	"gpu-cdi-plugin/test/lib/testenv"
)

// fakePlugin is the program of a plugin with two devices: fake-plugin DIR. It registers in DIR, writes its environment
// to DIR/env, and ends at SIGTERM. If it can still register then, it writes DIR/served. `fake-plugin exit N` only ends.
func fakePlugin() {
	if os.Args[1] == "exit" {
		code, _ := strconv.Atoi(os.Args[2])
		os.Exit(code)
	}
	dir := os.Args[1]
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGTERM)
	env, err := json.Marshal(os.Environ())
	check(err)
	check(os.WriteFile(filepath.Join(dir, "env"), env, 0o600))
	p := plugintest.New("example.com/thing", plugintest.Devices(2)...)
	check(p.Serve(filepath.Join(dir, "fake.sock")))
	register := func() error { return p.Register(context.Background(), filepath.Join(dir, "kubelet.sock")) }
	check(register())
	<-signals
	check(register())
	check(os.WriteFile(filepath.Join(dir, "served"), nil, 0o600))
	p.Stop()
}

func check(err error) {
	if err != nil {
		log.Fatalf("fake-plugin: %v", err)
	}
}

// program returns the path of a program of this test's, which may be device-manager or fake-plugin.
func program(t *testing.T, name string) string {
	t.Helper()
	self, err := os.Executable()
	testenv.Must(t, err)
	path := filepath.Join(t.TempDir(), name)
	testenv.Must(t, os.Symlink(self, path))
	return path
}

// instance is `serve` as a process, with the fake plugin.
type instance struct {
	*exec.Cmd
	dir    string
	output io.Reader // of both, until both have ended
}

// newInstance prepares a process whose environment says that files are systemd's sockets.
func newInstance(t *testing.T, dir string, sockets []*os.File, args ...string) *instance {
	t.Helper()
	args = append([]string{
		program(t, "device-manager"), "serve", "--config=", "--insecure-paths", "--socket-dir", dir,
		"--plugins-registry-dir", filepath.Join(dir, "registry"), "--state-dir", filepath.Join(dir, "state"),
		"--api-socket", filepath.Join(dir, "api", "api.sock"), "--pod-resources-socket=",
		"--plugin", program(t, "fake-plugin") + " " + dir,
	}, args...)
	cmd := exec.Command("/bin/sh", append([]string{"-c", `export LISTEN_PID=$$; exec "$0" "$@"`}, args...)...)
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET=@no-systemd", "WATCHDOG_USEC=1000000", "WATCHDOG_PID=1")
	if len(sockets) > 0 {
		cmd.Env = append(cmd.Env, fmt.Sprintf("LISTEN_FDS=%d", len(sockets)), "LISTEN_FDNAMES=x")
		cmd.ExtraFiles = sockets
	}
	return &instance{Cmd: cmd, dir: dir}
}

func (i *instance) start(t *testing.T) {
	t.Helper()
	r, w, err := os.Pipe()
	testenv.Must(t, err)
	i.Stdout, i.Stderr, i.output = w, w, r
	testenv.Must(t, i.Start(), w.Close(), r.SetReadDeadline(time.Now().Add(time.Minute)))
	t.Cleanup(func() { _, _ = i.Process.Kill(), i.Wait() })
}

// end sends a signal, waits until the manager and the plugin have ended, and returns what they have printed.
func (i *instance) end(t *testing.T, sig os.Signal) string {
	t.Helper()
	testenv.Must(t, i.Process.Signal(sig))
	output, err := io.ReadAll(i.output)
	if err != nil {
		t.Errorf("the plugin or the manager goes on after %v: %v\n%s", sig, err, output)
	}
	_ = i.Wait()
	return string(output)
}

// devices returns the number of devices that the API has at the first request.
func (i *instance) devices(t *testing.T) int {
	t.Helper()
	list, err := api.NewClient(filepath.Join(i.dir, "api", "api.sock")).Devices(t.Context())
	testenv.Must(t, err)
	n := 0
	for _, r := range list.Items {
		n += r.Allocatable
	}
	return n
}

// lease leases a device for a while, at the first request.
func (i *instance) lease(t *testing.T) {
	t.Helper()
	request := api.LeaseRequest{Request: lease.Request{Count: 1}, Timed: true, Seconds: 3600}
	granted, err := api.NewClient(filepath.Join(i.dir, "api", "api-leases.sock")).Lease(t.Context(), request,
		func(w lease.Waiting) { t.Errorf("the first request waits: %s", w.Reason) })
	testenv.Must(t, err)
	if len(granted.Devices) != 1 {
		t.Errorf("the lease has the devices %q", granted.Devices)
	}
}

// systemdSockets makes sockets of an instance like systemd.
func systemdSockets(t *testing.T, dir string, names ...string) (files []*os.File) {
	t.Helper()
	dir = filepath.Join(dir, "api")
	testenv.Must(t, os.MkdirAll(dir, 0o755))
	for _, name := range names {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
		testenv.Must(t, err)
		l.SetUnlinkOnClose(false)
		f, err := l.File()
		testenv.Must(t, err, l.Close())
		t.Cleanup(func() { _ = f.Close() })
		files = append(files, f)
	}
	return files
}

func TestThePluginEndsWithTheManager(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		signal os.Signal
		served bool
	}{
		"that ends after the plugin": {unix.SIGTERM, true},
		"that is killed":             {unix.SIGKILL, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			m := newInstance(t, dir, systemdSockets(t, dir, "api.sock"))
			m.start(t)
			if n := m.devices(t); n != 2 {
				t.Errorf("%d devices at the first request", n)
			}
			output := m.end(t, c.signal)
			if _, err := os.Stat(filepath.Join(dir, "served")); (err == nil) != c.served {
				t.Errorf("the plugin could register before it ended: %v, want %v\n%s", err == nil, c.served, output)
			}
		})
	}
}

// The variables by which systemd means the manager would have the plugin notify for it, or take its socket.
func TestTheEnvironmentOfThePlugin(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	m := newInstance(t, dir, systemdSockets(t, dir, "api.sock"))
	m.Env = append(m.Env, "DEVICE_MANAGER_TEST=x")
	m.start(t)
	m.devices(t)
	m.end(t, unix.SIGTERM)
	text, err := os.ReadFile(filepath.Join(dir, "env"))
	var env []string
	testenv.Must(t, err, json.Unmarshal(text, &env))
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		if name == "NOTIFY_SOCKET" || strings.HasPrefix(name, "WATCHDOG_") || strings.HasPrefix(name, "LISTEN_") {
			t.Errorf("the plugin gets %s", kv)
		}
	}
	if !slices.Contains(env, "DEVICE_MANAGER_TEST=x") {
		t.Errorf("the plugin does not get the other variables: %q", env)
	}
}

func TestTheSocketsOfSystemdStay(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	names := []string{"api-leases.sock", "api.sock"}
	sockets := systemdSockets(t, dir, names...)
	path := filepath.Join(dir, "api", "api.sock")
	before := map[string]fs.FileInfo{}
	for _, name := range names {
		path := filepath.Join(dir, "api", name)
		info, err := os.Lstat(path)
		testenv.Must(t, err)
		before[path] = info
	}
	for range 2 {
		group := strconv.Itoa(os.Getegid())
		m := newInstance(t, dir, sockets, "--api-group", group, "--lease-group", group)
		m.start(t)
		m.lease(t)
		if n := m.devices(t); n != 2 {
			t.Errorf("%d devices at the first request", n)
		}
		second := newInstance(t, t.TempDir(), nil, "--api-socket", path, "--plugin=")
		if output, err := second.CombinedOutput(); second.ProcessState.ExitCode() != 12 {
			t.Errorf("a second manager at the socket: %v\n%s", err, output)
		}
		if output := m.end(t, unix.SIGTERM); strings.Count(output, "so set SocketGroup= in its socket unit") != 2 {
			t.Errorf("there is no warning that api-group and lease-group do not apply:\n%s", output)
		}
		for path, before := range before {
			if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) || after.Mode() != before.Mode() {
				t.Errorf("the socket %s was removed or changed: %v", path, err)
			}
		}
	}
}

// Either socket unit can be disabled. The manager then makes the socket itself, for root.
func TestOneSocketIsOfSystemd(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"api.sock", "api-leases.sock"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			m := newInstance(t, dir, systemdSockets(t, dir, name))
			m.start(t)
			for _, name := range []string{"api.sock", "api-leases.sock"} {
				testenv.Eventually(t, "a connection to "+name, func() bool { // the file is there before the kernel accepts
					c, err := net.Dial("unix", filepath.Join(dir, "api", name))
					return err == nil && c.Close() == nil
				})
			}
			m.lease(t)
			if n := m.devices(t); n != 2 {
				t.Errorf("%d devices at the first request", n)
			}
			m.end(t, unix.SIGTERM)
			if left, _ := filepath.Glob(filepath.Join(dir, "api", "*.sock")); len(left) != 1 || filepath.Base(left[0]) != name {
				t.Errorf("the sockets %q are left, want that of systemd", left)
			}
		})
	}
}

func TestOtherSocketsOfSystemdAreRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file, err := os.Open("/dev/null")
	testenv.Must(t, err)
	defer file.Close()
	for want, files := range map[string][]*os.File{
		"systemd passes the socket " + dir + "/api/other.sock; want " + dir + "/api/api.sock or " + dir +
			"/api/api-leases.sock": systemdSockets(t, dir, "api.sock", "other.sock"),
		"systemd passes the socket descriptor 3: socket operation on non-socket": {file},
	} {
		output, err := newInstance(t, dir, files).CombinedOutput()
		if err == nil || !strings.Contains(string(output), want) {
			t.Errorf("%v, want %q in\n%s", err, want, output)
		}
	}
}

func TestAPluginThatDoesNotEndIsKilled(t *testing.T) {
	t.Parallel()
	a := newApp()
	r, w := io.Pipe()
	a.Stdout, a.Stderr, a.Log = w, w, slog.New(slog.DiscardHandler)
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- a.runPlugin(ctx, pluginProgram{
			path: "/bin/sh", args: []string{"sh", "-c", "trap '' TERM; echo ready; exec sleep 1000"}, stopTime: time.Millisecond,
		})
	}()
	_, err := bufio.NewReader(r).ReadString('\n')
	testenv.Must(t, err)
	end()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
