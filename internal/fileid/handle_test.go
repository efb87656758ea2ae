package fileid

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func write(path string) error { return os.WriteFile(path, []byte("content"), 0o600) }

// wait lets the kernel's clock for file times advance.
func wait() { time.Sleep(2 * tick) }

func TestTheIDChangesWithTheFile(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(file string) error
		gone bool
	}{
		"another content of the same size": {
			func(f string) error { return os.WriteFile(f, []byte("CONTENT"), 0o600) }, false,
		},
		"another mode":     {func(f string) error { return os.Chmod(f, 0o644) }, false},
		"another name":     {func(f string) error { return os.Rename(f, f+".old") }, false},
		"another name too": {func(f string) error { return os.Link(f, f+".too") }, false},
		"removed":          {os.Remove, true},
		"another file in its place": {
			func(f string) error { return errors.Join(write(f+".new"), os.Rename(f+".new", f)) }, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "file")
			if err := write(file); err != nil {
				t.Fatal(err)
			}
			kept, err := Keep(file)
			if err != nil {
				t.Fatal(err)
			}
			wait()
			before := kept.ID()
			if before.IsZero() || before != Of(file) || !before.Settled(time.Now()) {
				t.Fatalf("an unchanged file is %+v, by its path %+v", before, Of(file))
			}
			if err := c.do(file); err != nil {
				t.Fatal(err)
			}
			after := kept.ID()
			if after == before || !after.Same(before) {
				t.Errorf("%+v afterwards, %+v before", after, before)
			}
			changed := time.Unix(after.Changed.Unix())
			if after.Settled(changed.Add(tick / 2)) {
				t.Error("settled at once")
			}
			if after.Settled(changed.Add(2*tick)) == c.gone {
				t.Errorf("settled later: %v", !c.gone)
			}
		})
	}
}

func TestTheIDChangesWithTheDirectorysEntries(t *testing.T) {
	for name, do := range map[string]func(dir string) error{
		"a new file":        func(d string) error { return write(filepath.Join(d, "new")) },
		"one is removed":    func(d string) error { return os.Remove(filepath.Join(d, "file")) },
		"one is moved away": func(d string) error { return os.Rename(filepath.Join(d, "file"), d+".file") },
		"one is replaced": func(d string) error {
			return os.Rename(filepath.Join(d, "other"), filepath.Join(d, "file"))
		},
		"the directory is": func(d string) error { return os.Rename(d, d+".old") },
		"all is removed":   os.RemoveAll,
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "dir")
			err := errors.Join(os.Mkdir(dir, 0o700), write(filepath.Join(dir, "file")),
				write(filepath.Join(dir, "other")))
			if err != nil {
				t.Fatal(err)
			}
			kept, err := Keep(dir)
			if err != nil {
				t.Fatal(err)
			}
			wait()
			before := kept.ID()
			if err := do(dir); err != nil {
				t.Fatal(err)
			}
			if after := kept.ID(); after == before {
				t.Errorf("%+v before and afterwards", after)
			}
		})
	}
}

// Some file systems round times to seconds.
func TestSettled(t *testing.T) {
	const second = 1_000_000
	for name, c := range map[string]struct {
		changed unix.Timespec
		after   time.Duration
		want    bool
	}{
		"a moment later":                    {unix.Timespec{Sec: second, Nsec: 5}, tick / 2, false},
		"later":                             {unix.Timespec{Sec: second, Nsec: 5}, 2 * tick, true},
		"later, with times in seconds":      {unix.Timespec{Sec: second}, 2 * time.Second, false},
		"much later, with times in seconds": {unix.Timespec{Sec: second}, 3 * time.Second, true},
		"before, since the clock was set":   {unix.Timespec{Sec: second, Nsec: 5}, -time.Hour, false},
	} {
		id := ID{Links: 1, Changed: c.changed}
		if got := id.Settled(time.Unix(c.changed.Unix()).Add(c.after)); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func TestNoHandleHasNoID(t *testing.T) {
	var none *Kept
	if id := none.ID(); !id.IsZero() || id.Settled(time.Now()) {
		t.Errorf("a nil handle has the ID %+v", id)
	}
	if k, err := Keep(filepath.Join(t.TempDir(), "file")); k != nil || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("opened %v of a missing file, %v", k, err)
	}
}
