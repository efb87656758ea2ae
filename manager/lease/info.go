package lease

import (
	"encoding/json"
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"gpu-cdi-plugin/internal/fileio"
)

// maxInfo is the size of the largest file about a device, in bytes.
const maxInfo = 64 << 10

// deviceName has no path separators.
var deviceName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

// Describer returns a function that reads what the plugin says about a device, given by its ID, in the file NAME.json
// in a directory, where NAME is the ID without the number of a replica.
func Describer(dir string) func(id string) Info {
	return func(id string) Info {
		var info Info
		data, _, err := read(dir, id, ".json", maxInfo)
		if err != nil || json.Unmarshal(data, &info) != nil { // the device is one of which nothing is known
			return Info{}
		}
		return info
	}
}

// maxUse is the size of the largest file about the use of a device, in bytes.
const maxUse = 4 << 10

// Use is what uses a device without a lease, as the plugin says it: nothing if the reason is empty.
type Use struct {
	Reason string    `json:"reason"`
	PIDs   []int     `json:"pids"` // as far as they are known
	Since  time.Time `json:"-"`
}

// UsedBy returns a function that reads what uses a device without a lease, and since when that is known, in the file
// NAME.use beside NAME.json, of which see Describer. The plugin writes it before it lists the device as unhealthy, and
// only while nothing else is wrong with it.
func UsedBy(dir string) func(id string) Use {
	return func(id string) Use {
		var use Use
		data, since, err := read(dir, id, ".use", maxUse)
		if err != nil || json.Unmarshal(data, &use) != nil {
			return Use{}
		}
		use.Reason, use.Since = printable(strings.TrimSpace(use.Reason)), since
		return use
	}
}

// read reads a file about a device, and returns when that was written.
func read(dir, id, suffix string, limit int64) ([]byte, time.Time, error) {
	d := Device{ID: id}
	if !deviceName.MatchString(d.device()) {
		return nil, time.Time{}, fs.ErrNotExist
	}
	f, _, err := fileio.OpenRegular(filepath.Join(dir, d.device()+suffix))
	if err != nil {
		return nil, time.Time{}, err
	}
	defer f.Close()
	data, info, err := fileio.ReadRegular(f, limit)
	if err != nil {
		return nil, time.Time{}, err
	}
	return data, info.ModTime(), nil
}
