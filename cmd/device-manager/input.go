package main

import (
	"bytes"
	"fmt"
	"io"
	"time"

	"gpu-cdi-plugin/internal/fileio"
)

// inputTime is how long a pipe is waited for.
const inputTime = 10 * time.Second

// readNamed reads a file that the user named, or standard input for -. It is an error if there is nothing in it, and
// wraps tooLarge if there are more than limit bytes.
func (a *app) readNamed(path string, limit int64, tooLarge error) ([]byte, error) {
	var data []byte
	var err error
	if path == "-" {
		path = "standard input"
		data, err = io.ReadAll(io.LimitReader(a.Stdin, limit+1))
	} else {
		data, err = fileio.ReadInput(path, limit+1, inputTime)
	}
	switch {
	case err != nil:
		return nil, err
	case int64(len(data)) > limit:
		return nil, fmt.Errorf("%s: %w", path, tooLarge)
	case len(bytes.TrimSpace(data)) == 0:
		return nil, fmt.Errorf("%s is empty", path)
	}
	return data, nil
}
