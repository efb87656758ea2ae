package mps

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

// readStatus returns the lines of /proc/PID/status by name.
func readStatus(t *testing.T, pid int) map[string]string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	must(t, err)
	lines := map[string]string{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		lines[name] = strings.TrimSpace(value)
	}
	return lines
}

// writableMounts returns the mounts of a process that are not read-only.
func writableMounts(t *testing.T, pid int) []string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	must(t, err)
	var points []string
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if options := strings.Split(fields[5], ","); !slices.Contains(options, "ro") {
			points = append(points, fields[4]+" "+strings.Join(options, ","))
		}
	}
	slices.Sort(points)
	return points
}

// startClient starts a client of a GPU's daemon as a user, and waits until a server answers it. It runs until end is
// called or the test ends.
func (s *testSupervisor) startClient(n int, uid uint32) (end func()) {
	s.t.Helper()
	must(s.t, os.Chmod(filepath.Dir(filepath.Dir(s.node.Root())), 0o755)) // users can run the driver's programs
	must(s.t, os.Chmod(filepath.Dir(s.node.Root()), 0o755))
	must(s.t, os.Chmod(s.opts.Dir, 0o755))
	const script = `mount --bind "$0" /dev/shm && exec setpriv --reuid "$1" "$2" 600`
	cmd := exec.Command("sh", "-c", script, filepath.Join(s.dir(n), shmName), fmt.Sprint(uid), s.node.MPSClient())
	cmd.Env = []string{
		"PATH=" + os.Getenv("PATH"), "LD_LIBRARY_PATH=" + filepath.Dir(s.node.Library()),
		"CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(s.dir(n), pipeName),
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Setpgid: true, Pdeathsig: unix.SIGKILL}
	cmd.Stderr = s.t.Output()
	out, err := cmd.StdoutPipe()
	must(s.t, err)
	must(s.t, cmd.Start())
	end = sync.OnceFunc(func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL); _ = cmd.Wait() })
	s.t.Cleanup(end)
	_, err = out.Read(make([]byte, 1))
	must(s.t, err)
	return end
}

