package state_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc64"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/trust"
	"gpu-cdi-plugin/manager/state"
	"gpu-cdi-plugin/test/lib/testenv"
)

// makeFile makes the file of ten pods.
func makeFile(t *testing.T) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "state.db")
	s, _ := open(t, path)
	put(t, s, placements(10)...)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestADamagedFileIsSetAside(t *testing.T) {
	for name, c := range map[string]struct {
		damage func(path string) error
		pods   int // that are readable
		reason string
	}{
		"an empty file":       {func(path string) error { return os.Truncate(path, 0) }, 0, "page 0: it is missing"},
		"a truncated file":    {func(path string) error { return os.Truncate(path, 2*4096) }, 0, "it has 2 pages of"},
		"a file of text":      {write(0, strings.Repeat("text", 2048)), 10, "not that of a bbolt database"},
		"a page with zeros":   {write(4096, strings.Repeat("\x00", 4096)), 10, "not that of a bbolt database"},
		"another database":    {makeDatabase, 0, "another program has written it"},
		"a damaged placement": {replace("GPU-6ba7b810-9dad-11d1-80b4-000000000003"), 9, "wrong checksum"},
		"a damaged version":   {replace("version"), 10, "wrong checksum"},
	} {
		t.Run(name, func(t *testing.T) {
			path := makeFile(t)
			if err := c.damage(path); err != nil {
				t.Fatal(err)
			}
			damaged := readFile(t, path)
			var log bytes.Buffer
			s, loaded, err := state.Open(path, state.Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if len(loaded.Placements) != c.pods || loaded.Loss == nil ||
				!strings.Contains(loaded.Loss.Reason, c.reason) {
				t.Fatalf(
					"%d pods and the loss %+v, want %d and %q",
					len(loaded.Placements),
					loaded.Loss,
					c.pods,
					c.reason,
				)
			}
			if !strings.Contains(log.String(), "the state is damaged") ||
				!strings.Contains(log.String(), loaded.Loss.File) {
				t.Errorf("the log is %q", log.String())
			}
			if !bytes.Equal(damaged, readFile(t, loaded.Loss.File)) {
				t.Error("the file that was set aside has another content")
			}
			checkLossStays(t, s, path, loaded)
		})
	}
}

// checkLossStays checks that restarts keep the loss until it is cleared.
func checkLossStays(t *testing.T, s *state.Store, path string, want state.Loaded) {
	t.Helper()
	put(t, s, placement(20))
	want.Placements = append(want.Placements, placement(20))
	for _, clear := range []bool{true, false} {
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		var got state.Loaded
		if s, got = open(t, path); cmp.Diff(want, got) != "" {
			t.Errorf("after the restart (-want +got):\n%s", cmp.Diff(want, got))
		}
		if clear {
			if err := s.SetLoss(t.Context(), nil); err != nil {
				t.Fatal(err)
			}
			want.Loss = nil
		}
	}
}

// write writes data into a file.
func write(at int64, data string) func(path string) error {
	return func(path string) error {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteAt([]byte(data), at)
		return errors.Join(err, f.Close())
	}
}

// replace changes the last byte of a text where it is in the file.
func replace(text string) func(path string) error {
	return func(path string) error {
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		changed := text[:len(text)-1] + "?"
		return os.WriteFile(path, bytes.ReplaceAll(data, []byte(text), []byte(changed)), 0o600)
	}
}

func makeDatabase(path string) error {
	if err := os.Remove(path); err != nil {
		return err
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{PageSize: 4096})
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucket([]byte("other"))
		return err
	})
	return errors.Join(err, db.Close())
}

// The kubelet drops a damaged checkpoint (B6 in dialect.Dialect).
func TestADamagedFileIsForgottenIfAsked(t *testing.T) {
	path := makeFile(t)
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	s, loaded, err := state.Open(path, state.Options{
		Log: slog.New(slog.NewTextHandler(&log, nil)), ForgetDamaged: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if diff := cmp.Diff(state.Loaded{}, loaded); diff != "" {
		t.Errorf("loaded (-want +got):\n%s", diff)
	}
	if !strings.Contains(log.String(), "the state is damaged and dropped") {
		t.Errorf("the log is %q", log.String())
	}
	if files := list(t, filepath.Dir(path)); cmp.Diff([]string{"state.db", "state.db.lock"}, files) != "" {
		t.Errorf("the directory has %v", files)
	}
}

func list(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// What is not a damaged state is left as it is.
func TestOpenRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		prepare func(t *testing.T, path string) error
		want    error
		text    string
	}{
		"a directory": {
			func(_ *testing.T, path string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o755)) },
			syscall.EISDIR, "",
		},
		"a FIFO": {
			func(_ *testing.T, path string) error {
				return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600))
			},
			nil, "is a FIFO, not a regular file",
		},
		"a symbolic link": {
			func(_ *testing.T, path string) error {
				return errors.Join(os.Rename(path, path+".other"), os.Symlink("state.db.other", path))
			},
			syscall.ELOOP, "",
		},
		"another user's file": {
			func(t *testing.T, path string) error {
				testenv.Root(t)
				return os.Chown(path, 1000, 0)
			},
			trust.ErrUnsafe, "state.db belongs to user 1000",
		},
		"a file that others can write": {
			func(_ *testing.T, path string) error { return os.Chmod(path, 0o606) },
			trust.ErrUnsafe, "every user can write to",
		},
		"a directory that others can write": {
			func(_ *testing.T, path string) error { return os.Chmod(filepath.Dir(path), 0o777) },
			trust.ErrUnsafe, "every user can write to",
		},
		"a file of a newer version": {
			func(_ *testing.T, path string) error { return makeNewer(path) }, state.ErrNewer, "its format is 2",
		},
		"a missing directory": {
			func(_ *testing.T, path string) error { return os.RemoveAll(filepath.Dir(path)) }, fs.ErrNotExist, "",
		},
		"a read-only file system": {
			func(t *testing.T, path string) error {
				mountTmpfs(t, filepath.Dir(path), "ro")
				return nil
			},
			syscall.EROFS, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := makeFile(t)
			if err := c.prepare(t, path); err != nil {
				t.Fatal(err)
			}
			before := snapshot(t, filepath.Dir(path))
			s, loaded, err := state.Open(path, state.Options{Log: slog.New(slog.DiscardHandler)})
			if err == nil || s != nil || len(loaded.Placements) > 0 {
				t.Fatalf("opened with %v", loaded)
			}
			if c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) ||
				!strings.HasPrefix(err.Error(), "open the state "+path+": ") {
				t.Errorf("the error is %q, want %v with %q", err, c.want, c.text)
			}
			if diff := cmp.Diff(before, snapshot(t, filepath.Dir(path))); diff != "" {
				t.Errorf("the directory (-before +after):\n%s", diff)
			}
		})
	}
}

