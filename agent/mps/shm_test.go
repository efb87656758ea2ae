package mps

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/proc"
	"gpu-cdi-plugin/test/lib/testenv"
)

// makeGPUDir makes the directories of a GPU and returns its directory.
func makeGPUDir(t *testing.T) string {
	t.Helper()
	dir := makeShortDir(t)
	prepareGPU(t, dir, testGPU)
	return filepath.Join(dir, testGPU)
}

func statfs(t *testing.T, path string) unix.Statfs_t {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(path, &st))
	return st
}

func TestShmIsLimited(t *testing.T) {
	gpuDir := makeGPUDir(t)
	shm := filepath.Join(gpuDir, shmName)
	st := statfs(t, shm)
	const flags = unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC
	if st.Type != unix.TMPFS_MAGIC || st.Flags&flags != flags || st.Blocks*uint64(st.Bsize) != testShm ||
		st.Files != testShm/shmPerInode {
		t.Errorf("shm is %+v", st)
	}
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
	must(t, os.WriteFile(filepath.Join(gpuDir, "ours"), make([]byte, testShm), 0o600))
}

// Running containers have shm mounted, and are the clients of the next daemon.
func TestShmIsRetainedForTheNextDaemon(t *testing.T) {
	gpuDir := makeGPUDir(t)
	shm := filepath.Join(gpuDir, shmName)
	file := filepath.Join(shm, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, os.Chmod(shm, 0o700)) // as root in a container can
	must(t, prepare(filepath.Dir(gpuDir), testGPU, 2*testShm))
	info, err := os.Stat(shm)
	must(t, err)
	_, err = os.Lstat(file)
	must(t, err)
	if size := statfs(t, shm).Blocks * uint64(statfs(t, shm).Bsize); size != 2*testShm || info.Mode().Perm() != 0o777 {
		t.Errorf("%d bytes, mode %v", size, info.Mode())
	}
	must(t, unmountShm(gpuDir))
	if _, err := os.Lstat(file); err == nil || prepared(gpuDir) {
		t.Errorf("after the release: %v, prepared %t", err, prepared(gpuDir))
	}
}

func TestClearDirSaysWhatStays(t *testing.T) {
	testenv.Root(t)
	dir := makeShortDir(t)
	busy := filepath.Join(dir, pipeName, "busy")
	must(t, os.MkdirAll(busy, 0o755))
	must(t, os.WriteFile(filepath.Join(dir, pipeName, "file"), nil, 0o600))
	gpu, err := openDir(unix.AT_FDCWD, dir)
	must(t, err)
	defer gpu.Close()
	must(t, unix.Mount("busy", busy, "tmpfs", 0, ""))
	if err := clearDir(gpu, pipeName); !errors.Is(err, unix.EBUSY) {
		t.Errorf("with a mount: %v", err)
	}
	must(t, unix.Unmount(busy, 0))
	must(t, clearDir(gpu, pipeName))
	if entries, err := os.ReadDir(filepath.Join(dir, pipeName)); len(entries) > 0 || err != nil {
		t.Errorf("there are %v, %v", entries, err)
	}
}

// An administrator can give a GPU another file system as its shm.
func TestMountsOfAnAdministratorStay(t *testing.T) {
	testenv.Root(t)
	dir := makeShortDir(t)
	original, gpuDir := filepath.Join(dir, "original"), filepath.Join(dir, testGPU)
	shm := filepath.Join(gpuDir, shmName)
	must(t, os.MkdirAll(shm, 0o755))
	must(t, os.Mkdir(original, 0o755))
	must(t, unix.Mount("admin", original, "tmpfs", 0, "size=8m"))
	t.Cleanup(func() { must(t, unix.Unmount(original, 0)) })
	must(t, unix.Mount(original, shm, "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(shm, 0)) })
	must(t, os.WriteFile(filepath.Join(shm, "admin"), nil, 0o600))
	prepareGPU(t, dir, testGPU)
	must(t, unmountShm(gpuDir))
	if size := statfs(t, original).Blocks * uint64(statfs(t, original).Bsize); size != 8<<20 {
		t.Errorf("it has %d bytes", size)
	}
	if _, err := os.Lstat(filepath.Join(shm, "admin")); err != nil || prepared(gpuDir) {
		t.Errorf("%v, prepared %t", err, prepared(gpuDir))
	}
}

// runInPrivateNamespace runs f where the host does not see its mounts, as in a service with PrivateTmp=.
func runInPrivateNamespace(t *testing.T, f func()) {
	t.Helper()
	must(t, proc.OnThread(func() error {
		err := errors.Join(
			unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS),
			unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""),
		)
		if err == nil {
			f()
		}
		return err
	}))
}

