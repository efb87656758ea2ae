package atomicfile

import (
	"errors"
	"fmt"
	"os"
)

// Check says why Write could not write files in the directory, which it makes if it is not there. Nothing else is left.
func Check(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the directory %s: %w", dir, err)
	}
	f, err := os.CreateTemp(dir, ".check.*.tmp")
	if err != nil {
		return fmt.Errorf("write in %s: %w", dir, err)
	}
	_, err = f.Write([]byte("check"))
	if err := errors.Join(err, f.Close(), os.Remove(f.Name())); err != nil {
		return fmt.Errorf("write in %s: %w", dir, err)
	}
	return nil
}
