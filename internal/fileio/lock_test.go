package fileio

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/test/lib/testenv"
)

func TestOneProcessHoldsTheLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := AcquireLock(path)
	testenv.Must(t, err)
	second, err := AcquireLock(path)
	if second != nil || !errors.Is(err, ErrHeld) {
		t.Fatalf("%v and %v, want %v", second, err, ErrHeld)
	}
	testenv.Must(t, first.Release())
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file was not removed: %v", err)
	}
	third, err := AcquireLock(path)
	testenv.Must(t, err)
	testenv.Must(t, third.Release())
}

func TestALeftFileIsNotLocked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	testenv.Must(t, os.WriteFile(path, nil, 0o600))
	l, err := AcquireLock(path)
	testenv.Must(t, err)
	testenv.Must(t, l.Release())
}

func TestConcurrentReleaseAndAcquireNeverGiveTwoHolders(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	var holding sync.Mutex
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 500 {
				l, err := AcquireLock(path)
				if err != nil {
					continue
				}
				if !holding.TryLock() {
					t.Error("two hold the lock")
					return
				}
				holding.Unlock()
				if err := l.Release(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

func TestRenew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := AcquireLock(path)
	testenv.Must(t, err)
	testenv.Must(t, first.Renew())
	testenv.Must(t, os.Remove(path))
	testenv.Must(t, first.Renew())
	if _, err := AcquireLock(path); !errors.Is(err, ErrHeld) {
		t.Errorf("after Renew: %v", err)
	}
	testenv.Must(t, os.Remove(path))
	second, err := AcquireLock(path)
	testenv.Must(t, err)
	if err := first.Renew(); !errors.Is(err, ErrHeld) {
		t.Errorf("another lock was acquired meanwhile: %v", err)
	}
	testenv.Must(t, first.Release())
	if _, err := AcquireLock(path); !errors.Is(err, ErrHeld) {
		t.Errorf("releasing the lost lock released the other one: %v", err)
	}
	testenv.Must(t, second.Release())
}

// A program that inherits the lock keeps it when the process that acquired it has ended.
func TestAProgramInheritsTheLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	want := func(want bool) {
		t.Helper()
		if held, err := IsHeld(path); held != want || err != nil {
			t.Errorf("held %t, error %v, want %t", held, err, want)
		}
	}
	want(false)
	l, err := AcquireLock(path)
	testenv.Must(t, err)
	cmd := exec.Command("cat")
	cmd.ExtraFiles = []*os.File{l.File()}
	in, err := cmd.StdinPipe()
	testenv.Must(t, err)
	testenv.Must(t, cmd.Start())
	testenv.Must(t, l.File().Close()) // as when the process is killed
	want(true)
	if _, err := AcquireLock(path); !errors.Is(err, ErrHeld) {
		t.Errorf("acquired although a program has it: %v", err)
	}
	testenv.Must(t, in.Close())
	testenv.Must(t, cmd.Wait())
	want(false)
	testenv.Must(t, os.Remove(path))
	testenv.Must(t, os.Symlink("elsewhere", path))
	if _, err := IsHeld(path); err == nil {
		t.Error("a link was followed")
	}
}

func TestAPipeDoesNotBlock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	testenv.Must(t, unix.Mkfifo(path, 0o600))
	l, err := AcquireLock(path)
	testenv.Must(t, err)
	testenv.Must(t, l.Release())
}

func TestAcquireRefusesPathsThatAreNoFile(t *testing.T) {
	dir := t.TempDir()
	testenv.Must(t, os.Symlink("elsewhere", filepath.Join(dir, "link")))
	for name, path := range map[string]string{"no directory": "none/lock", "a link": "link", "a directory": "."} {
		t.Run(name, func(t *testing.T) {
			if l, err := AcquireLock(filepath.Join(dir, path)); err == nil || l != nil || errors.Is(err, ErrHeld) {
				t.Errorf("%v and %v", l, err)
			}
		})
	}
	if _, err := os.Lstat(filepath.Join(dir, "elsewhere")); err == nil {
		t.Error("a link was followed")
	}
}
