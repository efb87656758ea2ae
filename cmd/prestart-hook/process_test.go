package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"gpu-cdi-plugin/hook/inject"
	"gpu-cdi-plugin/internal/ldcache"
	testimage "gpu-cdi-plugin/test/lib/image"
	"gpu-cdi-plugin/test/lib/testenv"
)

// built builds the hook once, as it is released, and returns its path.
var built = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "prestart-hook")
	if err != nil {
		return "", err
	}
	if err := os.Chmod(dir, 0o755); err != nil { // for the root of a user namespace
		return "", err
	}
	out := filepath.Join(dir, "prestart-hook")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=v1.2.3", "-o", out, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	if msg, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, msg)
	}
	return out, nil
})

func TestMain(m *testing.M) {
	// In scripts, both programs have the policy and the specs of the directory that NODE names.
	program := func() {
		dir := os.Getenv("NODE")
		in := inject.Injector{
			PolicyFile: dir + "/hook.yaml", CDIDirs: []string{dir + "/cdi"}, RuntimeDir: dir + "/run", PodLogs: dir + "/pods",
		}
		os.Exit(run(in, os.Args, os.Stdin, os.Stdout, os.Stderr))
	}
	testscript.Main(cleaning{m}, map[string]func(){
		hookName: program, runtimeName: program, runtimeName + "-crio": program,
	})
}

// cleaning removes the built hook after the tests.
type cleaning struct{ *testing.M }

func (c cleaning) Run() int {
	status := c.M.Run()
	if path, err := built(); err == nil {
		_ = os.RemoveAll(filepath.Dir(path))
	}
	return status
}

func hookBinary(t testing.TB) string {
	t.Helper()
	path, err := built()
	testenv.Must(t, err)
	return path
}

// multiarch returns Debian's directory of libraries for this machine, and the path of glibc's loader.
func multiarch() (dir, loader string) {
	if runtime.GOARCH == "arm64" {
		return "/usr/lib/aarch64-linux-gnu", "/lib/ld-linux-aarch64.so.1"
	}
	return "/usr/lib/x86_64-linux-gnu", "/lib64/ld-linux-x86-64.so.2"
}

// container is a bundle whose root is a mount point in a mount namespace of the test. Beside it is a directory that
// must not change, the canary.
type container struct {
	t                    testing.TB
	bundle, root, canary string
	canaryHash           string
	env                  []string
}

func newContainer(t testing.TB) *container {
	t.Helper()
	needRoot(t)
	testenv.MountNamespace(t)
	base := t.TempDir()
	c := &container{t: t, bundle: filepath.Join(base, "bundle"), canary: filepath.Join(base, "canary")}
	c.root = filepath.Join(c.bundle, "rootfs")
	dir, loader := multiarch()
	c.write(loader, "loader")
	c.write(dir+"/libc.so.6", "libc")
	c.write(dir+"/libcuda.so.580.1", "driver")
	c.write("/opt/driver/libcuda.so.580.1", "driver")
	c.write("/etc/passwd", "root:x:0:0::/:/bin/sh")
	c.write("../config.json", `{"root":{"path":"rootfs"}}`)
	c.write("../../canary/etc/ld.so.cache", "of the host")
	c.write("../../canary/libcuda.so.999.1", "of the host")
	// If the hook runs this, the canary changes.
	c.write("/sbin/ldconfig", "#!/bin/sh\ntouch "+c.canary+"/executed\n")
	c.hashCanary()
	testenv.MountPoint(t, c.root)
	return c
}

func (c *container) hashCanary() { c.canaryHash = testimage.Fingerprint(c.t, c.canary) }

func (c *container) path(name string) string { return filepath.Join(c.root, name) }

func (c *container) write(name, data string) {
	c.t.Helper()
	testenv.Must(c.t, os.MkdirAll(filepath.Dir(c.path(name)), 0o755))
	testenv.WriteProgram(c.t, c.path(name), []byte(data))
}

func (c *container) link(target, name string) {
	c.t.Helper()
	testenv.Must(c.t, os.MkdirAll(filepath.Dir(c.path(name)), 0o755))
	testenv.Must(c.t, os.RemoveAll(c.path(name)))
	testenv.Must(c.t, os.Symlink(target, c.path(name)))
}

