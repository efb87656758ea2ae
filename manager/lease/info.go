package lease

import (
	"encoding/json"
	"path/filepath"
	"regexp"

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
		d := Device{ID: id}
		if !deviceName.MatchString(d.device()) {
			return Info{}
		}
		data, err := fileio.ReadFile(filepath.Join(dir, d.device()+".json"), maxInfo)
		if err != nil || json.Unmarshal(data, &info) != nil { // the device is one of which nothing is known
			return Info{}
		}
		return info
	}
}