// snapshot returns the modes and the contents of a directory's files.
func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return files
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			t.Fatal(err)
		}
		files[e.Name()] = info.Mode().String()
		if info.Mode().IsRegular() {
			files[e.Name()] += string(readFile(t, filepath.Join(dir, e.Name())))
		}
	}
	return files
}

// makeNewer makes a file as a next version could.
func makeNewer(path string) error {
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		value := binary.BigEndian.AppendUint64(nil, crc64.Checksum([]byte("version2"), crc64.MakeTable(crc64.ECMA)))
		return tx.Bucket([]byte("state")).Put([]byte("version"), append(value, '2'))
	})
	return errors.Join(err, db.Close())
}

// mountTmpfs mounts a file system that the test's thread alone sees.
func mountTmpfs(t *testing.T, dir, options string) {
	t.Helper()
	testenv.Root(t)
	testenv.MountNamespace(t)
	var flags uintptr
	if options == "ro" {
		flags, options = unix.MS_RDONLY, ""
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", flags, "mode=0755,"+options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

func TestASecondManagerWaitsForTheFirst(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	first, _ := open(t, path)
	put(t, first, placement(1))
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		_, _, err := state.Open(path, state.Options{Log: slog.New(slog.DiscardHandler)})
		if !errors.Is(err, state.ErrLocked) {
			t.Errorf("the error is %v, want ErrLocked", err)
		}
		if waited := time.Since(start); waited < time.Second || waited > 10*time.Second {
			t.Errorf("it waited for %s", waited)
		}
		time.AfterFunc(time.Second, func() {
			if err := first.Close(); err != nil {
				t.Error(err)
			}
		})
		second, loaded := open(t, path)
		if diff := cmp.Diff(placements(2)[1:], loaded.Placements); diff != "" {
			t.Errorf("placements (-want +got):\n%s", diff)
		}
		if err := second.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A change that a full disk refuses is not made, and others are made when there is space again.
func TestAFullDisk(t *testing.T) {
	dir := t.TempDir()
	mountTmpfs(t, dir, "size=400k")
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 300_000), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "state.db")
	s, _ := open(t, path)
	n := 0
	for ; ; n++ {
		if err := s.Put(t.Context(), placement(n)); err != nil {
			if !errors.Is(err, syscall.ENOSPC) || errors.Is(err, state.ErrBroken) || n == 0 {
				t.Fatalf("pod %d: %v", n, err)
			}
			break
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s, loaded := open(t, path) // a restart needs no space
	if diff := cmp.Diff(placements(n), loaded.Placements); diff != "" {
		t.Fatalf("placements (-want +got):\n%s", diff)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	put(t, s, placement(n))
	n++
	// The same without a restart.
	if err := os.WriteFile(ballast, make([]byte, 400_000), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	for i := n; ; i++ {
		if err := s.Put(t.Context(), placement(i)); err != nil {
			break
		}
		n++
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	put(t, s, placement(n))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, loaded = open(t, path); cmp.Diff(placements(n+1), loaded.Placements) != "" {
		t.Errorf("placements (-want +got):\n%s", cmp.Diff(placements(n+1), loaded.Placements))
	}
}

// A file that becomes shorter while it is open ends no process. Nothing more is written, and the next start says it.
func TestAFileIsTruncatedWhileItIsOpen(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.db")
	s, _ := open(t, path)
	put(t, s, placements(50)...)
	if err := os.Truncate(path, 2*4096); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if err := s.Put(t.Context(), placement(50+i)); !errors.Is(err, state.ErrBroken) {
			t.Errorf("the error is %v, want ErrBroken", err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, loaded := open(t, path); loaded.Loss == nil {
		t.Error("nothing is said after the restart")
	}
}

// What a killed process has left does not stop the next one.
func TestLeftoversOfAKilledProcess(t *testing.T) {
	path := makeFile(t)
	for _, name := range []string{path + ".new", path + ".lock"} {
		if err := os.WriteFile(name, []byte("garbage"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s, loaded := open(t, path)
	if diff := cmp.Diff(state.Loaded{Placements: placements(10)}, loaded); diff != "" {
		t.Errorf("loaded (-want +got):\n%s", diff)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if files := fmt.Sprint(list(t, filepath.Dir(path))); files != "[state.db]" {
		t.Errorf("the directory has %s", files)
	}
	if info, err := os.Stat(path); err != nil || info.Mode() != 0o600 {
		t.Errorf("the file is %v, %v", info.Mode(), err)
	}
}
