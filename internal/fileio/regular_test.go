package fileio

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpu-cdi-plugin/test/lib/testenv"

	"golang.org/x/sys/unix"
)

func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	for name, content := range map[string]string{"empty": "", "small": "12345678", "large": "123456789"} {
		testenv.Must(t, os.WriteFile(path(name), []byte(content), 0o600))
	}
	testenv.Must(t, unix.Mkfifo(path("fifo"), 0o600))
	for name, want := range map[string]string{"empty": "", "small": "12345678"} {
		if got, err := ReadFile(path(name), 8); string(got) != want || err != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	for name, want := range map[string]string{
		"large": "has 9 bytes, the limit is 8", "fifo": "is a FIFO, not a regular file", ".": "is a directory",
		"missing": "no such file",
	} {
		data, err := ReadFile(path(name), 8)
		if data != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %q, %v; want an error with %q", name, data, err, want)
		}
	}
	if _, err := ReadFile("/dev/zero", 8); err == nil || !strings.Contains(err.Error(), "is a character device") {
		t.Errorf("a device: %v", err)
	}
}

func TestReadInput(t *testing.T) {
	const within = 200 * time.Millisecond
	dir := t.TempDir()
	file, fifo := filepath.Join(dir, "file"), filepath.Join(dir, "fifo")
	testenv.Must(t, os.WriteFile(file, []byte("12345678"), 0o600))
	testenv.Must(t, unix.Mkfifo(fifo, 0o600))
	pipe := func(text string, end bool) string { // as of a shell's <(command)
		t.Helper()
		r, w, err := os.Pipe()
		if err == nil {
			_, err = w.WriteString(text)
		}
		if err == nil && end {
			err = w.Close()
		}
		testenv.Must(t, err)
		t.Cleanup(func() { _, _ = r.Close(), w.Close() })
		return fmt.Sprintf("/proc/self/fd/%d", r.Fd())
	}
	for name, c := range map[string]struct{ path, want, err string }{
		"a file, cut at the limit":        {file, "1234", ""},
		"an empty device":                 {"/dev/null", "", ""},
		"a device without an end":         {"/dev/zero", "\x00\x00\x00\x00", ""},
		"a pipe":                          {pipe("123", true), "123", ""},
		"a pipe that was read before":     {pipe("", true), "", "the pipe is empty"},
		"a pipe into which nothing comes": {pipe("", false), "", "writer did not close it within 200ms"},
		"a pipe that is not ended":        {pipe("12", false), "", "writer did not close it within 200ms"},
		"a FIFO without a writer":         {fifo, "", "writer did not close it within 200ms"},
		"a directory":                     {dir, "", "is a directory"},
		"nothing":                         {dir + "/none", "", "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			limit := time.Minute
			if strings.Contains(c.err, within.String()) {
				limit = within
			}
			data, err := ReadInput(c.path, 4, limit)
			if string(data) != c.want || (err == nil) != (c.err == "") ||
				err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("%q, %v; want %q, an error with %q", data, err, c.want, c.err)
			}
		})
	}
	go func() {
		time.Sleep(within / 4)
		_ = os.WriteFile(fifo, []byte("late"), 0o600)
	}()
	if data, err := ReadInput(fifo, 8, time.Minute); string(data) != "late" || err != nil {
		t.Errorf("a FIFO whose writer comes late: %q, %v", data, err)
	}
}
