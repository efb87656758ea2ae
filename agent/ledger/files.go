package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"gpu-cdi-plugin/internal/fileio"
)

// Files are the paths of what a ledger keeps over a restart. An empty path means that it is not kept.
type Files struct {
	// Parents has the UUID of the GPU of each MIG device, also of those that are gone and still held. It is in a directory
	// that a reboot empties.
	Parents string
	// Forgotten has the entries that an administrator has had forgotten.
	Forgotten string
}

// maxFile bounds each file, in bytes.
const maxFile = 4 << 20

// read returns the content of the files. Files that do not exist are empty.
func (f *Files) read() (parents map[string]string, forgotten map[string]bool, err error) {
	return parents, forgotten, errors.Join(readJSON(f.Parents, &parents), readJSON(f.Forgotten, &forgotten))
}

func (f *Files) writeParents(parents map[string]string) error {
	return writeJSON(f.Parents, parents, fileio.Replace)
}

func (f *Files) writeForgotten(forgotten map[string]bool) error {
	return writeJSON(f.Forgotten, forgotten, fileio.WriteDurably)
}

func readJSON(path string, into any) error {
	if path == "" {
		return nil
	}
	data, err := fileio.ReadFile(path, maxFile)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

func writeJSON(path string, value any, write func(string, []byte, fs.FileMode) error) error {
	if path == "" {
		return nil
	}
	data, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return write(path, append(data, '\n'), 0o600)
}
