package mps

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/test/lib/testenv"
)

const testGPU = "GPU-00000000-0000-0000-0000-000000000001"

// makeShortDir makes a directory with a short path: that of t.TempDir may be too long for sockets.
func makeShortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "mps") //nolint:usetesting // see above
	must(t, err)
	t.Cleanup(func() {
		gpus, err := filepath.Glob(dir + "/GPU-*")
		must(t, err)
		more, err := filepath.Glob(dir + "/mps/GPU-*")
		must(t, err)
		for _, gpuDir := range append(gpus, more...) {
			_ = unmountShm(gpuDir)
		}
		must(t, os.RemoveAll(dir))
	})
	return dir
}

// testShm is the size of shm in tests, in bytes.
const testShm = 1 << 20

func prepareGPU(t testing.TB, dir, uuid string) {
	t.Helper()
	testenv.Root(t)
	must(t, prepare(dir, uuid, testShm))
}

func TestPrepare(t *testing.T) {
	for name, before := range map[string]func(t *testing.T, dir string){
		"no directory": func(*testing.T, string) {},
		"the containers' runtime made the directories": func(t *testing.T, dir string) {
			for _, name := range []string{pipeName, logName, shmName} {
				must(t, os.MkdirAll(filepath.Join(dir, testGPU, name), 0o755))
			}
		},
		"directories with other modes and owners": func(t *testing.T, dir string) {
			testenv.Root(t)
			for _, name := range []string{pipeName, logName, shmName} {
				must(t, os.MkdirAll(filepath.Join(dir, testGPU, name), 0o700))
				must(t, os.Chown(filepath.Join(dir, testGPU, name), 1000, 1000))
			}
			must(t, os.Chmod(filepath.Join(dir, testGPU, pipeName), 0o777))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(makeShortDir(t), "mps")
			before(t, dir)
			for range 2 {
				prepareGPU(t, dir, testGPU)
			}
			got := map[string]fs.FileMode{}
			for _, path := range []string{".", pipeName, logName, shmName} {
				info, err := os.Lstat(filepath.Join(dir, testGPU, path))
				must(t, err)
				got[path] = info.Mode()
				var st unix.Stat_t
				must(t, unix.Lstat(filepath.Join(dir, testGPU, path), &st))
				if int(st.Uid) != os.Getuid() {
					t.Errorf("%s belongs to %d", path, st.Uid)
				}
			}
			want := map[string]fs.FileMode{
				".": fs.ModeDir | 0o755, pipeName: fs.ModeDir | 0o755, logName: fs.ModeDir | 0o755,
				shmName: fs.ModeDir | fs.ModeSticky | 0o777,
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestPrepareFollowsNoLink(t *testing.T) {
	for name, at := range map[string]string{"the GPU's": testGPU, "the pipe's": testGPU + "/" + pipeName} {
		t.Run(name, func(t *testing.T) {
			dir, elsewhere := makeShortDir(t), t.TempDir()
			must(t, os.Chmod(elsewhere, 0o700))
			must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, at)), 0o755))
			must(t, os.Symlink(elsewhere, filepath.Join(dir, at)))
			if err := prepare(dir, testGPU, testShm); !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP) {
				t.Errorf("error %v", err)
			}
			info, err := os.Stat(elsewhere)
			must(t, err)
			entries, err := os.ReadDir(elsewhere)
			must(t, err)
			if info.Mode().Perm() != 0o700 || len(entries) > 0 {
				t.Errorf("the target of the link has mode %v and %d entries", info.Mode(), len(entries))
			}
		})
	}
}

func TestPrepareRefuses(t *testing.T) {
	dir := t.TempDir()
	for _, uuid := range []string{"", ".", "GPU-", "GPU-../x", "MIG-1", "GPU-" + strings.Repeat("0", 60)} {
		if err := prepare(dir, uuid, testShm); err == nil || !strings.Contains(err.Error(), "not the UUID of a GPU") {
			t.Errorf("%q: %v", uuid, err)
		}
	}
	err := prepare(filepath.Join(dir, strings.Repeat("x", 60)), testGPU, testShm)
	if err == nil || !strings.Contains(err.Error(), "set a shorter runtime-dir") {
		t.Errorf("a long path: %v", err)
	}
	if entries, _ := os.ReadDir(dir); len(entries) > 0 {
		t.Errorf("%d entries were made", len(entries))
	}
}

// A directory that other users can change is not used, and nothing is made in it.
func TestSupervisorUsesOnlyRootsDirectories(t *testing.T) {
	testenv.Root(t)
	//nolint:usetesting // t.TempDir is in /tmp, where every user can write
	safe, err := os.MkdirTemp("/run", "mps-test-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(safe) })
	above := filepath.Join(safe, "above")
	run := filepath.Join(above, "run")
	for name, c := range map[string]struct {
		change func() error
		want   string
	}{
		"root's alone":         {func() error { return nil }, ""},
		"every user can write": {func() error { return os.Chmod(above, 0o777) }, "every user can write to " + above},
		"another user owns it": {func() error { return os.Chown(above, 1000, 0) }, above + " belongs to user 1000"},
		"the last one is a link": {func() error {
			return errors.Join(os.Symlink(safe, run), os.Lchown(run, 1000, 0))
		}, run + " belongs to user 1000"},
	} {
		for mode, check := range map[string]func(func(string) error, string) error{
			"strict": checkStrictly, "insecure": allowUnsafe,
		} {
			must(t, errors.Join(os.RemoveAll(above), os.RemoveAll(filepath.Join(safe, "mps")),
				os.Mkdir(above, 0o755), c.change()))
			want := c.want
			if mode == "insecure" {
				want = ""
			}
			s := New(Options{Dir: filepath.Join(run, "mps"), Check: check})
			err := s.acquire()
			if (err == nil) != (want == "") ||
				err != nil && (!errors.Is(err, trust.ErrUnsafe) || !strings.Contains(err.Error(), want)) {
				t.Errorf("%s, %s: %v", name, mode, err)
			}
			if _, made := os.Stat(s.opts.Dir); (made == nil) != (want == "") {
				t.Errorf("%s, %s: the directory: %v", name, mode, made)
			}
			must(t, s.unlock())
		}
	}
}

func TestLogsAreBounded(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, logName), 0o755))
	secret := filepath.Join(t.TempDir(), "secret")
	large := make([]byte, maxLog+1)
	for path, content := range map[string][]byte{
		filepath.Join(dir, outputName): large, filepath.Join(dir, logName, "control.log"): []byte("small"), secret: large,
	} {
		must(t, os.WriteFile(path, content, 0o600))
	}
	must(t, os.Symlink(secret, filepath.Join(dir, logName, "server.log")))
	truncateLogs(dir)
	for path, want := range map[string]int64{
		filepath.Join(dir, outputName): 0, filepath.Join(dir, logName, "control.log"): 5, secret: maxLog + 1,
	} {
		info, err := os.Stat(path)
		must(t, err)
		if info.Size() != want {
			t.Errorf("%s has %d bytes, want %d", path, info.Size(), want)
		}
	}
}
