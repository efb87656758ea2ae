package state

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/internal/lock"
	"gpu-cdi-plugin/internal/regular"
	"gpu-cdi-plugin/internal/trust"
)

const (
	// maxSize is in bytes, enough for some hundred thousand placements.
	maxSize = 1 << 28
	// lockWait is how long an earlier process may take to end.
	lockWait = 5 * time.Second
	// fillPercent is how full pages are when they split. Placements are added at the end and leave none half empty.
	fillPercent = 0.9
)

// Open opens the file at path, and creates it if it is missing. Its directory must exist. If another process has it
// open for some seconds more, the error wraps ErrLocked. It wraps ErrNewer for a file of a newer version, and
// trust.ErrUnsafe for one that other users can change.
//
// The content is written into a new file, which then replaces the old one.
func Open(path string, o Options) (*Store, Loaded, error) {
	s, loaded, err := open(path, o)
	if err != nil {
		return nil, Loaded{}, fmt.Errorf("open the state %s: %w", path, err)
	}
	return s, loaded, nil
}

func open(path string, o Options) (_ *Store, _ Loaded, err error) {
	if err := trust.Dir(filepath.Dir(path)); err != nil {
		return nil, Loaded{}, err
	}
	dir, err := trust.OpenDir(filepath.Dir(path))
	if err != nil {
		return nil, Loaded{}, err
	}
	defer dir.Close()
	held, err := acquire(path + ".lock")
	if err != nil {
		return nil, Loaded{}, err
	}
	f := &files{dir: dir, name: filepath.Base(path), path: path}
	c, err := f.load(o)
	if err == nil {
		var s *Store
		if s, err = f.replace(&c); err == nil {
			s.lock = held
			go s.run()
			return s, c.loaded(), nil
		}
	}
	return nil, Loaded{}, errors.Join(err, held.Release())
}

func acquire(path string) (*lock.Lock, error) {
	for end := time.Now().Add(lockWait); ; {
		held, err := lock.Acquire(path)
		if !errors.Is(err, lock.ErrHeld) {
			return held, err
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("%w: %w", ErrLocked, err)
		}
		time.Sleep(20 * time.Millisecond) // the kernel has no event for the end of a lock
	}
}

// files are the state's file and those beside it.
type files struct {
	dir        *os.File
	name, path string
	aside      string // the name for a damaged file
}

// load reads the file. A damaged one is set aside.
func (f *files) load(o Options) (content, error) {
	data, err := f.read()
	if errors.Is(err, fs.ErrNotExist) {
		return content{}, nil
	}
	if err != nil {
		return content{}, err
	}
	c, damage := parse(data)
	if damage == nil {
		return c, nil
	}
	if errors.Is(damage, ErrNewer) {
		return content{}, damage
	}
	if o.ForgetDamaged {
		o.Log.Warn("the state is damaged and dropped: devices of running pods can be given to other pods",
			"file", f.path, "error", damage)
		return content{}, nil
	}
	return f.setAside(c, damage, o.Log), nil
}

// read returns the bytes of the file.
func (f *files) read() ([]byte, error) {
	const flags = unix.O_RDONLY | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC
	fd, err := unix.Openat(int(f.dir.Fd()), f.name, flags, 0)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(fd), f.path)
	defer file.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if int(st.Uid) != os.Geteuid() && st.Uid != 0 {
		return nil, fmt.Errorf("%w: it belongs to user %d", trust.ErrUnsafe, st.Uid)
	}
	if st.Mode&0o022 != 0 {
		return nil, fmt.Errorf("%w: it has the mode %#o", trust.ErrUnsafe, st.Mode&0o7777)
	}
	data, _, err := regular.Read(file, maxSize)
	return data, err
}

// setAside is what a damaged file leaves. The file gets another name when the new one replaces it.
func (f *files) setAside(c content, damage error, log *slog.Logger) content {
	now := time.Now().UTC().Round(0)
	f.aside = f.name + ".damaged-" + now.Format("20060102T150405.000000000Z")
	c.loss = &Loss{Time: now, Reason: damage.Error(), File: filepath.Join(filepath.Dir(f.path), f.aside)}
	log.Error("the state is damaged: pods may run that are not known any more, so devices that no known pod has are "+
		"withheld until an administrator says that they are free", "file", f.path, "set aside as", c.loss.File,
		"error", damage, "known pods", len(c.placements))
	return c
}

// replace writes a new file with the content, and opens it in the place of the old one.
func (f *files) replace(c *content) (*Store, error) {
	temp := f.name + ".new"
	if err := unix.Unlinkat(int(f.dir.Fd()), temp, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("remove %s: %w", temp, err)
	}
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_EXCL | unix.O_NOFOLLOW | unix.O_CLOEXEC
	fd, err := unix.Openat(int(f.dir.Fd()), temp, flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("create %s: %w", temp, err)
	}
	s, err := newStore(os.NewFile(uintptr(fd), f.path), c)
	if err == nil && f.aside != "" {
		err = unix.Linkat(int(f.dir.Fd()), f.name, int(f.dir.Fd()), f.aside, 0)
	}
	if err == nil {
		err = unix.Renameat(int(f.dir.Fd()), temp, int(f.dir.Fd()), f.name)
	}
	if err == nil {
		err = f.dir.Sync()
	}
	if err == nil {
		return s, nil
	}
	if s != nil {
		_ = s.db.Close()
	}
	_ = unix.Unlinkat(
		int(f.dir.Fd()),
		temp,
		0,
	) // the file that was there is still the state, or the next one removes it
	return nil, fmt.Errorf("write a new file: %w", err)
}

// newStore writes the content into an empty file, which it closes on an error.
func newStore(file *os.File, c *content) (*Store, error) {
	db, err := bbolt.Open(file.Name(), 0o600, &bbolt.Options{
		OpenFile: func(string, int, os.FileMode) (*os.File, error) { return file, nil },
		PageSize: pageSize, MaxSize: maxSize, NoStatistics: true,
		// The list of free pages would be written with each change; it is needed by the next bbolt alone that opens
		// this file, and none does.
		NoFreelistSync: true, FreelistType: bbolt.FreelistMapType,
		NoSync: true, NoGrowSync: true, // until all is written
	})
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	s := &Store{
		db: db, file: file, index: map[string]stored{},
		changes: make(chan *change), closing: make(chan struct{}), stopped: make(chan struct{}),
	}
	err = s.fill(c)
	if err == nil {
		err = db.Sync()
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	db.NoSync, db.NoGrowSync = false, false
	return s, nil
}

func (c *content) loaded() Loaded {
	l := Loaded{Resources: c.resources, Loss: c.loss}
	for _, p := range c.placements {
		l.Placements = append(l.Placements, p.Placement)
	}
	return l
}
