package mps

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// newDirs makes the directories of a GPU and returns the one that they are in.
func newDirs(t *testing.T) (own string) {
	t.Helper()
	testenv.Root(t)
	dir := shortDir(t)
	ready(t, dir, testGPU)
	return filepath.Join(dir, testGPU)
}

// allProcesses skips a test of what is told by the node's processes where they are not all seen, as in a container.
func allProcesses(t *testing.T) {
	t.Helper()
	if !seesAllProcesses() {
		testenv.Skip(t, "needs to see all processes of the machine, as in a container that is started with --pid=host")
	}
}

// container is a process that has a directory as its /dev/shm, as a container of the GPU has. It ends with end.
func container(t *testing.T, dir string) (end func()) {
	t.Helper()
	return processes(t, `mount --bind "$0" /dev/shm && echo ready && exec sleep 600`, dir)
}

// processes are those of a script in a mount namespace of its own, once it has printed something.
func processes(t *testing.T, script string, args ...string) (end func()) {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"-c", script}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Setpgid: true, Pdeathsig: unix.SIGKILL}
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	end = func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL); _ = cmd.Wait() }
	t.Cleanup(end)
	_, err = out.Read(make([]byte, 1))
	must(t, err)
	return end
}

func statfs(t *testing.T, path string) unix.Statfs_t {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(path, &st))
	return st
}

func TestVolumesAreLimited(t *testing.T) {
	own := newDirs(t)
	for name, want := range map[string]struct{ bytes, files uint64 }{
		pipeName: {pipeBytes, pipeInodes}, shmName: {testShm, testShm / shmPerInode},
	} {
		st := statfs(t, filepath.Join(own, name))
		const flags = unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC
		if st.Type != unix.TMPFS_MAGIC || st.Flags&flags != flags || st.Blocks*uint64(st.Bsize) != want.bytes || st.Files != want.files {
			t.Errorf("%s is %+v", name, st)
		}
	}
	shm := filepath.Join(own, shmName)
	if err := os.WriteFile(filepath.Join(shm, "large"), make([]byte, testShm+1), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a file that is too large: %v", err)
	}
	var err error
	for n := 0; err == nil && n <= testShm/shmPerInode; n++ {
		err = os.WriteFile(filepath.Join(shm, strconv.Itoa(n)), nil, 0o600)
	}
	if !errors.Is(err, unix.ENOSPC) {
		t.Errorf("many files: %v", err)
	}
	must(t, os.WriteFile(filepath.Join(own, "ours"), make([]byte, testShm), 0o600))
}

// What is left by containers that have ended is gone for those of the next daemon; while one is there it keeps what it
// has, since it is to be the next daemon's client.
func TestVolumesBeginEmptyUnlessSomebodyHasThem(t *testing.T) {
	allProcesses(t)
	own := newDirs(t)
	dir, shm := filepath.Dir(own), filepath.Join(own, shmName)
	left := func() bool { _, err := os.Lstat(filepath.Join(shm, "left")); return err == nil }
	leave := func() { must(t, os.WriteFile(filepath.Join(shm, "left"), nil, 0o600)) }

	leave()
	end := container(t, shm)
	must(t, os.Chmod(shm, 0o700)) // as root in a container can
	plain, err := prepare(dir, testGPU, 2*testShm)
	must(t, err)
	info, err := os.Stat(shm)
	must(t, err)
	if size := statfs(t, shm).Blocks * uint64(statfs(t, shm).Bsize); plain != "" || !left() || size != 2*testShm ||
		info.Mode().Perm() != 0o777 {
		t.Errorf("with a container: %q, left %t, %d bytes, %v", plain, left(), size, info.Mode())
	}

	end()
	ready(t, dir, testGPU)
	if left() {
		t.Error("without a container the file of before is there")
	}
	leave()
	must(t, dropVolumes(own))
	if left() || prepared(own) {
		t.Errorf("after the end: left %t, prepared %t", left(), prepared(own))
	}
}

