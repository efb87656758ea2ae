package inject

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

var errHostile = errors.New("device \"x\"\nlevel=error \x1b[31m\xff: why")

func TestLogToAFile(t *testing.T) {
	n := newNode(t)
	path := n.dir + "/log"
	if err := n.Log(Error, "precreate", "c1", errHostile); err != nil {
		t.Errorf("without a policy: %v", err)
	}
	n.write("hook.yaml", "log: "+path+"\na mistake: true")
	n.must(n.Log(Warning, "create-container", "a\"\nb", errHostile))
	n.must(n.Log(Error, "gpu-cdi-runtime", "", errors.New(strings.Repeat("x", 9999))))
	data, err := os.ReadFile(path)
	n.must(err)
	lines := strings.Split(string(data), "\n")
	want := regexp.MustCompile(`^time=20\S+Z level=warning position=create-container container="a\\"\\nb" ` +
		`msg="device \\"x\\"\\nlevel=error \\x1b\[31m\\xff: why"$`)
	if len(lines) != 3 || !want.MatchString(lines[0]) || len(lines[1]) > 2100 {
		t.Errorf("the log is %q", lines)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

func TestPodmanID(t *testing.T) {
	const id = "ec631565eaaa6f61957a387449f5a6a3e450ae9df952c3ec9ff3534183aab0db"
	mount := func(source string) string {
		return `{"mounts": [{"source": "proc"}, {"source": "` + source + `"}], "process": {}}`
	}
	for name, c := range map[string]struct{ config, want string }{
		"podman's":          {mount("/run/containers/storage/overlay-containers/" + id + "/userdata/.containerenv"), id},
		"a user's":          {mount("/run/user/1000/containers/vfs-containers/" + id + "/userdata/.containerenv"), id},
		"another mount":     {mount("/run/containers/storage/overlay-containers/" + id + "/userdata/hosts"), ""},
		"not an ID":         {mount("/run/containers/storage/overlay-containers/web/userdata/.containerenv"), ""},
		"a volume named so": {mount("/var/volumes/" + id), ""},
		"more than an ID":   {mount("/run/" + id + "-1/userdata/.containerenv"), ""},
		"a shorter ID":      {mount("/run/" + id[:12] + "/userdata/.containerenv"), ""},
		"no mounts":         {`{}`, ""},
		"not a config":      {`[]`, ""},
		"not JSON":          {`{"mounts": [`, ""},
		"of another shape":  {`{"mounts": [7]}`, ""},
	} {
		if got := PodmanID([]byte(c.config)); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// A log that others could have made is not written to.
func TestLogToAHostileFile(t *testing.T) {
	for name, tc := range map[string]struct {
		make func(n *node, path string)
		want string
	}{
		"a link":          {func(n *node, path string) { n.must(os.Symlink("../hook.yaml", path)) }, "too many levels"},
		"a dangling link": {func(n *node, path string) { n.must(os.Symlink("../none", path)) }, "too many levels"},
		"a hard link":     {func(n *node, path string) { n.must(os.Link(n.dir+"/hook.yaml", path)) }, "2 names"},
		"a FIFO":          {func(n *node, path string) { n.must(unix.Mkfifo(path, 0o600)) }, "no such device or address"},
		"a FIFO that is read": {func(n *node, path string) {
			n.must(unix.Mkfifo(path, 0o600))
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			n.must(err)
			n.t.Cleanup(func() { _ = f.Close() })
		}, "not a regular file"},
		"a directory": {func(n *node, path string) { n.must(os.Mkdir(path, 0o755)) }, "is a directory"},
		"a device": {func(n *node, path string) {
			n.must(unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
		}, "not a regular file"},
		"another user's file": {func(n *node, path string) {
			n.must(errors.Join(os.WriteFile(path, nil, 0o600), os.Chown(path, 1000, 0)))
		}, "belongs to user 1000"},
		"one that others write": {func(n *node, path string) {
			n.must(errors.Join(os.WriteFile(path, nil, 0o600), os.Chmod(path, 0o666)))
		}, "has the mode 0666"},
		"in another user's directory": {func(n *node, path string) {
			n.must(os.Chown(filepath.Dir(path), 1000, 0))
		}, "belongs to user 1000"},
		"in no directory": {func(n *node, path string) {
			n.must(os.Remove(filepath.Dir(path)))
		}, "no such file or directory"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			path := n.dir + "/logs/log"
			n.write("hook.yaml", "log: "+path)
			n.must(os.Mkdir(filepath.Dir(path), 0o755))
			tc.make(n, path)
			err := n.Log(Error, "precreate", "", errHostile)
			checkError(t, err, tc.want)
			checkError(t, err, "write to the log "+path)
			if policy, err := os.ReadFile(n.PolicyFile); err != nil || string(policy) != "log: "+path {
				t.Errorf("the policy became %q, %v", policy, err)
			}
		})
	}
}

func TestLogToSyslog(t *testing.T) {
	n := newNode(t)
	n.write("hook.yaml", "log: syslog")
	n.SyslogSocket = n.dir + "/dev-log"
	checkError(t, n.Log(Error, "precreate", "", errHostile), "write to the log syslog: send to "+n.SyslogSocket)
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: n.SyslogSocket, Net: "unixgram"})
	n.must(err)
	defer func() { _ = c.Close() }()
	n.must(n.Log(Warning, "precreate", "c1", errHostile))
	n.must(n.Log(Error, "precreate", "c1", errHostile))
	for _, priority := range []string{"28", "27"} {
		data := make([]byte, 4096)
		size, err := c.Read(data)
		n.must(err)
		want := regexp.MustCompile(`^<` + priority + `>\w{3} [ \d]\d \d\d:\d\d:\d\d gpu-cdi-hook\[\d+\]: ` +
			`level=\w+ position=precreate container="c1" msg="device \\"x\\"\\nlevel=error .*why"$`)
		if !want.Match(data[:size]) {
			t.Errorf("got %q", data[:size])
		}
	}
	// The hook does not wait for a daemon that does not read.
	for range 10_000 {
		if err = n.Log(Error, "precreate", "c1", errHostile); err != nil {
			break
		}
	}
	checkError(t, err, "resource temporarily unavailable")
}
