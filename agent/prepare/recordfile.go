package prepare

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"maps"
	"sync"

	"gpu-cdi-plugin/internal/fileio"
	"gpu-cdi-plugin/internal/wake"
)

// RecordFile writes the last record of each device to a file, which ParseRecords can read. It is an actor, so that
// containers do not wait for the disk.
type RecordFile struct {
	path    string
	offered func(uuid string) bool
	log     *slog.Logger
	wake    wake.Chan

	mu    sync.Mutex
	fresh map[string]Record // records since the last write, by UUID
}

// NewRecordFile returns a RecordFile for a path. Records of devices that are not offered are dropped.
func NewRecordFile(path string, offered func(uuid string) bool, log *slog.Logger) *RecordFile {
	return &RecordFile{path: path, offered: offered, log: log, wake: wake.New(), fresh: map[string]Record{}}
}

// Add queues a record and returns at once.
func (f *RecordFile) Add(r Record) {
	f.mu.Lock()
	f.fresh[r.UUID] = r
	f.mu.Unlock()
	f.wake.Wake()
}

// Run writes the records until ctx ends. If records cannot be written, they are written with the next one.
func (f *RecordFile) Run(ctx context.Context) error {
	unsaved := map[string]Record{}
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-f.wake:
		}
		f.mu.Lock()
		maps.Copy(unsaved, f.fresh)
		clear(f.fresh)
		f.mu.Unlock()
		if err := f.write(unsaved); err != nil {
			f.log.Warn("the record of device preparations cannot be written; the next preparation tries again: " + err.Error())
			continue
		}
		clear(unsaved)
	}
	return nil
}

func (f *RecordFile) read() (map[string]Record, error) {
	data, err := fileio.ReadFile(f.path, MaxRecords)
	if err != nil {
		return nil, err
	}
	return ParseRecords(data)
}

// write adds new records to those in the file.
func (f *RecordFile) write(fresh map[string]Record) error {
	if len(fresh) == 0 {
		return nil
	}
	recorded, err := f.read()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		f.log.Warn("the record of device preparations cannot be read and is replaced: " + err.Error())
	}
	all := map[string]Record{}
	maps.Copy(all, recorded)
	maps.DeleteFunc(all, func(uuid string, _ Record) bool { return !f.offered(uuid) })
	maps.Copy(all, fresh)
	data, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	return fileio.Replace(f.path, append(data, '\n'), 0o644) // every user may read the records
}