// In a container there may be programs in a chroot, which see less of its mounts than the others.
func TestVolumesInUseBesideAChroot(t *testing.T) {
	allProcesses(t)
	own := newDirs(t)
	shm := filepath.Join(own, shmName)
	must(t, os.WriteFile(filepath.Join(shm, "left"), nil, 0o600))
	processes(t, `mount --bind "$0" /dev/shm && mount --bind / "$1" && { sleep 600 & exec chroot "$1" sh -c 'echo ready; exec sleep 600'; }`,
		shm, t.TempDir())
	ready(t, filepath.Dir(own), testGPU)
	if _, err := os.Lstat(filepath.Join(shm, "left")); err != nil {
		t.Errorf("a container that runs is parted from the GPU's next daemon: %v", err)
	}
}

// A node's GPUs may be shared already when the plugin is replaced by this one.
func TestDirectoriesOfBefore(t *testing.T) {
	allProcesses(t)
	testenv.Root(t)
	dir, secret := shortDir(t), filepath.Join(t.TempDir(), "secret")
	must(t, makeDirs(dir, testGPU))
	shm := filepath.Join(dir, testGPU, shmName)
	must(t, os.WriteFile(secret, []byte("secret"), 0o600))
	must(t, os.Symlink(filepath.Dir(secret), filepath.Join(shm, "link")))
	end := container(t, shm)
	plain, err := prepare(dir, testGPU, testShm)
	if err != nil || !strings.Contains(plain, "containers have had it since before") {
		t.Errorf("with a container: %q, %v", plain, err)
	}
	if _, err := os.Lstat(filepath.Join(shm, "link")); err != nil {
		t.Errorf("a container lost its file: %v", err)
	}
	end()
	ready(t, dir, testGPU)
	must(t, dropVolumes(filepath.Join(dir, testGPU)))
	if entries, err := os.ReadDir(shm); len(entries) > 0 || err != nil {
		t.Errorf("below the volume there are %v, %v", entries, err)
	}
	if text, err := os.ReadFile(secret); string(text) != "secret" {
		t.Errorf("the link was followed: %v", err)
	}
}

func TestClearDirSaysWhatStays(t *testing.T) {
	testenv.Root(t)
	dir := shortDir(t)
	busy := filepath.Join(dir, pipeName, "busy")
	must(t, os.MkdirAll(busy, 0o755))
	must(t, os.WriteFile(filepath.Join(dir, pipeName, "file"), nil, 0o600))
	own, err := openDir(unix.AT_FDCWD, dir)
	must(t, err)
	defer own.Close()
	must(t, unix.Mount("busy", busy, "tmpfs", 0, ""))
	if err := clearDir(own, pipeName); !errors.Is(err, unix.EBUSY) {
		t.Errorf("with a mount: %v", err)
	}
	must(t, unix.Unmount(busy, 0))
	must(t, clearDir(own, pipeName))
	if entries, err := os.ReadDir(filepath.Join(dir, pipeName)); len(entries) > 0 || err != nil {
		t.Errorf("there are %v, %v", entries, err)
	}
}

// An administrator may have mounted something there, which stays.
func TestMountsOfOthersStay(t *testing.T) {
	testenv.Root(t)
	dir := shortDir(t)
	must(t, makeDirs(dir, testGPU))
	own := filepath.Join(dir, testGPU)
	shm := filepath.Join(own, shmName)
	must(t, unix.Mount("theirs", shm, "tmpfs", 0, "size=8m"))
	t.Cleanup(func() { must(t, unix.Unmount(shm, 0)) })
	must(t, os.WriteFile(filepath.Join(shm, "theirs"), nil, 0o600))
	ready(t, dir, testGPU)
	must(t, resizeShared(own, testShm))
	must(t, dropVolumes(own))
	if size := statfs(t, shm).Blocks * uint64(statfs(t, shm).Bsize); size != 8<<20 {
		t.Errorf("it has %d bytes", size)
	}
	if _, err := os.Lstat(filepath.Join(shm, "theirs")); err != nil || prepared(own) {
		t.Errorf("%v, prepared %t", err, prepared(own))
	}
}