func TestDaemonsAreConfined(t *testing.T) {
	s := newTestSupervisor(t)
	s.start()
	s.share(0)
	daemon := s.awaitReady(0)
	s.startClient(0, 1000)
	c, err := s.control(s.dir(0))
	must(t, err)
	servers, err := c.servers(t.Context())
	must(t, err)
	if len(servers) != 1 {
		t.Fatalf("servers %v", servers)
	}

	const none, killAndSetuid = "0000000000000000", "00000000000000a0" // bits 5 and 7 of capability.h
	for pid, has := range map[int]string{daemon: killAndSetuid, servers[0]: none} {
		got := readStatus(t, pid)
		want := map[string]string{
			"CapInh": none, "CapPrm": has, "CapEff": has, "CapBnd": killAndSetuid, "CapAmb": none, "NoNewPrivs": "1",
		}
		for name := range got {
			if want[name] == "" {
				delete(got, name)
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("process %d (-want +got)\n%s", pid, diff)
		}
		for _, ns := range []string{"mnt", "net", "ipc"} {
			here, err := os.Readlink("/proc/self/ns/" + ns)
			must(t, err)
			there, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
			must(t, err)
			if here == there {
				t.Errorf("process %d is in the node's %s namespace", pid, ns)
			}
		}
		const flags = " rw,nosuid,nodev,noexec,relatime,nosymfollow"
		paths := []string{"/dev/shm" + flags, s.dir(0) + "/log" + flags, s.dir(0) + "/pipe" + flags}
		if diff := cmp.Diff(paths, writableMounts(t, pid)); diff != "" {
			t.Errorf("what process %d can write to (-want +got)\n%s", pid, diff)
		}
	}

	// It sees only what programs and the driver need.
	root := fmt.Sprintf("/proc/%d/root", daemon)
	entries, err := os.ReadDir(filepath.Join(root, s.dir(0)))
	must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if diff := cmp.Diff([]string{logName, pipeName}, names); diff != "" {
		t.Errorf("in the GPU's directory (-want +got)\n%s", diff)
	}
	for _, dir := range []struct {
		path string
		has  *regexp.Regexp
	}{
		{"/", regexp.MustCompile(`^(bin|dev|etc|lib.*|nix|proc|sbin|sys|tmp|usr)$`)}, // the simulated node is in /tmp
		{"/etc", regexp.MustCompile(`^(alternatives|group|ld.so.cache|localtime|nsswitch.conf|nvidia|passwd)$`)},
		{"/dev", regexp.MustCompile(`^(null|zero|full|u?random|shm|nvidia.*)$`)},
	} {
		entries, err := os.ReadDir(root + dir.path)
		must(t, err)
		for _, e := range entries {
			if !dir.has.MatchString(e.Name()) {
				t.Errorf("in %s it sees %s", dir.path, e.Name())
			}
		}
	}
	for _, path := range []string{"/usr/bin/env", "/proc/self/status", "/etc/passwd", "/dev/null", "/dev/urandom"} {
		if _, err := os.Stat(root + path); err != nil {
			t.Error(err)
		}
	}
}

// A container may have taken over the daemon.
func TestConfinedProgramsCannotChangeTheNode(t *testing.T) {
	s := newTestSupervisor(t)
	prepareGPU(t, s.opts.Dir, testGPU)
	dir := t.TempDir()
	script := filepath.Join(dir, "bin", "control")
	must(t, os.Mkdir(filepath.Dir(script), 0o755))
	testenv.WriteProgram(t, script, []byte(`#!/bin/sh
try() { ("$@") >/dev/null 2>&1 && echo "could $*"; }
for path in / /etc /usr /dev `+dir+`/bin /proc/sys/vm/swappiness /sys; do try test -w $path; done
try mount -t tmpfs none /etc
try mount -o remount,rw /usr
try umount /proc
try umount /dev/null
try mknod "$CUDA_MPS_PIPE_DIRECTORY/mem" c 1 1
try chown 1000 "$CUDA_MPS_PIPE_DIRECTORY"
try ls /proc/1/root/
try nsenter -t 1 -m true
try unshare -m true
try test -e `+dir+`/secret
try test -e `+s.opts.Dir+`/`+testGPU+`/daemon.json
cd "$CUDA_MPS_PIPE_DIRECTORY" && try touch ours
cd "$CUDA_MPS_LOG_DIRECTORY" && try touch ours
cd /dev/shm && try touch ours
try test -w /dev/null
echo end
`))
	must(t, os.WriteFile(filepath.Join(dir, "secret"), nil, 0o644))
	p := Program{Path: script, SearchPath: []string{"/usr/bin", "/bin", "/usr/sbin", "/sbin"}, Driver: "1", Root: dir}
	daemon, err := startTestDaemon(filepath.Join(s.opts.Dir, testGPU), p)
	must(t, err)
	<-daemon.done()
	daemon.close()
	text, err := os.ReadFile(filepath.Join(s.opts.Dir, testGPU, outputName))
	must(t, err)
	const want = `could touch ours
could touch ours
could touch ours
could test -w /dev/null
end
`
	if diff := cmp.Diff(want, string(text)); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
}

// A daemon must not hold volumes of pods, nor see later mounts, which it could write to.
func TestDaemonsHaveNoMountsOfTheNode(t *testing.T) {
	s := newTestSupervisor(t)
	mount := func(name, at string) string {
		must(t, os.Mkdir(filepath.Join(at, name), 0o755))
		must(t, unix.Mount(name, filepath.Join(at, name), "tmpfs", 0, ""))
		t.Cleanup(func() { _ = unix.Unmount(filepath.Join(at, name), unix.MNT_DETACH) })
		return filepath.Join(at, name)
	}
	mount("volume", t.TempDir())
	shown := mount("shown", filepath.Join(s.node.Root(), "usr"))
	must(t, unix.Mount("", shown, "", unix.MS_SHARED, "")) // as systemd makes all
	s.start()
	s.share(0)
	pid := s.awaitReady(0)
	mount("late", shown)
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	must(t, err)
	found := regexp.MustCompile(` - tmpfs (volume|shown|late) `).FindAllString(string(mounts), -1)
	if diff := cmp.Diff([]string{" - tmpfs shown "}, found); diff != "" {
		t.Errorf("the daemon has (-want +got)\n%s", diff)
	}
	here, err := os.ReadFile("/proc/thread-self/mountinfo")
	must(t, err)
	if strings.Count(string(here), s.dir(0)) != 1 {
		t.Errorf("the daemon's mounts are visible here:\n%s", here)
	}
}

func TestLibrariesAreLinked(t *testing.T) {
	libraries := map[string]string{"libcuda.so.1": "/d/libcuda.so.1", "libnew.so": "/e/libnew.so"}
	r := rootBuilder{path: t.TempDir()}
	must(t, r.linkLibraries(libraries))
	got := map[string]string{}
	entries, err := os.ReadDir(filepath.Join(r.path, librariesDir))
	must(t, err)
	for _, e := range entries {
		got[e.Name()], _ = os.Readlink(filepath.Join(r.path, librariesDir, e.Name()))
	}
	if diff := cmp.Diff(libraries, got); diff != "" {
		t.Errorf("-want +got\n%s", diff)
	}
	for _, name := range []string{"../x", "", ".."} {
		r := rootBuilder{path: t.TempDir()}
		if err := r.linkLibraries(map[string]string{name: "/y"}); err == nil {
			t.Errorf("%q is the name of a library", name)
		}
	}
}
