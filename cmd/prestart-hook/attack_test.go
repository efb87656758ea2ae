package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/hoststate"
	"gpu-cdi-plugin/test/lib/testenv"
)

// The files attack_*_test.go attack every position of the hook in the ways that were published for hooks of its kind,
// a file for each way in: paths of the image, files that are exchanged meanwhile, the environment, annotations, and
// what the runtime says of the container. test/lib/hoststate compares the host before and after each attack.
//
// This is how long the attacks last that exchange files meanwhile, each. A minute makes thousands of starts:
//
//	go test ./cmd/prestart-hook -run Attack -args -attack 60s
var attackTime = flag.Duration("attack", time.Second, "how long files are exchanged in each attack")

// secret is the text of files outside the root, which no file of the container may get.
const secret = "/precious:/secret\n"

// attack is a container in the stage in which createRuntime and createContainer hooks run: this process is its runtime,
// and a child of it is in a mount namespace with the container's root. The host is the mount namespace of the test.
type attack struct {
	t *testing.T
	// outside has what belongs to the host: the driver's files, secrets, and the root of another container, the victim.
	// Root is that of the container.
	outside, bundle, root string
	// users gives the container a user namespace.
	users bool
	// volumes are directories or files of the host by their paths in the container.
	volumes map[string]string
	// devices are those of the annotation.
	devices string
	// annotations are more of them.
	annotations map[string]string
	env         []string
	process     *exec.Cmd
	cgroup      string // of restrict
}

const firstAttackID = 100000

func newAttack(t *testing.T) *attack {
	t.Helper()
	needRoot(t)
	testenv.MountNamespace(t)
	dir := t.TempDir()
	a := &attack{
		t: t, outside: dir + "/outside", bundle: dir + "/bundle", root: dir + "/bundle/rootfs",
		devices: "nvidia.com/gpu=0", volumes: map[string]string{},
	}
	for top := dir; top != "/tmp" && top != "/"; top = filepath.Dir(top) {
		testenv.Must(t, os.Chmod(top, 0o755))
	}
	for _, d := range []string{
		"outside/driver/dir", "outside/volume", "outside/victim/etc", "outside/victim/dev", "bundle/rootfs/dev",
		"bundle/rootfs/proc", "bundle/rootfs/etc", "bundle/rootfs/usr/lib/x",
	} {
		testenv.Must(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	for name, data := range map[string]string{
		"driver/libcuda.so.580.1": "driver", "driver/dir/file": "driver", "file": "of the host",
		"volume/file": "of the volume",
		"secret":      secret, "volume/secret": secret, "libcuda.so.999.1": secret,
	} {
		testenv.Must(t, os.WriteFile(filepath.Join(a.outside, name), []byte(data), 0o600))
	}
	for name, device := range map[string]uint64{"nvidia0": unix.Mkdev(195, 0), "zero": unix.Mkdev(1, 5)} {
		testenv.Must(t, unix.Mknod(a.outside+"/driver/"+name, unix.S_IFCHR|0o666, int(device)))
	}
	_, loader := multiarch()
	for _, root := range []string{a.root, a.outside + "/victim"} {
		c := &container{t: t, root: root}
		c.write(loader, "loader")
		addMuslLoader(c)
	}
	testenv.MountPoint(t, a.outside+"/victim")
	a.mount("tmpfs", "/run", "tmpfs", "mode=755")
	testenv.Must(t, os.Mkdir("/run/cdi", 0o755))
	if _, err := os.Stat("/etc/gpu-cdi-plugin"); err == nil { // the tests are those of a node without a policy
		a.mount("tmpfs", "/etc/gpu-cdi-plugin", "tmpfs", "mode=755")
	}
	a.writeJSON("/run/cdi/gpu.json", a.spec())
	return a
}

func (a *attack) mount(source, target, kind, options string) {
	a.t.Helper()
	testenv.Must(a.t, unix.Mount(source, target, kind, 0, options))
	a.t.Cleanup(func() { _ = unix.Unmount(target, unix.MNT_DETACH) })
}

func (a *attack) writeJSON(name string, content any) {
	a.t.Helper()
	data, err := json.Marshal(content)
	testenv.Must(a.t, err)
	testenv.Must(a.t, os.WriteFile(name, data, 0o644))
}

// workArgs are the createContainer work of the spec.
var workArgs = []string{
	"create-container", "--libraries=/opt/driver:libcuda.so.1=libcuda.so.580.1",
	"--link=/usr/lib/x/libcuda.so.1::libcuda.so.580.1", "--link=/usr/lib/x/new/libcuda.so::libcuda.so.1",
	"--driver-version=580.1", "--egl-profile", "--mask-params", "--dri=0000:1b:00.0/card0",
}

func (a *attack) spec() map[string]any {
	node := func(path, from string) map[string]any {
		return map[string]any{"path": path, "hostPath": a.outside + "/driver/" + from, "permissions": "rw"}
	}
	mount := func(from, to string) map[string]any {
		return map[string]any{
			"hostPath": a.outside + "/driver/" + from, "containerPath": to,
			"options": []string{"ro", "nosuid", "nodev", "rbind"},
		}
	}
	return map[string]any{
		"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "containerEdits": map[string]any{
			"mounts": []any{
				mount("libcuda.so.580.1", "/opt/driver/libcuda.so.580.1"), mount("dir", "/opt/driver/dir"),
			},
			"hooks": []any{map[string]any{
				"hookName": "createContainer", "path": hookBinary(a.t),
				"args": append([]string{"prestart-hook"}, workArgs...),
			}},
		},
		"devices": []any{map[string]any{"name": "0", "containerEdits": map[string]any{
			"deviceNodes": []any{node("/dev/nvidia0", "nvidia0"), node("/dev/dri/card0", "zero")},
		}}},
	}
}

func (a *attack) allAnnotations() map[string]string {
	annotations := map[string]string{"cdi.k8s.io/gpu": a.devices}
	maps.Copy(annotations, a.annotations)
	return annotations
}

func (a *attack) config(root string) map[string]any {
	namespaces := []any{map[string]string{"type": "mount"}}
	if a.users {
		namespaces = append(namespaces, map[string]string{"type": "user"})
	}
	return map[string]any{
		"ociVersion": "1.0.2", "root": map[string]any{"path": root}, "annotations": a.allAnnotations(),
		"process": map[string]any{"args": []string{"sh"}, "cwd": "/", "env": []string{"PATH=/bin"}},
		"linux": map[string]any{"namespaces": namespaces, "resources": map[string]any{
			"devices": []any{map[string]any{"allow": false, "access": "rwm"}},
		}},
	}
}

// start makes the container's process and its mounts. /proc is that of the host, with its process 1.
func (a *attack) start() {
	a.t.Helper()
	a.writeJSON(a.bundle+"/config.json", a.config("rootfs"))
	script := `mount -n --rbind "$0" "$0"; mount -n --rbind /proc "$0/proc"
while [ $# -gt 0 ]; do mount -n --rbind "$1" "$2"; shift 2; done; echo ready; exec sleep 600`
	args := []string{"-ec", script, a.root}
	for to, from := range a.volumes {
		args = append(args, from, filepath.Join(a.root, to))
	}
	a.process = exec.Command("/bin/sh", args...)
	a.process.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	if a.users {
		ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: firstAttackID, Size: 1000}}
		a.process.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids,
			Credential: &syscall.Credential{NoSetGroups: true},
		}
	}
	var stderr bytes.Buffer
	a.process.Stderr = &stderr
	out, err := a.process.StdoutPipe()
	testenv.Must(a.t, err)
	testenv.Must(a.t, a.process.Start())
	process := a.process
	a.t.Cleanup(func() { end(process) })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		a.t.Fatalf("the container's process: %q, %v: %s", line, err, &stderr)
	}
}