// run runs the hook as runc does: in the container's mount namespace, with the root as its working directory.
func (c *container) run(args ...string) (status int, stderr string) {
	c.t.Helper()
	cmd := exec.Command(hookBinary(c.t), append([]string{"create-container"}, args...)...)
	cmd.Dir = c.root
	cmd.Env = c.env
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"ociVersion":"1.0.2","id":"test","pid":1,"bundle":%q}`, c.bundle))
	var out bytes.Buffer
	cmd.Stderr = &out
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		c.t.Fatal(err)
	}
	if strings.Contains(out.String(), "panic") || strings.Contains(out.String(), "goroutine") {
		c.t.Errorf("the hook crashed:\n%s", out.String())
	}
	for line := range strings.Lines(out.String()) {
		if !strings.HasPrefix(line, "prestart-hook: ") {
			c.t.Errorf("a message without the program's name: %q", line)
		}
	}
	return cmd.ProcessState.ExitCode(), out.String()
}

// checkCanary fails the test if something outside the root has changed.
func (c *container) checkCanary() {
	c.t.Helper()
	if testimage.Fingerprint(c.t, c.canary) != c.canaryHash {
		out, _ := exec.Command("find", c.canary, "-ls").Output()
		c.t.Errorf("something outside the root has changed:\n%s", out)
	}
}

// found returns the path at which the loader finds a library through the root's cache.
func (c *container) found(name string) string {
	f, err := os.OpenInRoot(c.root, "etc/ld.so.cache")
	if err != nil {
		return err.Error()
	}
	defer func() { _ = f.Close() }()
	data, err := io.ReadAll(f)
	if err != nil {
		return err.Error()
	}
	cache, err := ldcache.Parse(data)
	if err != nil {
		return err.Error()
	}
	flags, _ := ldcache.FlagsFor(runtime.GOARCH)
	path, _ := cache.Lookup(name, flags)
	return path
}

func TestArgumentsAndStates(t *testing.T) {
	for name, tc := range map[string]struct {
		args   []string
		stdin  string
		status int
		want   string
	}{
		"no arguments":             {nil, "", 2, `the first argument must be "create-container"`},
		"an unknown verb":          {[]string{"install"}, "", 2, "--help"},
		"an argument of precreate": {[]string{"precreate", "x"}, "{}", 2, "precreate has no arguments"},
		"an argument of create-runtime": {
			[]string{"create-runtime", "x"}, "{}", 2, "create-runtime has no arguments",
		},
		"create-runtime, no input": {[]string{"create-runtime"}, "", 1, "OCI state: the input is empty"},
		"create-runtime, no bundle": {
			[]string{"create-runtime"}, `{"id":"x","pid":1,"bundle":"/none"}`, 1, "open /none: no such file",
		},
		"precreate, no input": {[]string{"precreate"}, "", 1, "config.json on standard input: read the annotations"},
		"an unknown flag":     {[]string{"create-container", "--shell"}, "", 2, "--shell"},
		"no state":            {[]string{"create-container"}, "", 1, "OCI state: the input is empty"},
		"a damaged state":     {[]string{"create-container"}, "{", 1, "OCI state"},
		"the root is /": {
			[]string{"create-container"}, `{"id":"x","root":"/"}`, 1, `"/" cannot be a container's root`,
		},
		"a link to /": {
			[]string{"create-container"}, `{"id":"x","root":"/proc/self/root"}`, 1, "the root of the host",
		},
		"no such root": {
			[]string{"create-container"}, `{"id":"x","root":"/missing/root"}`, 1, "/missing: no such file",
		},
		"the host's mount": {
			[]string{"create-container"}, `{"id":"x","root":"/proc"}`, 1, "in the host's mount namespace",
		},
		"a relative bundle": {[]string{"create-container"}, `{"id":"x","bundle":"b"}`, 1, "not an absolute path"},
		"help":              {[]string{"--help"}, "", 0, "EXIT STATUS"},
		"version":           {[]string{"--version"}, "", 0, "prestart-hook v1.2.3\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(hookBinary(t), tc.args...)
			cmd.Stdin = strings.NewReader(tc.stdin)
			out, _ := cmd.CombinedOutput()
			if got := cmd.ProcessState.ExitCode(); got != tc.status || !strings.Contains(string(out), tc.want) {
				t.Errorf("status %d, want %d, output %q, want it to contain %q", got, tc.status, out, tc.want)
			}
		})
	}
}