// apart runs f where mounts are seen by nobody else, as in a service with PrivateTmp=.
func apart(t *testing.T, f func()) {
	t.Helper()
	must(t, proc.OnThread(func() error {
		err := errors.Join(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""))
		if err == nil {
			f()
		}
		return err
	}))
}

// What is mounted where the containers' runtime does not see it would part the daemon from its clients.
func TestVolumesThatTheHostDoesNotSee(t *testing.T) {
	allProcesses(t)
	testenv.Root(t)
	dir := shortDir(t)
	apart(t, func() {
		plain, err := prepare(dir, testGPU, testShm)
		if err != nil || !strings.Contains(plain, "is not seen on the host") || prepared(filepath.Join(dir, testGPU)) {
			t.Errorf("%q, %v, prepared %t", plain, err, prepared(filepath.Join(dir, testGPU)))
		}
	})
}

// What a container leaves in its daemon's directories is gone with the daemon, and what is mounted for one GPU is not held
// by the daemon of another.
func TestVolumesOfDaemons(t *testing.T) {
	allProcesses(t)
	k := newKept(t)
	k.start()
	k.want(0)
	k.ready(0)
	k.want(0, 1)
	k.ready(1)
	left := filepath.Join(k.own(1), shmName, "left")
	must(t, os.WriteFile(left, nil, 0o600))
	k.stop()

	// The next plugin takes them over as they are.
	k.renew(k.opts.Dir)
	k.start()
	k.want(0, 1)
	k.ready(0)
	second := k.ready(1)
	if _, err := os.Lstat(left); err != nil {
		t.Error(err)
	}
	// Larger parts are given to containers that are there.
	more := half
	more.SharedMemoryBytes = 4 * testShm
	k.Want([]Want{{UUID: k.gpu(0), Limits: half}, {UUID: k.gpu(1), Limits: more}})
	eventually(t, "more memory", func() bool { return k.Problem(k.gpu(1), more) == "" })
	if size := statfs(t, filepath.Dir(left)).Blocks * uint64(statfs(t, left).Bsize); size != 4*testShm {
		t.Errorf("it has %d bytes", size)
	}
	must(t, unix.Kill(second, unix.SIGKILL))
	eventually(t, "another daemon", func() bool { _, err := os.Lstat(left); return err != nil && k.Problem(k.gpu(1), more) == "" })
	mounts, err := os.ReadFile("/proc/" + strconv.Itoa(pidOf(t, k.own(1))) + "/mountinfo")
	must(t, err)
	if !bytes.Contains(mounts, []byte(k.gpu(1))) || bytes.Contains(mounts, []byte(k.gpu(0))) {
		t.Errorf("the daemon of GPU 1 has\n%s", mounts)
	}

	// Nothing is left when nobody wants them, also of a daemon that a plugin was about to start when it was killed.
	k.stop()
	ready(t, k.opts.Dir, k.gpu(2))
	must(t, k.modes.SetExclusive(t.Context(), k.gpu(2), true))
	k.renew(k.opts.Dir)
	k.start()
	k.want()
	for n := range 3 {
		eventually(t, "the end of all", func() bool { return !prepared(k.own(n)) && !k.modes.is(k.gpu(n)) })
	}
}

func pidOf(t *testing.T, own string) int {
	t.Helper()
	r, err := readRecord(own)
	must(t, err)
	return r.PID
}