func end(process *exec.Cmd) {
	_ = process.Process.Kill()
	_ = process.Wait()
}

func (a *attack) pid() int { return a.process.Process.Pid }

// state is the OCI state of the container.
func (a *attack) state() string { return a.stateOf(a.pid()) }

func (a *attack) stateOf(pid int) string {
	annotations, err := json.Marshal(a.allAnnotations())
	testenv.Must(a.t, err)
	return fmt.Sprintf(`{"ociVersion":"1.0.2","id":"x","status":"creating","pid":%d,"bundle":%q,"annotations":%s}`,
		pid, a.bundle, annotations)
}

// position runs the hook for the container that was started.
type position func(a *attack) (status int, stderr string)

func inCreateRuntime(a *attack) (status int, stderr string) {
	a.t.Helper()
	return a.hook(strings.NewReader(a.state()), hookBinary(a.t), "create-runtime")
}

func inCreateContainer(a *attack) (status int, stderr string) {
	a.t.Helper()
	args := append([]string{"--mount=" + a.proc("ns/mnt"), "--wdns=" + a.root, hookBinary(a.t)}, workArgs...)
	return a.hook(strings.NewReader(a.stateOf(1)), append([]string{testenv.Command(a.t, "nsenter")}, args...)...)
}

// hook runs a command line with the hook.
func (a *attack) hook(stdin io.Reader, command ...string) (status int, stderr string) {
	a.t.Helper()
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Dir, cmd.Env, cmd.Stdin = a.bundle, a.env, stdin
	var out bytes.Buffer
	cmd.Stderr = &out
	begin := time.Now()
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		a.t.Fatal(err)
	}
	if took := time.Since(begin); took > deadline+10*time.Second {
		a.t.Errorf("the hook took %v", took)
	}
	if status = cmd.ProcessState.ExitCode(); status != 0 && status != 1 || strings.Contains(out.String(), "goroutine") {
		a.t.Errorf("the hook crashed with status %d: %s", status, &out)
	}
	return status, out.String()
}

func (a *attack) proc(name string) string { return fmt.Sprintf("/proc/%d/%s", a.pid(), name) }