func TestATerminalIsNoState(t *testing.T) {
	terminal, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		testenv.Skip(t, "needs pseudo terminals: "+err.Error())
	}
	defer func() { _ = terminal.Close() }()
	cmd := exec.Command(hookBinary(t), "create-container")
	cmd.Stdin = terminal
	out, _ := cmd.CombinedOutput()
	if status := cmd.ProcessState.ExitCode(); status != 2 ||
		!strings.Contains(string(out), "standard input is a terminal") {
		t.Errorf("status %d, output %q", status, out)
	}
}

// In a user namespace the bundle may be unreadable.
func TestTheWorkingDirectoryIsTheRootIfItIsAMountPoint(t *testing.T) {
	needRoot(t)
	c := newContainer(t)
	testenv.Must(c.t, os.Remove(filepath.Join(c.bundle, "config.json")))
	args := []string{"--libraries=/opt/driver:libcuda.so.1=libcuda.so.580.1"}
	if status, stderr := c.run(args...); status != 0 || stderr != "" ||
		c.found("libcuda.so.1") != "/opt/driver/libcuda.so.580.1" {
		t.Errorf("a mount: status %d, %s, library at %q", status, stderr, c.found("libcuda.so.1"))
	}
	testenv.Must(c.t, syscall.Unmount(c.root, syscall.MNT_DETACH))
	if status, stderr := c.run(args...); status != 1 ||
		!strings.Contains(stderr, "the working directory is not a container's root") {
		t.Errorf("an ordinary directory: status %d, %s", status, stderr)
	}
}

// Two specs in one container run the hook twice. The second run finds the files that the first has mounted.
func TestASecondRunInAReadOnlyRootChangesNothing(t *testing.T) {
	c := newContainer(t)
	addMuslLoader(c)
	c.write("/etc/ld.so.cache", string(validCache()))
	c.write("/etc/ld-musl-x86_64.path", "/image/lib")
	testenv.Must(c.t, syscall.Mount("", c.root, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, ""))
	t.Cleanup(func() {
		_ = syscall.Unmount(c.path("/etc/ld.so.cache"), syscall.MNT_DETACH)
		_ = syscall.Unmount(c.path("/etc/ld-musl-x86_64.path"), syscall.MNT_DETACH)
	})
	var before string
	for range 2 {
		status, stderr := c.run("--libraries=/opt/driver:libcuda.so.1=libcuda.so.580.1")
		if status != 0 || strings.Contains(stderr, "replaces") {
			t.Errorf("status %d, %s", status, stderr)
		}
		if c.found("libz.so.1") == "" || c.found("libcuda.so.1") == "" {
			t.Errorf("libz.so.1 is found at %q, libcuda.so.1 at %q", c.found("libz.so.1"), c.found("libcuda.so.1"))
		}
		if path, err := os.ReadFile(c.path("/etc/ld-musl-x86_64.path")); string(path) != "/image/lib\n/opt/driver\n" {
			t.Errorf("musl's path: %q, %v", path, err)
		}
		mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
		testenv.Must(c.t, err)
		if before != "" && string(mounts) != before {
			t.Errorf("the second run changed the mounts:\n%s\nbefore:\n%s", mounts, before)
		}
		before = string(mounts)
	}
}

// Some runtimes close the standard error of hooks.
func TestWarningsThatCannotBeWrittenAreNoError(t *testing.T) {
	c := newContainer(t)
	c.write("/etc/ld.so.cache", "damaged, which is a warning")
	r, w, err := os.Pipe()
	testenv.Must(c.t, err)
	testenv.Must(c.t, r.Close())
	defer func() { _ = w.Close() }()
	cmd := exec.Command(hookBinary(t), "create-container", "--libraries=/opt/driver:libcuda.so.1=libcuda.so.580.1")
	cmd.Stdin, cmd.Stderr = strings.NewReader(fmt.Sprintf(`{"id":"test","bundle":%q}`, c.bundle)), w
	if err := cmd.Run(); err != nil {
		t.Errorf("%v, although the work was done", err)
	}
}

func TestTheBinaryIsSmall(t *testing.T) {
	i, err := os.Stat(hookBinary(t))
	testenv.Must(t, err)
	if i.Size() > 7e6 {
		t.Errorf("the binary has %d bytes, want at most 7 MB", i.Size())
	}
}
