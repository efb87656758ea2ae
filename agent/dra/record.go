package dra

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gpu-cdi-plugin/internal/fileio"
)

// record is what is kept of a prepared claim, in a file of its own: claims can be prepared at the same time, and a bad
// file concerns one claim only. The kubelet names a claim only by its UID when it unprepares it.
type record struct {
	Version   int            `json:"version"`
	Namespace string         `json:"namespace"`
	Name      string         `json:"name"`
	UID       string         `json:"uid"`
	Boot      string         `json:"boot"`           // the kernel's boot ID: after another boot it must be prepared again
	Pool      string         `json:"pool"`           // of the devices
	Pods      []string       `json:"pods,omitempty"` // the UIDs of the pods that had the claim when it was prepared
	Since     time.Time      `json:"since"`
	Devices   []recordDevice `json:"devices"`

	unsure bool // dropGone has logged that it is unknown whether the claim is abandoned; guarded by claims.mu
}

// recordDevice is a device of a prepared claim.
type recordDevice struct {
	Request string `json:"request"`
	Device  string `json:"device"` // its name in the API
	UUID    string `json:"uuid"`
	Parent  string `json:"parent"` // the UUID of its GPU
	ShareID string `json:"shareID,omitempty"`
	// Memory is that of the share, in bytes, or 0 if no other claim can have the device.
	Memory uint64 `json:"memory,omitempty"`
	// Admin means that other claims may have the device too.
	Admin bool `json:"adminAccess,omitempty"`
}

const (
	recordVersion = 1
	recordSuffix  = ".json"
	// maxRecord bounds a record, in bytes. A claim has at most 32 devices.
	maxRecord = 64 << 10
)

func (r *record) claim() string { return r.Namespace + "/" + r.Name }

func (r *record) label() string { return "ResourceClaim " + r.claim() }

func recordPath(dir, uid string) string { return filepath.Join(dir, uid+recordSuffix) }

func (r *record) write(dir string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return fileio.WriteDurably(recordPath(dir, r.UID), append(data, '\n'), 0o600)
}

func removeRecord(dir, uid string) error {
	if err := fileio.Remove(recordPath(dir, uid)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// recorded returns the UIDs of the claims that have a record.
func recorded(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read the records of prepared claims: %w", err)
	}
	var uids []string
	for _, e := range entries {
		if uid, isRecord := strings.CutSuffix(e.Name(), recordSuffix); isRecord && isUID(uid) {
			uids = append(uids, uid)
		}
	}
	return uids, nil
}

func readRecord(dir, uid string) (*record, error) {
	data, err := fileio.ReadFile(recordPath(dir, uid), maxRecord)
	if err != nil {
		return nil, err
	}
	return parseRecord(data, uid)
}

func parseRecord(data []byte, uid string) (*record, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	r := &record{}
	switch err := d.Decode(r); {
	case err != nil:
		return nil, err
	case d.More():
		return nil, errors.New("there is more after the record")
	case r.Version != recordVersion:
		return nil, fmt.Errorf("its version is %d, not %d", r.Version, recordVersion)
	case r.UID != uid:
		return nil, fmt.Errorf("it is the record of the claim %q", r.UID)
	case slices.ContainsFunc(r.Devices, func(d recordDevice) bool { return d.UUID == "" || d.Device == "" }):
		return nil, errors.New("it has a device without a name or UUID")
	}
	return r, nil
}