// mountTable is that of the container's process, without mounts of other tests, which come and go.
func (a *attack) mountTable() string {
	a.t.Helper()
	data, err := os.ReadFile(a.proc("mountinfo"))
	testenv.Must(a.t, err)
	var own strings.Builder
	for line := range strings.Lines(string(data)) {
		point := strings.Fields(line)[4]
		if !strings.HasPrefix(point, os.TempDir()+"/") || strings.HasPrefix(point, filepath.Dir(a.outside)) {
			own.WriteString(line)
		}
	}
	return own.String()
}

// checkProc fails the test if something was mounted over a file of /proc, to which the runtime still writes.
func (a *attack) checkProc() {
	a.t.Helper()
	for line := range strings.Lines(a.mountTable()) {
		if fields := strings.Fields(line); strings.HasPrefix(fields[4], a.root+"/proc/") {
			a.t.Errorf("a mount over a file of /proc: %s", line)
		}
	}
}

// host takes the state of the host.
func (a *attack) host() *hoststate.State {
	a.t.Helper()
	dirs := []string{a.outside, "/run"}
	if a.cgroup != "" {
		dirs = append(dirs, a.cgroup)
	}
	return hoststate.Take(a.t, dirs...)
}

func (a *attack) path(name string) string { return filepath.Join(a.root, name) }

// inside opens a path in the container, as its process would after it has pivoted.
func (a *attack) inside(name string, flags uint64) (*os.File, error) {
	root, err := os.OpenFile(a.proc("root")+a.root, unix.O_PATH|unix.O_DIRECTORY, 0)
	testenv.Must(a.t, err)
	defer func() { _ = root.Close() }()
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	fd, err := unix.Openat2(int(root.Fd()), name, &how)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// read reads a file of the container, or returns the text of the error.
func (a *attack) read(name string) string {
	f, err := a.inside(name, unix.O_PATH)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = f.Close() }()
	data, err := readSome(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// readSome reads the first mebibyte of a file: some are huge.
func readSome(name string) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return io.ReadAll(io.LimitReader(f, 1<<20))
}

// checkNoSecret fails the test if the hook has copied a secret into a file that the container's users can read.
func (a *attack) checkNoSecret() {
	a.t.Helper()
	for _, name := range []string{
		"/etc/ld.so.cache", "/etc/ld-musl-x86_64.path", "/etc/ld.so.conf.d/00-gpu-cdi-plugin.conf",
	} {
		f, err := a.inside(name, unix.O_PATH)
		if err != nil {
			continue
		}
		// Another thread may exchange the file: the one that is looked at is read.
		info, err := f.Stat()
		var data []byte
		if err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o044 != 0 {
			data, _ = readSome(fmt.Sprintf("/proc/self/fd/%d", f.Fd())) // an unreadable file reveals nothing
		}
		_ = f.Close()
		if strings.Contains(string(data), "precious") {
			a.t.Errorf("every user can read a secret in %s", name)
		}
	}
}

// checkGiven fails the test unless the container has its devices and libraries.
func (a *attack) checkGiven() {
	a.t.Helper()
	for name, device := range map[string]uint64{"/dev/nvidia0": unix.Mkdev(195, 0), "/dev/dri/card0": unix.Mkdev(1, 5)} {
		var st unix.Stat_t
		f, err := a.inside(name, unix.O_PATH)
		if err == nil {
			err = unix.Fstat(int(f.Fd()), &st)
			_ = f.Close()
		}
		if err != nil || st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != device {
			a.t.Errorf("%s has mode %o and device %#x, %v", name, st.Mode, st.Rdev, err)
		}
	}
	for _, name := range []string{"/opt/driver/libcuda.so.580.1", "/opt/driver/dir/file"} {
		if data := a.read(name); data != "driver" {
			a.t.Errorf("%s has %q", name, data)
		}
	}
}

// own makes what the test has put into the root a part of the image.
func (a *attack) own() {
	a.t.Helper()
	if a.users {
		out, err := exec.Command("chown", "-hR", fmt.Sprint(firstAttackID, ":", firstAttackID), a.root).CombinedOutput()
		if err != nil {
			a.t.Fatalf("chown: %v: %s", err, out)
		}
	}
}

// An attack must fail because of what the hook does, so without one the hook must work.
func TestAttackOfNobody(t *testing.T) {
	for name, users := range map[string]bool{"": false, "a user namespace": true} {
		t.Run(name, func(t *testing.T) {
			a := newAttack(t)
			a.users = users
			a.own()
			a.start()
			before := a.host()
			for range 2 {
				if status, stderr := inCreateRuntime(a); status != 0 {
					t.Fatalf("status %d: %s", status, stderr)
				}
			}
			a.checkGiven()
			if cache := a.read("/etc/ld.so.cache"); !strings.Contains(cache, "/opt/driver/libcuda.so.580.1") {
				t.Errorf("the loader's cache has %q", cache)
			}
			if status, stderr := inCreateContainer(a); status != 0 {
				t.Errorf("createContainer: status %d: %s", status, stderr)
			}
			a.checkNoSecret()
			before.Check(t)
		})
	}
}