func TestParseMounts(t *testing.T) {
	for name, c := range map[string]struct {
		line string
		want mount
	}{
		"a usual one": {
			"36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue",
			mount{id: 36, dev: "98:0", root: "/mnt1", point: "/mnt2", slave: true, kind: "ext3", source: "/dev/root"},
		},
		"no optional field": {
			"22 27 0:21 / /proc rw - proc proc rw",
			mount{id: 22, dev: "0:21", root: "/", point: "/proc", kind: "proc", source: "proc"},
		},
		"two optional fields": {
			"1 2 0:3 / /run rw shared:5 master:1 - tmpfs x rw",
			mount{id: 1, dev: "0:3", root: "/", point: "/run", shared: true, slave: true, kind: "tmpfs", source: "x"},
		},
		"paths that are written with numbers": {
			`1 2 0:3 /a\040-\040b /c\134\011d\012 rw - tmpfs a\043b rw`,
			mount{id: 1, dev: "0:3", root: "/a - b", point: "/c\\\td\n", kind: "tmpfs", source: "a#b"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseMounts(strings.NewReader(c.line + "\n"))
			if diff := cmp.Diff([]mount{c.want}, got, cmp.AllowUnexported(mount{})); err != nil || diff != "" {
				t.Errorf("%v, -want +got\n%s", err, diff)
			}
		})
	}
	for _, line := range []string{"", "x 2 0:3 / /run rw - tmpfs x rw", "1 2 0:3 / /run - tmpfs x", "1 2 0:3 / /run rw"} {
		if got, err := parseMounts(strings.NewReader(line + "\n")); err == nil {
			t.Errorf("%.40q: %v", line, got)
		}
	}
}

func TestMountsBesideTooLongOnes(t *testing.T) {
	const line = "1 2 0:3 / /run rw - tmpfs x rw\n"
	long := "1 2 0:3 / /" + strings.Repeat("x", 3*maxMountLine) + " rw - tmpfs x rw\n"
	got, err := parseMounts(strings.NewReader(line + long + long + line))
	if err != nil || len(got) != 2 || got[1].point != "/run" {
		t.Errorf("%d mounts, %v", len(got), err)
	}
	path := filepath.Join(t.TempDir(), "mountinfo")
	must(t, os.WriteFile(path, []byte(line), 0o600))
	left := int64(2*len(line)) - 1
	if got, err := readMountsUpTo(path, &left); len(got) != 1 || err != nil {
		t.Errorf("what is few: %v, %v", got, err)
	}
	if got, err := readMountsUpTo(path, &left); err == nil {
		t.Errorf("more than is allowed together: %v", got)
	}
}

func TestReachesHost(t *testing.T) {
	for name, c := range map[string]struct {
		line string
		want bool
	}{
		"a directory of the host, Bidirectional":   {"1 2 0:3 / /run/x rw shared:5 - tmpfs x rw", true},
		"a directory of the host, HostToContainer": {"1 2 0:3 / /run/x rw master:5 - tmpfs x rw", false},
		"a directory of the host, as usual":        {"1 2 0:3 / /run/x rw - tmpfs x rw", false},
		"a node in a container":                    {"1 2 0:3 / / rw - overlay x rw", true},
		"a service with PrivatePIDs=, PrivateTmp=": {"1 2 0:3 / / rw shared:5 master:1 - ext4 x rw", false},
		"a service with MountFlags=slave":          {"1 2 0:3 / / rw master:1 - ext4 x rw", false},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := parseMount(c.line)
			must(t, err)
			if m.reachesHost() != c.want {
				t.Errorf("it is %t", m.reachesHost())
			}
		})
	}
}

func FuzzParseMounts(f *testing.F) {
	f.Add("36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:7 - ext3 /dev/root rw\n")
	f.Add("1 2 0:3 /a\\040b / rw - tmpfs x rw\n1\n")
	f.Fuzz(func(t *testing.T, text string) {
		list, err := parseMounts(strings.NewReader(text))
		if (len(list) > 0) == (err != nil) && text != "" && len(text) < maxMountLine {
			t.Fatalf("%d mounts and the error %v", len(list), err)
		}
		for _, m := range list {
			if m.dev == "" || m.root == "" || m.point == "" || m.kind == "" {
				t.Fatalf("half a mount: %+v", m)
			}
		}
	})
}
