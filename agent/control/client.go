package control

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"
	"unicode"

	"gpu-cdi-plugin/internal/unixsocket"
)

// ErrNoServer means that no program answers at the control socket.
var ErrNoServer = errors.New("no program answers at the control socket")

// ErrNotAllowed means that this process's user may not use the control socket.
var ErrNotAllowed = errors.New("only root and the program's own user may use the control socket")

// ErrOtherVersion means that the program does not know the request, since it is another version of this program.
var ErrOtherVersion = errors.New("another version of this program runs, which does not know the request")

// RefusedError means that the program refused the request.
type RefusedError struct{ Reason string }

func (e *RefusedError) Error() string { return e.Reason }

// aliveTime is how long the program may take to begin its answer. There is no limit for the rest of the answer.
const aliveTime = 10 * time.Second

// Send sends a request to the program that serves the socket in a directory, and returns the sentence about what was
// done, or what the act returns. The function `progress` gets sentences about the work in progress. If no program
// answers, nothing was done and the error wraps ErrNoServer. If the program refuses the request, the error is a
// *RefusedError, or wraps ErrOtherVersion.
func Send(ctx context.Context, dir string, r Request, progress func(string)) (string, error) {
	if err := r.Check(); err != nil {
		return "", err
	}
	body, err := json.Marshal(r)
	if err != nil {
		return "", fmt.Errorf("make the request: %w", err)
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://control/v1", bytes.NewReader(body))
	if err != nil {
		return "", fmt.Errorf("make the request: %w", err)
	}
	answer, err := unixsocket.NewHTTPClient(SocketPath(dir), aliveTime).Do(q)
	switch {
	case ctx.Err() != nil:
		return "", context.Cause(ctx)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		return "", fmt.Errorf("%w %s", ErrNoServer, SocketPath(dir))
	case errors.Is(err, fs.ErrPermission):
		return "", fmt.Errorf("%w %s", ErrNotAllowed, SocketPath(dir))
	case unixsocket.IsEnd(err):
		return "", fmt.Errorf("send a request to %s: %w", SocketPath(dir), unixsocket.ErrEnded)
	case err != nil:
		if request, ok := errors.AsType[*url.Error](err); ok {
			err = request.Err // without "Post" and the URL
		}
		return "", fmt.Errorf("send a request to %s: %w", SocketPath(dir), err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(answer.Body, maxLine))
		refused := &RefusedError{plain(strings.TrimSpace(string(text)))}
		if answer.StatusCode == http.StatusBadRequest { // although the request was checked
			return "", fmt.Errorf("%w: %w", ErrOtherVersion, refused)
		}
		return "", refused
	}
	result, err := readAnswer(answer.Body, progress)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return result, err
}

// plain removes from a text of several lines what could control a terminal.
func plain(text string) string {
	return strings.Map(func(c rune) rune {
		if c != '\n' && !unicode.IsPrint(c) {
			return unicode.ReplacementChar
		}
		return c
	}, text)
}

// readAnswer reads the lines of an answer.
func readAnswer(from io.Reader, progress func(string)) (string, error) {
	lines := bufio.NewScanner(from)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		var m message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			return "", fmt.Errorf("read the answer: %w", err)
		}
		switch {
		case m.Error != "":
			return "", &RefusedError{plain(m.Error)}
		case m.Result != "":
			return plain(m.Result), nil
		}
		progress(plain(m.Progress))
	}
	err := lines.Err()
	if err == nil || unixsocket.IsEnd(err) {
		err = unixsocket.ErrEnded
	}
	return "", fmt.Errorf("read the answer: %w", err)
}
