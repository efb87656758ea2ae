package main

import (
	"bytes"
	"fmt"
	"io"
	"time"

	"gpu-cdi-plugin/internal/fileio"
)

// inputTime is how long to wait for a pipe.
const inputTime = 10 * time.Second

// readNamed reads the file that the user named, or standard input if the name is "-". Empty input is an error. If
// there are more than limit bytes, the error wraps tooLarge.
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
