package main

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"path/filepath"
	"sync"

	"gpu-cdi-plugin/internal/atomicfile"
	"gpu-cdi-plugin/internal/regular"
	"gpu-cdi-plugin/internal/wake"
	"gpu-cdi-plugin/prestart"
)

// prepared writes the last preparation of each device to a file, for gpu-cdi-plugin devices. It is an actor: containers
// do not wait for the disk.
type prepared struct {
	*service
	wake wake.Chan

	mu    sync.Mutex
	fresh map[string]prestart.Record // since the last write, by UUID
}

func newPrepared(s *service) *prepared {
	return &prepared{service: s, wake: wake.New(), fresh: map[string]prestart.Record{}}
}

// preparations is the file with the last preparation of each device.
func (a *app) preparations() string { return filepath.Join(a.plugin.StateDir, "prestart.json") }

// add takes a record.
func (p *prepared) add(r prestart.Record) {
	p.mu.Lock()
	p.fresh[r.UUID] = r
	p.mu.Unlock()
	p.wake.Wake()
}

func (p *prepared) run(ctx context.Context) error {
	unsaved := map[string]prestart.Record{}
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-p.wake:
		}
		p.mu.Lock()
		maps.Copy(unsaved, p.fresh)
		clear(p.fresh)
		p.mu.Unlock()
		if err := p.write(unsaved); err != nil {
			p.app.log.Warn("the last preparations of devices are not recorded until the next one: " + err.Error())
			continue
		}
		clear(unsaved)
	}
	return nil
}

// write adds new records to those in the file, and drops those of devices that are no longer offered.
func (p *prepared) write(fresh map[string]prestart.Record) error {
	if len(fresh) == 0 {
		return nil
	}
	path := p.app.preparations()
	all := map[string]prestart.Record{}
	data, err := regular.ReadFile(path, prestart.MaxRecords)
	if err == nil {
		var recorded map[string]prestart.Record
		recorded, err = prestart.ParseRecords(data)
		maps.Copy(all, recorded)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		p.app.log.Warn("the recorded preparations of devices cannot be used, and a new record begins: " + err.Error())
	}
	maps.DeleteFunc(all, func(uuid string, _ prestart.Record) bool { return p.preparer.find(uuid) == nil })
	maps.Copy(all, fresh)
	if data, err = json.MarshalIndent(all, "", "  "); err != nil {
		return err
	}
	return atomicfile.Write(path, append(data, '\n'), 0o644) // devices shows it to every user
}
