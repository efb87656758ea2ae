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
	tempSuffix  = ".new"
)

// Open opens the file at path, and creates it if it is missing. Its directory must exist; the lock is a file beside it.
// A damaged file is replaced, and gets a name beside it with the time.
//
// If another process has it open for some seconds more, the error wraps ErrLocked. It wraps ErrNewer for a file of a
// newer version, and trust.ErrUnsafe for one that other users can change.
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
	held, err := acquire(path + ".lock")
	if err != nil {
		return nil, Loaded{}, err
	}
	f := &files{path: path}
	s, c, err := f.load(o)
	if err != nil {
		return nil, Loaded{}, errors.Join(err, held.Release())
	}
	s.lock = held
	go s.run()
	return s, c.loaded(), nil
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

// files are the state's file and those beside it, in a directory that no other user can change.
type files struct {
	path  string
	aside string // the path for a damaged file
}

// load opens the file and reads it. A missing one is made, and a damaged one is replaced by one with what is readable.
func (f *files) load(o Options) (*Store, content, error) {
	if err := f.removeTemp(); err != nil { // of a process that was killed
		return nil, content{}, err
	}
	file, data, err := f.read()
	if errors.Is(err, fs.ErrNotExist) {
		s, err := f.create(&content{})
		return s, content{}, err
	}
	if err != nil {
		return nil, content{}, err
	}
	c, damage := parse(data)
	if damage == nil {
		s, err := newStore(file)
		if err == nil {
			s.index, s.total, s.last = c.index, c.total, c.last()
		}
		return s, c, err
	}
	_ = file.Close()
	if errors.Is(damage, ErrNewer) {
		return nil, content{}, damage
	}
	if o.ForgetDamaged {
		o.Log.Warn("the state is damaged and dropped: devices of running pods can be given to other pods",
			"file", f.path, "error", damage)
		c = content{}
	} else {
		c = f.setAside(c, damage, o.Log)
	}
	s, err := f.create(&c)
	return s, c, err
}

// read opens the file and returns its bytes.
func (f *files) read() (*os.File, []byte, error) {
	file, err := os.OpenFile(f.path, os.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	data, _, err := regular.Read(file, maxSize)
	if err == nil {
		err = trust.File(f.path)
	}
	if err != nil {
		_ = file.Close()
		return nil, nil, err
	}
	return file, data, nil
}

// setAside is what a damaged file leaves. The file gets another name when the new one replaces it.
func (f *files) setAside(c content, damage error, log *slog.Logger) content {
	now := time.Now().UTC().Round(0)
	f.aside = f.path + ".damaged-" + now.Format("20060102T150405.000000000Z")
	c.loss = &Loss{Time: now, Reason: damage.Error(), File: f.aside}
	log.Error("the state is damaged: pods may run that are not known any more, so devices that no known pod has are "+
		"withheld until an administrator says that they are free", "file", f.path, "set aside as", f.aside,
		"error", damage, "known pods", len(c.placements))
	return c
}

// create makes a new file with the content, in the place of a damaged one.
func (f *files) create(c *content) (_ *Store, err error) {
	defer func() {
		if err != nil {
			err = errors.Join(err, f.removeTemp())
		}
	}()
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_EXCL | unix.O_CLOEXEC
	fd, err := unix.Open(f.path+tempSuffix, flags, 0o600)
	if err != nil {
		return nil, &fs.PathError{Op: "create", Path: f.path + tempSuffix, Err: err}
	}
	s, err := newStore(os.NewFile(uintptr(fd), f.path)) // as it is called in the end
	if err == nil {
		if err = s.fill(c); err == nil {
			err = f.rename()
		}
		if err != nil {
			_ = s.db.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("write a new file: %w", err)
	}
	return s, nil
}

func (f *files) removeTemp() error {
	if err := os.Remove(f.path + tempSuffix); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// rename gives the new file its name, and the damaged one that of the file set aside.
func (f *files) rename() error {
	if f.aside != "" {
		if err := os.Link(f.path, f.aside); err != nil {
			return fmt.Errorf("set the damaged file aside: %w", err)
		}
	}
	if err := os.Rename(f.path+tempSuffix, f.path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(f.path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// newStore opens a file with bbolt: an empty one, or one that was verified. It closes the file on an error.
func newStore(file *os.File) (*Store, error) {
	db, err := bbolt.Open(file.Name(), 0o600, &bbolt.Options{
		OpenFile: func(string, int, os.FileMode) (*os.File, error) { return file, nil },
		PageSize: pageSize, MaxSize: maxSize, Timeout: time.Second, NoStatistics: true,
		// The list of free pages would be written with each change, and would need a checksum. It is found again from
		// the other pages.
		NoFreelistSync: true, FreelistType: bbolt.FreelistMapType,
	})
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return &Store{
		db: db, file: file, index: map[string]stored{},
		changes: make(chan *change), closing: make(chan struct{}), stopped: make(chan struct{}),
	}, nil
}

func (c *content) loaded() Loaded {
	l := Loaded{Resources: c.resources, Loss: c.loss}
	for _, p := range c.placements {
		l.Placements = append(l.Placements, p.Placement)
	}
	return l
}
