package main

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"gpu-cdi-plugin/manager/api"
	"gpu-cdi-plugin/manager/lease"
	"gpu-cdi-plugin/test/lib/testenv"
)

// terminal returns both sides of a pseudo-terminal with so many columns.
func terminal(t *testing.T, columns uint16) (control, tty *os.File) {
	t.Helper()
	control, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	testenv.Must(t, err)
	t.Cleanup(func() { _ = control.Close() })
	fd := int(control.Fd())
	testenv.Must(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	testenv.Must(t, err)
	tty, err = os.OpenFile(fmt.Sprint("/dev/pts/", number), os.O_RDWR|unix.O_NOCTTY, 0)
	testenv.Must(t, err)
	t.Cleanup(func() { _ = tty.Close() })
	testenv.Must(t, unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: 10, Col: columns}))
	return control, tty
}

// A request that waits has one line on a terminal, and the command that gets the devices begins with an empty one.
func TestWaitLineOfATerminal(t *testing.T) {
	t.Parallel()
	queued := func(position int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			event(w, api.LeaseEvent{Waiting: &lease.Waiting{Request: "1 device", Position: position, Reason: "none is free"}})
		}
	}
	hostile := func(w http.ResponseWriter, _ *http.Request) {
		event(w, api.LeaseEvent{Waiting: &lease.Waiting{Request: "1 device", Position: 1, Reason: "\x1b[31m a\nb\u009b"}})
		grants(w, nil)
	}
	const changes = "\r\x1b[Kverb waits for 1 device: place 3 in the queue, none is free" +
		"\r\x1b[Kverb waits for 1 device: place 2 in the queue, none is free"
	const lines = "verb waits for 1 device: place 3 in the queue, none is free\r\n" +
		"verb waits for 1 device: place 2 in the queue, none is free\r\n"
	for name, c := range map[string]struct {
		columns uint16
		env     []string
		quiet   bool
		fails   bool
		grants  http.HandlerFunc
		want    string
	}{
		"a wide one":   {columns: 100, want: changes + "\r\x1b[K"},
		"unknown size": {columns: 0, want: changes + "\r\x1b[K"},
		"the line is cut": {
			columns: 40, want: "\r\x1b[Kverb waits for 1 device: place 3 in ..." +
				"\r\x1b[Kverb waits for 1 device: place 2 in ..." + "\r\x1b[K",
		},
		"hardly any column":           {columns: 1, want: "\r\x1b[Kverb wa..." + "\r\x1b[Kverb wa..." + "\r\x1b[K"},
		"one that cannot clear lines": {columns: 100, env: []string{"TERM=dumb"}, want: lines},
		"quiet":                       {columns: 100, quiet: true, want: ""},
		"control characters in a reason": {
			columns: 100, grants: hostile,
			want: changes + "\r\x1b[Kverb waits for 1 device: place 1 in the queue, \\x1b[31m a; b\\u009b\r\x1b[K",
		},
		"the request fails": {
			columns: 100, fails: true, want: changes + "\r\x1b[K", grants: func(w http.ResponseWriter, _ *http.Request) {
				event(w, api.LeaseEvent{Error: &api.Error{Text: "no", Code: http.StatusUnprocessableEntity}})
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			end := grants
			if c.grants != nil {
				end = c.grants
			}
			a, _ := serveLeases(t, func(w http.ResponseWriter, r *http.Request) {
				queued(3)(w, r)
				queued(2)(w, r)
				end(w, r)
			})
			control, tty := terminal(t, c.columns)
			a.Stderr, a.Env = tty, c.env
			cmd := a.leaseCreateCommand()
			cmd.Use = "verb"
			_, err := a.acquire(t.Context(), leaseOptions{cmd: cmd, wait: forever, quiet: c.quiet}, api.LeaseRequest{})
			if (err != nil) != c.fails {
				t.Error(err)
			}
			fmt.Fprint(tty, "<the end>")
			if got := readTo(t, control, "<the end>"); got != c.want {
				t.Errorf("the terminal gets\n%q, want\n%q", got, c.want)
			}
		})
	}
}

// readTo reads a file up to a text, and returns what is before that.
func readTo(t *testing.T, f *os.File, end string) string {
	t.Helper()
	var got []byte
	for buffer := make([]byte, 1000); ; {
		n, err := f.Read(buffer)
		testenv.Must(t, err)
		got = append(got, buffer[:n]...)
		if before, found := bytes.CutSuffix(got, []byte(end)); found {
			return string(before)
		}
	}
}