// The containers' runtime would give a GPU's containers another directory than the daemon's.
func TestShmMustBeVisibleOnTheHost(t *testing.T) {
	testenv.Root(t)
	dir := makeShortDir(t)
	runInPrivateNamespace(t, func() {
		err := prepare(dir, testGPU, testShm)
		if err == nil || !strings.Contains(err.Error(), "not visible on the host") ||
			prepared(filepath.Join(dir, testGPU)) {
			t.Errorf("%v, prepared %t", err, prepared(filepath.Join(dir, testGPU)))
		}
	})
}

// The daemon of one GPU must not hold the shm of another.
func TestDaemonsHaveTheirOwnShm(t *testing.T) {
	s := newTestSupervisor(t)
	s.start()
	s.share(0)
	s.awaitReady(0)
	s.share(0, 1)
	s.awaitReady(1)
	file := filepath.Join(s.dir(1), shmName, "file")
	must(t, os.WriteFile(file, nil, 0o600))
	s.stop()

	// The next plugin uses them as they are, with other limits too, and so does the next daemon.
	s.renew(s.opts.Dir)
	s.start()
	s.share(0, 1)
	s.awaitReady(0)
	first := s.awaitReady(1)
	more := half
	more.SharedMemoryBytes = 4 * testShm
	s.Set([]Daemon{{UUID: s.gpu(0), Limits: half}, {UUID: s.gpu(1), Limits: more}})
	eventually(t, "more memory", func() bool { return s.problem(1, more) == "" })
	if size := statfs(t, filepath.Dir(file)).Blocks * uint64(statfs(t, file).Bsize); size != 4*testShm {
		t.Errorf("shm has %d bytes", size)
	}
	must(t, unix.Kill(first, unix.SIGKILL))
	eventually(t, "another daemon", func() bool { return s.problem(1, more) == "" && pidOf(t, s.dir(1)) != first })
	if _, err := os.Lstat(file); err != nil {
		t.Error(err)
	}
	mounts, err := os.ReadFile("/proc/" + strconv.Itoa(pidOf(t, s.dir(1))) + "/mountinfo")
	must(t, err)
	if !bytes.Contains(mounts, []byte(s.gpu(1))) || bytes.Contains(mounts, []byte(s.gpu(0))) {
		t.Errorf("the daemon of GPU 1 has\n%s", mounts)
	}

	// GPUs that are no longer shared are released, also one whose daemon a plugin was about to start when it was
	// killed.
	s.stop()
	prepareGPU(t, s.opts.Dir, s.gpu(2))
	must(t, s.modes.SetExclusive(t.Context(), s.gpu(2), true))
	s.renew(s.opts.Dir)
	s.start()
	s.share()
	for n := range 3 {
		eventually(t, "the release of each GPU", func() bool { return !prepared(s.dir(n)) && !s.modes.is(s.gpu(n)) })
	}
}

// A daemon whose shm was unmounted cannot serve new containers. It ends after its last client.
func TestADaemonWithoutItsShmIsRestarted(t *testing.T) {
	t.Parallel()
	s := newTestSupervisor(t)
	s.start()
	s.share(0)
	pid := s.awaitReady(0)
	end := s.startClient(0, 0)
	must(t, unmountShm(s.dir(0)))
	s.awaitProblem(0, "was unmounted: it is restarted when its last client has ended")
	if now := pidOf(t, s.dir(0)); now != pid ||
		prepared(s.dir(0)) && statfs(t, filepath.Join(s.dir(0), shmName)).Type == unix.TMPFS_MAGIC {
		t.Errorf("daemon %d, want %d without a new shm", now, pid)
	}
	end()
	eventually(t, "another daemon", func() bool { return pidOf(t, s.dir(0)) != pid })
	s.awaitReady(0)
	if statfs(t, filepath.Join(s.dir(0), shmName)).Type != unix.TMPFS_MAGIC {
		t.Error("shm is not mounted again")
	}
}

func pidOf(t *testing.T, gpuDir string) int {
	t.Helper()
	r, err := readRecord(gpuDir)
	must(t, err)
	return r.PID
}
